"""Run by test_precision_export.py: the receiving half of a broadcast group for quantized tensors, without an engine. Writes each version that it got to a
file."""

import datetime
import sys
import time

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world

from miles.rundir import RunDir
from miles.weights.acks import Ack, write_ack
from miles.weights.digest import digest
from miles.weights.store import WeightStore

run, versions = RunDir(sys.argv[1]), int(sys.argv[2])
store, group, timeout = WeightStore(run), None, datetime.timedelta(seconds=60)
for version in range(2, versions + 1):  # the first is on disk
    while (store.newest() or 0) < version:
        time.sleep(0.01)
    manifest = store.manifest(version)
    g = manifest.extra["group"]
    if group is None:
        rendezvous = dist.TCPStore(g["address"], g["port"], g["world"], is_master=False, timeout=timeout)
        group, _ = _new_process_group_helper(g["world"], 1, [], Backend("gloo"), PrefixStore(g["name"], rendezvous), group_name=g["name"], backend_options=None,
                                             timeout=timeout, device_id=None)
        _world.pg_group_ranks[group] = {i: i for i in range(g["world"])}
    got = {}
    for name, t in manifest.tensors.items():
        got[name] = torch.empty(t["shape"], dtype=getattr(torch, t["dtype"]))
        group.broadcast(got[name].view(torch.uint8) if got[name].is_floating_point() and got[name].element_size() == 1 else got[name], 0).wait(timeout)
        assert digest(got[name]) == t["digest"], name
    save_file(got, run.path / f"got{version}.safetensors")
    write_ack(run, Ack(0, run.current_epoch("rollout"), 0, version, manifest.digest))
