"""torch.distributed and megatron-core's parallel state, started from a world that can broadcast a few bytes (MPI)."""

from __future__ import annotations

import datetime
import json
import os
import socket
from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

import miles.platform
from miles.core import EnvironmentFault, Layout, MilesError


def init_distributed(rank: int, layout: Layout, broadcast_bytes: Callable[[bytes | None], bytes], *, seed: int, timeout_s: float = 600.0) -> None:
    """Join `layout.world` ranks into torch.distributed and set up megatron-core's groups and random state.

    `broadcast_bytes(data)` returns rank 0's `data` on every rank (others pass None). Rank 0 lets the operating system choose the port, so
    several runs share a machine without agreeing on ports.

    Raises EnvironmentFault: rank 0 cannot listen. MilesError: the ranks do not find each other within `timeout_s`; one of them may have been
    killed in this moment, so the step is to be started again, as often as the run allows.
    """
    platform = miles.platform.current()
    if platform.name == "cuda":
        torch.cuda.set_device(platform.device)
    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        store = _meet(rank, layout.world, broadcast_bytes, timeout)
        dist.init_process_group(platform.backend, store=store, rank=rank, world_size=layout.world, timeout=timeout)
    except (RuntimeError, OSError) as e:
        raise MilesError(f"trainer rank {rank}: torch.distributed ({platform.backend}) did not start: {e}",
                         f"{layout.world} ranks that live and reach rank 0 over TCP",
                         "if no rank was killed, check the network between the trainer nodes (GLOO_SOCKET_IFNAME / NCCL_SOCKET_IFNAME choose the interface)") from e
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp, pipeline_model_parallel_size=layout.pp, context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep, expert_tensor_parallel_size=layout.etp,
        distributed_timeout_minutes=max(1, round(timeout_s / 60)),
    )
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def close_distributed() -> None:
    """Leave the groups; afterwards `init_distributed` may be called again."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _meet(rank: int, world: int, broadcast_bytes: Callable[[bytes | None], bytes], timeout: datetime.timedelta) -> dist.TCPStore:
    """A TCP store on a free port of rank 0's node, with all ranks connected."""
    if rank == 0:
        host = _reachable_host()
        try:
            store = dist.TCPStore(host, 0, world, is_master=True, timeout=timeout, wait_for_workers=False)
        except (RuntimeError, OSError) as e:
            raise EnvironmentFault(f"trainer rank 0 cannot listen on {host}: {e}", "an address of this node",
                                   "check what this node's host name resolves to") from e
        broadcast_bytes(json.dumps({"host": host, "port": store.port}).encode())
        return store
    address = json.loads(broadcast_bytes(None))
    return dist.TCPStore(address["host"], address["port"], world, is_master=False, timeout=timeout, wait_for_workers=False)


def _reachable_host() -> str:
    """The address of this node's host name; the loopback address where the name does not resolve (one machine, no DNS)."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return "127.0.0.1"
