"""Run by weights.py: `weights_memory.py publisher RUN ELEMENTS BUCKET` and `weights_memory.py rank RUN FOLDER`, each a process whose memory is looked at.

The publisher holds a model of bf16 tensors and publishes keyframe, three deltas and a keyframe of it, gathered in buckets of BUCKET bytes as a trainer's
leader gathers it: a bucket, and each tensor of it once more. It prints the most host memory that it had beside the model meanwhile, sampled every millisecond:
anonymous and shared pages. (Pages of the file that it has just written and digests are the page cache's.)

A rank shares with those that have the same FOLDER. It goes to each version that it reads from its standard input, and prints what it has read from files for
it, and its part of the shared memory that it has mapped: pages that n processes have mapped count as one n-th for each.
"""

import json
import sys
import tempfile
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from miles.rundir import RunDir
from miles.weights.digest import bits
from miles.weights.node import NodeFolder
from miles.weights.patch import Patch, encode_patch, write_patch
from miles.weights.publish import Publisher
from miles.weights.shared import NodeCopy
from miles.weights.store import WeightStore

TENSORS, VERSIONS = 32, 5
SAMPLE_S = 0.001


def fields(path: str, *names: str) -> int:
    """Sum of these of the `name: value` lines of a file in /proc, in its unit."""
    found = dict(line.split(":", 1) for line in Path(path).read_text().splitlines() if ":" in line)
    return sum(int(found[n].split()[0]) for n in names)


class Peak:
    """The most resident memory, in bytes, beyond what there was when it was made, of the times that it is entered."""

    def __init__(self):
        self._before, self.extra = self._now(), 0

    @staticmethod
    def _now() -> int:
        return 1024 * fields("/proc/self/status", "RssAnon", "RssShmem")

    def __enter__(self):
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self.extra = max(self.extra, self._now() - self._before)


def compiled() -> None:
    """Load what the codec compiles: it is no copy of weights, and not read for one."""
    old = torch.arange(1 << 12, dtype=torch.bfloat16)
    with tempfile.NamedTemporaryFile() as f:
        write_patch(f, encode_patch([("w", moved := old + 1)], {"w": old}))
        f.flush()
        Patch(Path(f.name)).apply({"w": old})
    assert torch.equal(old, moved)


def publisher(run: RunDir, elements: int, bucket: int) -> None:
    g = torch.Generator().manual_seed(3)
    model = {f"w{i:02d}": (torch.randn(elements // TENSORS, generator=g) * 0.02).bfloat16() for i in range(TENSORS)}
    per_bucket = max(1, bucket // model["w00"].nbytes)

    def gathered():
        names = list(model)
        for i in range(0, TENSORS, per_bucket):
            received = {n: model[n].clone() for n in names[i:i + per_bucket]}
            for name in list(received):  # as `export_hf` does: what has been yielded is let go of
                yield name, received.pop(name).clone()

    compiled()
    publisher, peak = Publisher(run, run.new_epoch("trainer"), WeightStore(run), lambda: None, lambda s: ""), Peak()
    for step in range(VERSIONS):
        with peak:
            publisher.publish(step, gathered())
        for t in model.values():
            bits(t)[step::67] ^= 1
    print(json.dumps({"extra": peak.extra, "snapshot": sum(t.nbytes for t in model.values())}))


def rank(run: RunDir, folder: Path) -> None:
    compiled()
    node = NodeFolder(folder, run)
    copy = NodeCopy(WeightStore(run), node.shared("copy"))
    for line in sys.stdin:
        read = fields("/proc/self/io", "rchar")
        copy.advance(int(line))
        copy.release()
        print(json.dumps({"read": fields("/proc/self/io", "rchar") - read, "shared": 1024 * fields("/proc/self/smaps_rollup", "Pss_Shmem")}), flush=True)
    copy.forget()
    node.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    role, run, *of = sys.argv[1:]
    publisher(RunDir(run), *map(int, of)) if role == "publisher" else rank(RunDir(run), Path(of[0]))
