#!/usr/bin/env -S sh -c 'exec "$(dirname "$0")/../../.venv/bin/python" "$0" "$@"'
"""The trainer's state on disk against the disk, and streaming against doing one thing after the other: tools/bench/optimizer.py [--quick] [--json] [--folder F].

2 GB of state (--quick: 256 MB; streamed: Adam's, of one fp32 parameter), in F (default: the system's temporary folder; it must be on a local disk). All in one run,
every measure in turns with its baseline, the best of each (others may use the machine):

bandwidth       bytes read and written a second by a step that computes nothing (digests included), against two threads that read one file and write
                another sequentially, past the page cache where the file system allows it, in blocks of the same size and with one fsync
step            seconds of a step of Adam, against the longer of that plain I/O and of the same Adam over state in memory
overlap         steps a second against read, compute, write of one bucket after the other, with the same digests. Its limit is the longer of plain I/O
                and compute: `gain_at_most` says what the gain would be here, were overlap perfect
memory          buffers, and what the resident set grows by during a step, in buckets, to a hundredth of one
pause, resume   bytes a second of a trainer that gives its device memory back and takes it again (miles.trainer.memory), with tensors of the host in the
                place of a GPU's, against a copy of the same bytes from memory that is then freed, or for a resume into new memory; by way of a file (digests
                included) against the slower of that copy and of the same bytes written, or read, sequentially past the page cache in blocks of the same size
memory, pause   buffers, and what the resident set grows by during a pause to disk, in chunks of 64 MiB

Exit status 1 where a target is missed.
"""

import argparse
import mmap
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import xxhash

from miles.optim import StreamedAdam
from miles.optim.direct import buffer_of
from miles.optim.paused import BUFFERS, CHUNK
from miles.platform.cpu_adam import adam_
from miles.trainer.memory import DeviceMemory
from tools.bench.table import figure, tell

ITEM, FIELDS = 4, 3
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

    def one_after_the_other(self, grad: torch.Tensor, count: int, group: dict) -> None:
        for i in range(self.blocks):
            buffer = self.buffers[0]
            os.preadv(self.fds[0], [buffer], i * self.size)
            xxhash.xxh3_128_digest(buffer)
            compute(buffer, grad, count, i, group)
            xxhash.xxh3_128_digest(buffer)
            os.pwritev(self.fds[1], [buffer], i * self.size)
        os.fsync(self.fds[1])


def compute(buffer: mmap.mmap, grad: torch.Tensor, count: int, i: int, group: dict) -> None:
    fields = torch.frombuffer(buffer, dtype=torch.float32).view(FIELDS, -1)
    part = grad[i * count : (i + 1) * count]
    main, mean, square = (f[: len(part)] for f in fields)
    adam_(main, part, mean, square, group)


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


def measure_pause(folder: Path, state_bytes: int, times: int) -> list[dict]:
    tensors = [torch.randint(0, 256, (state_bytes // 8,), dtype=torch.uint8) for _ in range(8)]
    there = [torch.empty_like(t) for t in tensors]
    folder.mkdir()
    plain = Plain(folder, state_bytes // CHUNK, CHUNK)
    disk, host = DeviceMemory(tensors, device="cpu", file=folder / "paused"), DeviceMemory(tensors, device="cpu")
    seconds: dict[str, list[float]] = {}
    new, growth = [], []
    for _ in range(times):
        for name, call in (("write", plain.write), ("pause to disk", lambda: growth.append(resident_peak(disk.release))),
                           ("read", plain.read), ("resume from disk", disk.take),
                           ("copy into new memory", lambda: new.extend(t.clone() for t in there)),
                           ("copy and free", lambda: (new.reverse(), [t.copy_(new.pop()) for t in there])),
                           ("pause to host memory", host.release), ("resume from host memory", host.take)):
            seconds.setdefault(name, []).append(timed(call))
    rate = {name: state_bytes / 1e6 / min(values[1:]) for name, values in seconds.items()}
    chunks = BUFFERS + max(growth[1:]) / CHUNK  # the buffers are there before
    figures = []
    for name, io, copy in (("pause to disk", "write", "copy and free"), ("resume from disk", "read", "copy into new memory"),
                           ("pause to host memory", None, "copy and free"), ("resume from host memory", None, "copy into new memory")):
        limit = min(rate[copy], rate[io]) if io else rate[copy]
        figures.append(figure(name, "MB/s", rate[name], limit, limit, least=0.85, of_ratio=True, **{f"{what}_mb_s".replace(" ", "_"): rate[what] for what in (io, copy) if what}))
    return [
        *figures,
        figure("host memory of a pause to disk", "chunks", round(chunks, 2), None, 2, most=2),
    ]


def measure(folder: Path, state_bytes: int, bucket: int, times: int) -> list[dict]:
    elements = state_bytes // (ITEM * FIELDS)
    p = torch.nn.Parameter(torch.randn(elements))
    p.grad = torch.randn(elements)
    optimizer = StreamedAdam([{"params": [p], **HYPER}], [p.detach()], folder / "state", bucket=bucket)
    layout = optimizer.store.layout
    plain = Plain(folder, layout.buckets, layout.block_bytes)
    group = {"params": [p], "step": 1, **HYPER}
    memory = buffer_of(layout.block_bytes)

    def adam_alone() -> None:
        for i in range(layout.buckets):
            compute(memory, p.grad, bucket, i, group)

    seconds: dict[str, list[float]] = {}
    growth = []
    for _ in range(times):
        for name, call in (("plain", plain.both), ("stream", lambda: optimizer.store.step(lambda i, fields: None)), ("adam", adam_alone),
                           ("step", lambda: growth.append(resident_peak(optimizer.step))),
                           ("sequential", lambda: plain.one_after_the_other(p.grad, bucket, group))):
            seconds.setdefault(name, []).append(timed(call))
    t = {name: min(values[1:]) for name, values in seconds.items()}  # the first touches memory and files
    moved, longest = 2 * layout.file_bytes / 1e6, max(t["plain"], t["adam"])
    buckets = max(growth[1:]) / layout.block_bytes + optimizer.store.buffer_bytes / layout.block_bytes  # the buffers are there before
    return [
        figure("read + write of a step", "MB/s", moved / t["stream"], moved / t["plain"], moved / t["plain"], least=0.85, of_ratio=True),
        figure("step of Adam, over the longer of I/O and compute", "s", t["step"], longest, longest, most=1.15, of_ratio=True),
        figure("step of Adam, against one after the other", "steps/s", 1 / t["step"], 1 / t["sequential"], 1 / longest, least=GAIN, of_ratio=True,
               gain_at_most=t["sequential"] / longest),
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
