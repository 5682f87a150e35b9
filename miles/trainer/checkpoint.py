"""Model, optimizer and random state of all ranks in a folder, and back, bit for bit.

Uses megatron-core's dist_checkpointing (format `torch_dist`), which reshards over tensor, pipeline, expert and data parallel sizes. It writes
`__R_W.distcp` files (tensors, one per rank), `.metadata` and `metadata.json`. Pickle in that format: `.metadata` is a pickle, and tensors and
small objects are in torch.save files. On load, `.metadata` is first read by an unpickler that knows only the classes such a file holds, so a
file that names anything else is refused before torch reads it; the torch.save files are loaded with `weights_only=True`, which megatron's
own loader does for tensors only (`_plain_objects_only`).

The writers are threads of this process: megatron would start a manager process for a queue (which imports the program again), and a plain
queue does the same work for a synchronous save.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import queue
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.torch import MCoreLoadPlanner
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.distributed.checkpoint.api import CheckpointException

from miles.core import EnvironmentFault
from miles.trainer.model import PolicyModel

METADATA_MODULES = ("torch.distributed.checkpoint.", "torch.distributed._shard.")
METADATA_NAMES = {("torch", "Size"), ("torch.serialization", "_get_layout")}


def save_checkpoint(folder: str | Path, model: PolicyModel, optimizer) -> None:
    """Write into `folder`, which rank 0 has created empty; a collective call, complete when it returns. The caller publishes the folder
    (sync, rename, marker last). May be called before the first step.

    Raises EnvironmentFault: the folder cannot be written.
    """
    filesystem_async._results_queue = queue.Queue()
    metadata = _format()
    try:
        dist_checkpointing.save(_state(model, optimizer, metadata, loading=False), str(folder),
                                content_metadata={k: v for k, v in metadata.items() if k != "dp_cp_group"})
    except (OSError, CheckpointException) as e:  # CheckpointException is a BaseException: it would pass every `except Exception`
        reason = str(e).strip().splitlines()[-1:]
        raise EnvironmentFault(f"checkpoint {folder} could not be written: {' '.join(reason)}", "a writable folder with enough space",
                               "free space or choose another run root; the run goes on from the last complete checkpoint") from e


def load_checkpoint(folder: str | Path, model: PolicyModel, optimizer) -> None:
    """Read a checkpoint into the model and optimizer of this layout (which may differ from the one that saved), and restore random state.

    Raises EnvironmentFault: no checkpoint there, or one whose metadata is not what this format holds.
    """
    folder = Path(folder)
    _check_metadata(folder / ".metadata")
    with _plain_objects_only():
        state = dist_checkpointing.load(_state(model, optimizer, _format(), loading=True), str(folder))
    model.chunks[0].module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"]["torch"])
    get_cuda_rng_tracker().set_states(state["rng"]["tracker"])


def _state(model: PolicyModel, optimizer, metadata: dict, *, loading: bool) -> dict:
    weights = model.chunks[0].module.sharded_state_dict(metadata=metadata)
    return {
        "model": weights,
        "optimizer": optimizer.sharded_state_dict(weights, is_loading=loading, metadata=metadata),
        "rng": ShardedObject("rng", {"torch": torch.get_rng_state(), "tracker": get_cuda_rng_tracker().get_states()},
                             (dist.get_world_size(),), (dist.get_rank(),), replica_id=0),
    }


def _format() -> dict:
    """How the optimizer state is laid out: per parameter, so that every parallel size may change."""
    return {
        "distrib_optim_sharding_type": "fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True, "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


@contextlib.contextmanager
def _plain_objects_only():
    """Inside, small objects of a checkpoint are unpickled as numbers, strings, containers and tensors only."""

    def load_bytes(planner, read_item, value: io.BytesIO) -> None:
        planner.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)

    MCoreLoadPlanner.load_bytes = load_bytes  # shadows the inherited method
    try:
        yield
    finally:
        del MCoreLoadPlanner.load_bytes


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str):
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or module.startswith(METADATA_MODULES) or (module, name) in METADATA_NAMES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name}")


def _check_metadata(path: Path) -> None:
    if not path.is_file():
        raise EnvironmentFault(f"no checkpoint metadata {path}", "a folder written by save_checkpoint", "resume from another checkpoint")
    try:
        with path.open("rb") as file:
            _MetadataUnpickler(file).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, ImportError) as e:
        raise EnvironmentFault(f"{path} is damaged, or names what a checkpoint never holds: {e}", "metadata written by save_checkpoint",
                               "resume from another checkpoint") from e
