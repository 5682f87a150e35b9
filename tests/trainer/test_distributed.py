"""How ranks meet: what ends a run, and what only ends a step. In processes of their own, because a process joins one world only."""

import signal
import subprocess
import sys

import torch.distributed as dist

from miles.cluster.decide import NOT_RESTARTED
from miles.core import LOST_PEER

JOIN = """
import json, socket, sys
from miles.comm import run_rank
from miles.core import Layout
from miles.trainer.distributed import init_distributed

rank, host, port = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
socket.gethostbyname = lambda name: host
told = lambda data: json.dumps({"host": host, "port": port}).encode()
run_rank(lambda: init_distributed(rank, Layout(world=2), told, seed=1, timeout_s=1))
"""


PAIR = """
import os, signal, sys, torch
import torch.distributed as dist
from miles.comm import run_rank

def main():
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=int(sys.argv[1]), world_size=2)
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 0:
        sys.stdin.read()
        os.kill(os.getpid(), signal.SIGKILL)
    print("met", flush=True)
    dist.all_reduce(torch.ones(1))

run_rank(main)
"""


def join(rank: int, host: str, port: int) -> tuple[int, str]:
    """(exit code, what it said) of one rank of two whose peer does not come."""
    ended = subprocess.run([sys.executable, "-c", JOIN, str(rank), host, str(port)], capture_output=True, text=True, timeout=120)
    return ended.returncode, ended.stderr


def test_a_peer_that_dies_while_the_ranks_meet_has_the_step_started_again():
    # Somebody listens and nobody joins: what rank 1 sees of a rank 0 that was killed between the two.
    store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    code, said = join(1, "127.0.0.1", store.port)
    assert "trainer rank 1: torch.distributed (gloo) did not start" in said
    assert code == 1 and code not in NOT_RESTARTED


def test_a_rank_whose_peer_was_killed_says_so_by_its_exit_code(tmp_path):
    ranks = [subprocess.Popen([sys.executable, "-c", PAIR, str(rank), tmp_path / "meet"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
             for rank in (0, 1)]
    try:
        assert ranks[1].stdout.readline() == "met\n"
        ranks[0].stdin.close()  # now it kills itself
        assert ranks[0].wait(60) == -signal.SIGKILL
        _, said = ranks[1].communicate(timeout=60)
        assert ranks[1].returncode == LOST_PEER and "Check the logs of the remote worker" in said
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def test_another_error_of_the_library_is_no_lost_peer():
    ended = subprocess.run([sys.executable, "-c", "from miles.comm import run_rank\nrun_rank(lambda: (_ for _ in ()).throw(RuntimeError('shape mismatch')))"], timeout=60)
    assert ended.returncode == 1


def test_a_host_name_that_is_not_of_this_node_ends_the_run():
    code, said = join(0, "192.0.2.1", 0)  # TEST-NET-1: no machine has it
    assert "cannot listen on 192.0.2.1" in said
    assert code == 3 and code in NOT_RESTARTED
