import subprocess
import sys

import pytest

PROGRAM = """
import sys
import torch
from miles.weights.allocator import give_back

def resident():
    return 1024 * int(next(x for x in open("/proc/self/status") if x.startswith("RssAnon")).split()[1])

assert sys.argv[1] == "kept" or give_back(4 << 20)
torch.ones(8 << 20, dtype=torch.uint8)  # when the first of a size is freed, malloc learns to keep that size
before, held = resident(), []
for _ in range(2):
    gathered = []
    for _ in range(16):  # a snapshot's small tensors between the ones that are let go of
        gathered.append(torch.ones(8 << 20, dtype=torch.uint8))
        held.append(torch.ones(64 << 10, dtype=torch.uint8))
    del gathered
print(resident() - before)
"""


@pytest.mark.parametrize(("how", "kept"), [("given back", False), ("kept", True)])
def test_large_memory_that_was_freed_goes_back_to_the_system(how, kept):
    """`kept`: what malloc does by itself; where it stops doing that, `give_back` is of no more use."""
    found = int(subprocess.run([sys.executable, "-c", PROGRAM, how], check=True, capture_output=True, text=True, env={"PATH": "", "PYTHONPATH": ":".join(sys.path)}).stdout)
    assert (found > 100 << 20) is kept, found
