"""Run by test_publish.py: SGLang's own half of a broadcast group, without a server. Prints the digest of what it received."""

import json
import sys
import time
from pathlib import Path

import torch
from sglang.srt.utils.common import init_custom_process_group

from miles.weights.digest import digest

run, rank = Path(sys.argv[1]), sys.argv[2]
deadline = time.time() + 30
while time.time() < deadline:
    found = [p for p in sorted((run / "weights").glob("v*/MANIFEST.json")) if json.loads(p.read_text())["encoding"] == "broadcast"]
    if found:
        break
    time.sleep(0.02)
m = json.loads(found[0].read_text())
g = m["extra"]["group"]
group = init_custom_process_group(backend="gloo", init_method=f"tcp://{g['address']}:{g['port']}", world_size=g["world"], rank=g["members"][rank],
                                  group_name=g["name"])
for name, t in m["tensors"].items():
    buffer = torch.empty(t["shape"], dtype=getattr(torch, t["dtype"]))
    torch.distributed.broadcast(buffer, src=0, group=group)
    assert digest(buffer) == t["digest"], name
print("received", m["version"], flush=True)
