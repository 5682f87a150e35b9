"""The machine under the trainer: which device tensors live on and which torch.distributed backend joins the ranks.

`activate()` must run before the first `import megatron.core` (importing `miles.trainer` does it). With CUDA it changes nothing;
without, it adapts megatron-core to CPU: see `miles.platform.cpu`, the one place that knows about it. Must not know about learning.
"""

from __future__ import annotations

import functools
import logging
import os
from dataclasses import dataclass

import torch

from miles.platform import cpu

LOCAL_RANK_VARIABLES = ("SLURM_LOCALID", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "LOCAL_RANK")


@dataclass(frozen=True)
class Platform:
    """Device and communication backend of this process."""

    name: str  # cuda | cpu
    device: torch.device
    backend: str  # nccl | gloo


@functools.cache
def current() -> Platform:
    """The platform of this process: a CUDA device with NCCL where CUDA is, else the CPU with gloo.

    Ranks of a node that see several GPUs take them in turn, by the local rank that the launcher announces.
    """
    if torch.cuda.is_available():
        local = next((int(os.environ[name]) for name in LOCAL_RANK_VARIABLES if name in os.environ), 0)
        return Platform("cuda", torch.device("cuda", local % torch.cuda.device_count()), "nccl")
    return Platform("cpu", torch.device("cpu"), "gloo")


def activate() -> Platform:
    """Make `megatron.core` importable and correct on this machine. Idempotent.

    Raises EnvironmentFault: megatron-core is missing, is not the version the CPU adaptation was written for, or was imported before.
    """
    platform = current()
    # hundreds of lines a start about its own deprecations; errors still pass
    logging.getLogger("megatron").setLevel(logging.ERROR)
    if platform.name == "cpu":
        cpu.adapt_megatron()
    return platform
