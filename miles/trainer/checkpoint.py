"""Model, optimizer (a critic's too) and random state of all ranks in a folder, and back, bit for bit.

Uses megatron-core's dist_checkpointing (format `torch_dist`), which reshards over tensor, pipeline, expert and data parallel sizes. It writes
`__R_W.distcp` files (tensors, one per rank), `.metadata` and `metadata.json`. Pickle in that format: `.metadata` is a pickle, and tensors and
small objects are in torch.save files. On load, `.metadata` is first read by an unpickler that knows only the classes such a file holds, so a
file that names anything else is refused before torch reads it; the torch.save files are loaded with `weights_only=True`, which megatron's
own loader does for tensors only (`_plain_objects_only`).

Streamed optimizer state has files of its own there (miles.trainer.streamed).

Saving has three parts: `begin_checkpoint` plans it together with the other ranks and copies what this rank writes to the host; a thread of this process
writes and syncs the copies and takes their digests while training goes on; `Saving.finish` gathers what was written into the metadata. (Megatron's own
asynchronous caller starts processes: forked ones inherit MPI and CUDA, spawned ones import the program again.)
"""

from __future__ import annotations

import contextlib
import io
import pickle
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import MCoreLoadPlanner
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.distributed.checkpoint.api import CheckpointException

from miles.core import EnvironmentFault
from miles.core.at_work import at_work
from miles.optim import is_saved
from miles.trainer.critic import Critic
from miles.trainer.model import PolicyModel
from miles.trainer.streamed import begin_saving, is_streamed, restore

WAIT_S = 1.0  # seconds that the main thread waits at once: in between it shows that it lives (miles.comm.pulse)
METADATA_FILES = (".metadata", "metadata.json")
METADATA_MODULES = ("torch.distributed.checkpoint.", "torch.distributed._shard.")
METADATA_NAMES = {("torch", "Size"), ("torch.serialization", "_get_layout")}


class Saving:
    """A checkpoint that this rank is writing. `done` is of this rank; `finish` is collective, once all ranks are done and none has an `error`."""

    def __init__(self, folder: Path, request: AsyncRequest, copy_streamed: list[Callable[[], list[Path]]]):
        self.folder = folder
        self.error = ""  # why this rank could not write
        self.files: dict[str, tuple[int, str]] = {}  # what it wrote: (bytes, xxh3-128)
        self.write_s = 0.0
        self._finalize = request.finalize_fns
        self._write, self._copy_streamed = self._staged(request), copy_streamed
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        while not self.done:
            self._thread.join(WAIT_S)

    def finish(self) -> None:
        """Write the metadata. Raises EnvironmentFault: it cannot be written."""
        with _explained(self.folder):
            for finalize in self._finalize:
                finalize()
        if dist.get_rank() == 0:
            self.files |= {name: describe_file(self.folder / name) for name in METADATA_FILES}

    @staticmethod
    def _staged(request: AsyncRequest) -> Callable[[], None] | None:
        """The writing, with copies in place of the tensors that training changes. None: this rank has nothing to write."""
        if request.async_fn is None:
            return None
        rank, original, results = request.async_fn_args
        staged = request.preload_fn()  # off the GPU; a tensor that is on the host stays what it is
        buckets = [(path, key, (objects, [(item, copy.clone() if tensor.is_cpu else copy) for (item, tensor), (_, copy) in zip(tensors, copies, strict=True)]))
                   for (path, key, (_, tensors)), (_, _, (objects, copies)) in zip(original, staged, strict=True)]
        return lambda: request.async_fn(rank, buckets, results, **request.async_fn_kwargs)

    def _run(self) -> None:
        start = time.monotonic()
        try:
            with at_work(f"writing a checkpoint to {self.folder}"):
                if self._write is not None:
                    self._write()
                    self._write = None  # the copies
                    self.files = {p.name: describe_file(p) for p in sorted(self.folder.glob(f"__{dist.get_rank()}_*.distcp"))}
                self.files |= {p.name: describe_file(p) for copy in self._copy_streamed for p in copy()}
        except BaseException as e:  # said to all ranks by whoever asks
            self.error = f"{e!r}"
        self.write_s = time.monotonic() - start


