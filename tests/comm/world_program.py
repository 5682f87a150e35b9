"""Run under mpiexec by test_comm.py: `world_program.py world` or `link RUN ROLE EPOCH [HANDSHAKE_S [PAUSE_S]]`."""

import os
import sys
import time

from miles.comm import Link, World, handshake
from miles.core import Role
from miles.rundir import RunDir


def world():
    w = World(3)
    assert w.broadcast_bytes(b"abc" * 1000 if w.leader else None) == b"abc" * 1000
    assert w.gather_bytes(bytes([w.rank]) * 70_000 * w.rank) == [b"", b"\1" * 70_000, b"\2" * 140_000]
    w.post((w.rank + 1) % 3, {"from": w.rank, "i": 0})
    w.post((w.rank + 1) % 3, {"from": w.rank, "i": 1})
    got = []
    while len(got) < 2:
        got += list(w.poll())
        time.sleep(0.001)
    assert got == [((w.rank - 1) % 3, {"from": (w.rank - 1) % 3, "i": i}) for i in (0, 1)], got
    print("world ok", flush=True)


def link(path, role, epoch, handshake_s=20.0, pause_s=0.0):
    """Ticks until it is killed; a rollout that has been woken answers and leaves without a goodbye."""
    handshake.HANDSHAKE_S = float(handshake_s)
    end = Link(RunDir(path), Role(role), int(epoch))
    end.tick()
    time.sleep(float(pause_s))
    while True:
        end.tick()
        if end.connected:
            end.wake()
            if end.woken():
                print(f"{role} woken", flush=True)
                if role == "rollout":
                    end.wake()
                    time.sleep(0.3)
                    os._exit(0)
        time.sleep(0.01)


if sys.argv[1] == "world":
    world()
else:
    link(*sys.argv[2:])
