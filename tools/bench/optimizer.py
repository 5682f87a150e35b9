#!/usr/bin/env -S sh -c 'exec "$(dirname "$0")/../../.venv/bin/python" "$0" "$@"'
"""The trainer's state on disk against the disk, and streaming against doing one thing after the other: tools/bench/optimizer.py [--quick] [--json] [--folder F].

2 GB of state (--quick: 256 MB; streamed: Adam's, of one fp32 parameter), in F (default: the system's temporary folder; it must be on a local disk). All in one run,
every measure in turns with its baseline, the best of each (others may use the machine):

bandwidth       bytes read and written a second by a step that computes nothing (digests included), against two threads that read one file and write
                another sequentially, past the page cache where the file system allows it, in blocks of the same size and with one fsync
step            seconds of a step of Adam, against the longer of that plain I/O and of the same Adam over state in memory
overlap         steps a second against read, compute, write of one bucket after the other, with the same digests and the same compute. Its limit is the longer of plain I/O
                and compute: `gain_at_most` says what the gain would be here, were overlap perfect
overlap, paced  the same, on the same disk held to 1.5 GB/s of reads and 1.5 GB/s of writes, which do not share them (the transfer calls sleep until their
                bytes were due): not this disk, but one whose directions have a rate each, where there is more to overlap. Both sides are held alike
memory          buffers, and what the resident set grows by during a step, in buckets, to a hundredth of one
pause, resume   bytes a second of a trainer that gives its device memory back and takes it again (miles.trainer.memory), with tensors of the host in the
                place of a GPU's. Freed memory stays with the process (malloc is told so), for a copy to a GPU meets no new pages, and the first
                touch of those of a virtual machine costs 5 to 12 us each, or less, in no order that a limit could have too. The limit is the same bytes copied, by one thread, to or
                from buffers of 16 MiB in a ring; by way of a file (digests included) such a copy while another thread writes, or reads, as many bytes
                sequentially past the page cache in blocks of 64 MiB, neither waiting for the other: they share memory bandwidth and cores, as ours do.
                By way of host memory it is one copy between memory of the same kind
memory, pause   buffers, and what the resident set grows by during a pause to disk, in MiB

Exit status 1 where a target is missed.
"""

import argparse
import contextlib
import ctypes
import mmap
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import xxhash

from miles.optim import StreamedAdam
from miles.optim.direct import buffer_of
from miles.optim.paused import BUFFERS, CHUNK
from miles.trainer.memory import DeviceMemory
from tools.bench.table import figure, tell

ITEM, FIELDS = 4, 3
PACE = 1.5e9  # bytes/s each way of the disk that is held back
PLAIN_BLOCK = 64 << 20  # bytes of a plain transfer beside a pause or resume
GAIN = 1.6  # by overlap, to be reached
HYPER = {"lr": 1e-3, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.1, "bias_correction": True}