def begin_checkpoint(folder: str | Path, model: PolicyModel, optimizer, critic: Critic | None = None) -> Saving:
    """Start to write the state of now into `folder`, which rank 0 has created empty; a collective call. Training may go on when it returns: what is
    written are copies. May be called before the first step. The caller finishes and publishes the folder (sync, rename, marker last).

    Raises EnvironmentFault: the folder cannot be written.
    """
    filesystem_async._results_queue = queue.Queue()
    metadata, streamed = _format(), is_streamed(optimizer)
    with _explained(folder):
        request = dist_checkpointing.save(
            _state(model, optimizer, critic, metadata, loading=False, own_files=streamed), str(folder), async_sharded_save=True, async_strategy="mcore",
            content_metadata={k: v for k, v in metadata.items() if k != "dp_cp_group"})
    return Saving(Path(folder), request, [begin_saving(Path(folder), name, o, m.chunks, m.arch) for name, m, o in _trained(model, optimizer, critic)] if streamed else [])


def describe_file(path: Path) -> tuple[int, str]:
    """(bytes, xxh3-128) of a file as it is read back."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as f:
        while block := f.read(1 << 23):
            digest.update(block)
        return f.tell(), digest.hexdigest()


def load_checkpoint(folder: str | Path, model: PolicyModel, optimizer, critic: Critic | None = None) -> None:
    """Read a checkpoint into the model and optimizer (and the critic's) of this layout, which may differ from the one that saved, and restore random state.

    Random state is each rank's own: under another number of ranks all keep what they were seeded with.

    Raises EnvironmentFault: no checkpoint there, or one whose metadata is not what this format holds.
    """
    folder = Path(folder)
    names = _read_names(folder / ".metadata")
    streamed = is_saved(folder)
    wanted = _state(model, optimizer, critic, _format(), loading=True, own_files=streamed)
    if wanted["rng"].unique_key not in names:
        del wanted["rng"]
    with _plain_objects_only():
        state = dist_checkpointing.load(wanted, str(folder))
    for name, m, o in _trained(model, optimizer, critic):
        found = state["critic"] if name == "critic" else state
        weights = {key.removeprefix(_prefix(name)): value for key, value in found["model"].items()}
        (m.chunks[0].module if m.adapters is None else m.adapters).load_state_dict(weights)
        for group in o.param_groups:
            group["step"] = found["optimizer_step"]
        if streamed:
            restore(folder, name, o, m.chunks, m.arch)
        else:
            for i, part in enumerate(o.chained_optimizers):
                part.load_parameter_state_from_fully_reshardable(found["optimizer"][i])
        m.updated()
    if "rng" in state:
        torch.set_rng_state(state["rng"]["torch"])
        get_cuda_rng_tracker().set_states(state["rng"]["tracker"])


def _trained(model: PolicyModel, optimizer, critic: Critic | None) -> list[tuple[str, PolicyModel, Any]]:
    """What has an optimizer, with the name of its files of streamed state."""
    return [("optimizer", model, optimizer), *([("critic", critic.model, critic.optimizer)] if critic else [])]


def _prefix(name: str) -> str:
    """Before the names of its tensors."""
    return "critic." if name == "critic" else ""


def _state(model: PolicyModel, optimizer, critic: Critic | None, metadata: dict, *, loading: bool, own_files: bool) -> dict:
    """`own_files`: tensors of the optimizers are in files beside these (miles.trainer.streamed)."""
    states = {}
    for name, m, o in _trained(model, optimizer, critic):
        weights = m.chunks[0].module.sharded_state_dict(prefix=_prefix(name), metadata=metadata) if m.adapters is None else m.adapters.sharded_state_dict()
        tensors = {} if own_files else {"optimizer": {i: part.sharded_param_state_fully_reshardable(weights, loading, metadata) for i, part in enumerate(o.chained_optimizers)}}
        # Of the groups of parameters the step counter alone: rates are those of the configuration, and which groups there are depends on the layout.
        states[name] = {"model": weights, **tensors, "optimizer_step": max(int(group.get("step") or 0) for group in o.param_groups)}
    policy = states.pop("optimizer")
    return {
        **policy, **states,
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
def _explained(folder: str | Path):
    try:
        yield
    except (OSError, CheckpointException) as e:  # CheckpointException is a BaseException: it would pass every `except Exception`
        reason = str(e).strip().splitlines()[-1:]
        raise EnvironmentFault(f"checkpoint {folder} could not be written: {' '.join(reason)}", "a writable folder with enough space",
                               "free space or choose another run root; the run goes on from the last complete checkpoint") from e


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


def _read_names(path: Path) -> set[str]:
    """Names of all that is in the checkpoint."""
    if not path.is_file():
        raise EnvironmentFault(f"no checkpoint metadata {path}", "a folder written by save_checkpoint", "resume from another checkpoint")
    try:
        with path.open("rb") as file:
            return set(_MetadataUnpickler(file).load().state_dict_metadata)
    except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, ImportError) as e:
        raise EnvironmentFault(f"{path} is damaged, or names what a checkpoint never holds: {e}", "metadata written by save_checkpoint",
                               "resume from another checkpoint") from e
