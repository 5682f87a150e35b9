"""Run under mpiexec by test_comm.py: `world_program.py world`, `frozen` or `link RUN ROLE EPOCH [HANDSHAKE_S [PAUSE_S]]`."""

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


def frozen():
    """Rank 2 takes no message until rank 0 has heard from all others, long after 2,000 messages were sent to it."""
    w, got, answers = World(3), [], 0
    end = time.monotonic() + 40
    if w.rank == 0:
        for i in range(2000):
            w.post(2, {"i": i})
        for rank in (0, 1):
            w.post(rank, {"i": -1})
        while (answers < 2 or not got) and time.monotonic() < end:
            for source, message in w.poll():
                if "i" in message:
                    w.post(0, {"answer": 0})
                elif message["answer"] == 2000:
                    got.append(source)
                else:
                    answers += 1
                    if answers == 2:
                        os.close(os.open("thaw", os.O_CREAT))
            time.sleep(0.001)
        assert answers == 2 and got == [2], (answers, got)
    else:
        while w.rank == 2 and not os.path.exists("thaw") and time.monotonic() < end:
            time.sleep(0.01)
        while len(got) < (2000 if w.rank == 2 else 1) and time.monotonic() < end:
            got += [m["i"] for _, m in w.poll()]
            time.sleep(0.001)
        assert got == (list(range(2000)) if w.rank == 2 else [-1]), got[-5:]
        w.post(0, {"answer": 2000 if w.rank == 2 else 1})
    print("frozen ok", flush=True)


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
elif sys.argv[1] == "frozen":
    frozen()
else:
    link(*sys.argv[2:])