def open_direct(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    except OSError:
        return os.open(path, os.O_RDWR | os.O_CREAT)


class Plain:
    """Two files of the size of the state, and blocks of the size of a bucket."""

    def __init__(self, folder: Path, blocks: int, size: int):
        self.blocks, self.size = blocks, size
        self.buffers = [buffer_of(size) for _ in range(2)]
        self.fds = [open_direct(folder / f"plain.{i}") for i in range(2)]
        for fd in self.fds:
            os.posix_fallocate(fd, 0, blocks * size)
            for i in range(blocks):
                os.pwritev(fd, [self.buffers[0]], i * size)
            os.fsync(fd)

    def read(self) -> None:
        for i in range(self.blocks):
            os.preadv(self.fds[0], [self.buffers[0]], i * self.size)

    def write(self) -> None:
        for i in range(self.blocks):
            os.pwritev(self.fds[1], [self.buffers[1]], i * self.size)

    def both(self) -> None:
        """Read one file and write the other at once."""
        thread = threading.Thread(target=self.read)
        thread.start()
        self.write()
        os.fsync(self.fds[1])
        thread.join()

    def one_after_the_other(self, compute: Callable[[int, mmap.mmap], None]) -> None:
        for i in range(self.blocks):
            buffer = self.buffers[0]
            os.preadv(self.fds[0], [buffer], i * self.size)
            xxhash.xxh3_128_digest(buffer)
            compute(i, buffer)
            xxhash.xxh3_128_digest(buffer)
            os.pwritev(self.fds[1], [buffer], i * self.size)
        os.fsync(self.fds[1])


@contextlib.contextmanager
def paced(rate: float):
    """Reads of this process take, one after the other, at least their bytes / `rate` seconds, and so do writes."""
    def hold(call):
        lock, due = threading.Lock(), [0.0]

        def transfer(fd, buffers, offset):
            start = time.perf_counter()
            moved = call(fd, buffers, offset)
            with lock:
                due[0] = max(due[0], start) + moved / rate
                wait = due[0] - time.perf_counter()
            time.sleep(max(wait, 0.0))
            return moved

        return transfer

    whole = os.preadv, os.pwritev
    os.preadv, os.pwritev = map(hold, whole)
    try:
        yield
    finally:
        os.preadv, os.pwritev = whole


def timed(call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def resident_peak(call) -> int:
    """Bytes by which the resident set grows at most while `call` runs."""
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before = _status("VmRSS")
    call()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def keep_freed_memory() -> None:
    """For the rest of this process malloc gives nothing back: no memory by mmap, no trimming (mallopt(3))."""
    libc = ctypes.CDLL(None)
    M_MMAP_MAX, M_TRIM_THRESHOLD = -4, -1
    if not (libc.mallopt(M_MMAP_MAX, 0) and libc.mallopt(M_TRIM_THRESHOLD, -1)):
        raise OSError("mallopt(3) keeps no freed memory here: pause and resume cannot be measured")


def beside(*calls) -> None:
    """All at once, each in a thread of its own."""
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def measure_pause(folder: Path, state_bytes: int, times: int) -> list[dict]:
    keep_freed_memory()
    tensors = [torch.randint(0, 256, (state_bytes // 8,), dtype=torch.uint8) for _ in range(8)]
    there = [t.clone() for t in tensors]
    folder.mkdir()
    plain = Plain(folder, state_bytes // PLAIN_BLOCK, PLAIN_BLOCK)
    disk, host = DeviceMemory(tensors, device="cpu", file=folder / "paused"), DeviceMemory(tensors, device="cpu")
    ring = torch.frombuffer(buffer_of(BUFFERS * CHUNK), dtype=torch.uint8).split(CHUNK)
    chunks = [chunk for t in tensors for chunk in t.split(CHUNK)]

    def stage(out: bool) -> None:
        for i, chunk in enumerate(chunks):
            staging = ring[i % BUFFERS][:len(chunk)]
            staging.copy_(chunk) if out else chunk.copy_(staging)

    def copy(source: list[torch.Tensor], to: list[torch.Tensor]) -> None:
        for a, b in zip(source, to, strict=True):
            b.copy_(a)

    seconds: dict[str, list[float]] = {}
    growth = []
    for _ in range(times):
        for name, call in (("write and copy", lambda: beside(plain.write, lambda: stage(True))), ("read and copy", lambda: beside(plain.read, lambda: stage(False))),
                           ("write", plain.write), ("pause to disk", lambda: growth.append(resident_peak(disk.release))),
                           ("read", plain.read), ("resume from disk", disk.take), ("copy", lambda: copy(tensors, there)),
                           ("pause to host memory", host.release), ("resume from host memory", host.take), ("copy back", lambda: copy(there, tensors))):
            seconds.setdefault(name, []).append(timed(call))
    rate = {name: state_bytes / 1e6 / min(values[1:]) for name, values in seconds.items()}
    figures = [figure(name, "MB/s", rate[name], rate[limit], rate[limit], least=0.85, of_ratio=True, **({f"{alone}_alone_mb_s": rate[alone]} if alone else {}))
               for name, limit, alone in (("pause to disk", "write and copy", "write"), ("resume from disk", "read and copy", "read"),
                                          ("pause to host memory", "copy", None), ("resume from host memory", "copy back", None))]
    held = (BUFFERS * CHUNK + max(growth[1:])) / (1 << 20)  # the buffers are there before
    return [*figures, figure("host memory of a pause to disk", "MiB", round(held), None, 128, most=128)]


def measure(folder: Path, state_bytes: int, bucket: int, times: int) -> list[dict]:
    elements = state_bytes // (ITEM * FIELDS)
    p = torch.nn.Parameter(torch.randn(elements))
    p.grad = torch.randn(elements)
    optimizer = StreamedAdam([{"params": [p], **HYPER}], [p.detach()], folder / "state", bucket=bucket)
    layout = optimizer.store.layout
    plain = Plain(folder, layout.buckets, layout.block_bytes)
    optimizer.param_groups[0]["step"] = 1
    memory = buffer_of(layout.block_bytes)

    def compute(i: int, buffer: mmap.mmap) -> None:
        """What a step does with a bucket: Adam, and a copy of the new values to the parameter."""
        with torch.no_grad():
            optimizer._update(i, tuple(torch.frombuffer(buffer, dtype=torch.float32).split(layout.stride)))

    def adam_alone() -> None:
        for i in range(layout.buckets):
            compute(i, memory)

    seconds: dict[str, list[float]] = {}
    growth = []
    for _ in range(times):
        for name, call in (("plain", plain.both), ("stream", lambda: optimizer.store.step(lambda i, fields: None)), ("adam", adam_alone),
                           ("step", lambda: growth.append(resident_peak(optimizer.step))),
                           ("sequential", lambda: plain.one_after_the_other(compute))):
            seconds.setdefault(name, []).append(timed(call))
    with paced(PACE):
        for _ in range(2):
            for name, call in (("paced plain", plain.both), ("paced step", optimizer.step), ("paced sequential", lambda: plain.one_after_the_other(compute))):
                seconds.setdefault(name, [float("inf")]).append(timed(call))
    t = {name: min(values[1:]) for name, values in seconds.items()}  # the first touches memory and files
    moved, longest = 2 * layout.file_bytes / 1e6, max(t["plain"], t["adam"])
    buckets = max(growth[1:]) / layout.block_bytes + optimizer.store.buffer_bytes / layout.block_bytes  # the buffers are there before
    return [
        figure("read + write of a step", "MB/s", moved / t["stream"], moved / t["plain"], moved / t["plain"], least=0.85, of_ratio=True),
        figure("step of Adam, over the longer of I/O and compute", "s", t["step"], longest, longest, most=1.15, of_ratio=True),
        figure("step of Adam, against one after the other", "steps/s", 1 / t["step"], 1 / t["sequential"], 1 / longest, least=GAIN, of_ratio=True,
               gain_at_most=t["sequential"] / longest),
        figure(f"the same at {PACE / 1e9:.2g} GB/s each way", "steps/s", 1 / t["paced step"], 1 / t["paced sequential"], 1 / max(t["paced plain"], t["adam"]), least=GAIN,
               of_ratio=True, gain_at_most=t["paced sequential"] / max(t["paced plain"], t["adam"])),
        figure("resident memory of a step", "buckets", round(buckets, 2), None, 3, most=3),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="256 MB of state instead of 2 GB")
    parser.add_argument("--folder", type=Path, help="where, on a local disk (default: the system's temporary folder)")
    parser.add_argument("--times", type=int, default=5, help="measurements of each, the first of which does not count")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    size, bucket = (256 << 20, 1 << 21) if args.quick else (2 << 30, 1 << 23)
    with tempfile.TemporaryDirectory(prefix="miles-bench-optimizer-", dir=args.folder) as name:
        figures = measure(Path(name) / "streamed", size, bucket, args.times) + measure_pause(Path(name) / "paused", size, args.times)
    return tell("optimizer", figures, args.json, state_bytes=size, bucket_bytes=bucket * ITEM * FIELDS)


if __name__ == "__main__":
    sys.exit(main())
