"""Runs the real megatron-core on CPU and gloo. Nothing here is used where CUDA is available.

megatron-core names CUDA in three ways, and each is answered once:

- `torch.cuda.*` calls and `device="cuda"` arguments: every `megatron.*` module gets a stand-in for its global `torch`
  (`miles.platform.cpu_torch`) through an import hook. `torch` itself is left alone: replacing its functions globally breaks
  `with torch.device("meta")` in other libraries and gives wrong rotary embeddings without an error.
- `tensor.cuda()` and friends: four `Tensor` methods behave differently when, and only when, a `megatron.*` module calls them.
- a few functions that assume NCCL, a compiler or Transformer Engine: replaced in the module that owns them, right after its
  import (`PATCHES` below), each with its reason.

These are private names of one exact version, so any other version is refused.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.metadata
import importlib.util
import sys
import warnings
from collections.abc import Callable
from types import ModuleType

import torch
import torch.distributed as dist

from miles.core import EnvironmentFault
from miles.platform.cpu_torch import cpu_view_of_torch

MEGATRON_VERSION = "0.19.2"
PATCHES: dict[str, list[Callable[[ModuleType], None]]] = {}


@functools.cache
def adapt_megatron() -> None:
    """Install the import hook and the scoped Tensor methods. Raises EnvironmentFault on a missing, other or already imported version."""
    try:
        found = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        raise EnvironmentFault("megatron-core is not installed", f"megatron-core {MEGATRON_VERSION}",
                               "install the pinned requirements of this project") from None
    if found != MEGATRON_VERSION:
        raise EnvironmentFault(f"megatron-core {found} without CUDA: the CPU adaptation replaces private names of another version",
                               f"megatron-core {MEGATRON_VERSION}", f"pip install --no-deps --ignore-requires-python megatron-core=={MEGATRON_VERSION}")
    if "megatron.core" in sys.modules:
        raise EnvironmentFault("megatron.core was imported before it was adapted to CPU", "miles.platform.activate() first",
                               "import miles.trainer before megatron.core")
    if importlib.util.find_spec("triton") is None:
        raise EnvironmentFault("triton is not installed; megatron-core imports it at module level even where it never runs", "triton",
                               "install the pinned requirements of this project")
    warnings.filterwarnings("ignore", message=".*(Apex|absl.logging).*not installed")  # GPU libraries that are rightly absent
    _scope_tensor_methods()
    sys.meta_path.insert(0, _MegatronImportHook(cpu_view_of_torch()))


class _MegatronImportHook(importlib.abc.MetaPathFinder):
    """After a `megatron.*` module has run: give it the CPU view of torch, then apply the patches registered for it."""

    def __init__(self, torch_view: ModuleType):
        self.torch_view = torch_view
        self.searching: set[str] = set()  # find_spec below asks all finders again, this one included

    def find_spec(self, name, path=None, target=None):
        if not name.startswith("megatron.") or name in self.searching:
            return None
        self.searching.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.searching.discard(name)
        if spec is None or spec.loader is None:
            return spec
        run_module = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run_module(module)
            if module.__dict__.get("torch") is torch:
                module.__dict__["torch"] = self.torch_view
            for patch in PATCHES.get(module.__name__, ()):
                patch(module)

        spec.loader.exec_module = exec_module
        return spec


def _scope_tensor_methods() -> None:
    """`cuda()`, `pin_memory()`, `record_stream()` do nothing and `type()` answers as for CUDA, for callers inside megatron only."""

    def called_from_megatron() -> bool:
        return sys._getframe(2).f_globals.get("__name__", "").startswith("megatron.")

    def scope(name: str, inside: Callable):
        original = getattr(torch.Tensor, name)

        @functools.wraps(original)
        def method(self, *args, **kwargs):
            return inside(original, self, *args, **kwargs) if called_from_megatron() else original(self, *args, **kwargs)

        setattr(torch.Tensor, name, method)

    scope("cuda", lambda original, tensor, *args, **kwargs: tensor)
    scope("pin_memory", lambda original, tensor, *args, **kwargs: tensor)
    scope("record_stream", lambda original, tensor, *args, **kwargs: None)
    # optimizers sort parameters by `param.type() == "torch.cuda.FloatTensor"`
    scope("type", lambda original, tensor, *args, **kwargs: (
        original(tensor, *args, **kwargs) if args or kwargs else original(tensor).replace("torch.", "torch.cuda.", 1)))


def patch(module_name: str):
    """Register a function that changes `module_name` right after it is imported."""

    def register(function: Callable[[ModuleType], None]):
        PATCHES.setdefault(module_name, []).append(function)
        return function

    return register


@patch("megatron.core.tensor_parallel.random")
def _rng_state_of_cpu(module: ModuleType) -> None:
    module._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    module._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)


@patch("megatron.core.jit")
def _no_compiler(module: ModuleType) -> None:
    module.disable_jit_fuser()  # torch.compile on CPU wants a C++ compiler and minutes of warm-up


@patch("megatron.core.transformer.moe.token_dispatcher")
@patch("megatron.core.transformer.moe.moe_utils")
def _split_sizes_as_numbers(module: ModuleType) -> None:
    # all_to_all_single wants a list of ints; megatron converts only tensors that are on CUDA
    def maybe_move_tensor_to_cpu(tensor, as_numpy=False, record_stream=False):
        return tensor.detach().numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    module.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu


@patch("megatron.core.transformer.torch_norm")
def _norm_under_sequence_parallelism(module: ModuleType) -> None:
    # the torch norm refuses sequence parallelism; all it needs is the mark on its weight by which gradients are reduced
    def new(cls, config, hidden_size, eps=1e-5, *args, **kwargs):
        from miles.platform.rounding import RMSNorm  # late: it imports megatron-core

        kind = RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm = kind(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    module.WrappedTorchNorm.__new__ = new


@patch("megatron.core.tensor_parallel.mappings")
def _uneven_collectives(module: ModuleType) -> None:
    # gloo has no all_gather / reduce_scatter of unequal parts, which experts with tensor parallelism need
    even_gather, even_reduce_scatter = module._gather_along_first_dim, module._reduce_scatter_along_first_dim

    def gather(x, group, output_split_sizes=None, use_global_buffer=False):
        if output_split_sizes is None or group.size() == 1:
            return even_gather(x, group, output_split_sizes, use_global_buffer)
        sizes = [int(n) for n in output_split_sizes]
        padded = x.new_zeros((max(sizes), *x.shape[1:]))
        padded[: x.shape[0]] = x
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:n] for part, n in zip(parts, sizes, strict=True)])

    def reduce_scatter(x, group, input_split_sizes=None, use_global_buffer=False):
        if input_split_sizes is None or group.size() == 1:
            return even_reduce_scatter(x, group, input_split_sizes, use_global_buffer)
        total = x.contiguous().clone()
        dist.all_reduce(total, group=group)
        return torch.split(total, [int(n) for n in input_split_sizes])[group.rank()].contiguous()

    module._gather_along_first_dim, module._reduce_scatter_along_first_dim = gather, reduce_scatter


@patch("megatron.core.optimizer")
def _adam(module: ModuleType) -> None:
    from miles.platform.cpu_adam import CpuFusedAdam  # late: not needed where nobody trains

    module.Adam = CpuFusedAdam
    module.USING_PYTORCH_OPTIMIZER = False


@patch("megatron.core.optimizer.distrib_optimizer")
def _adam_of_distributed_optimizer(module: ModuleType) -> None:
    from miles.platform.cpu_adam import CpuFusedAdam

    module.Adam = CpuFusedAdam
    module.HAVE_APEX_OR_TE = True  # the state layout of FusedAdam, which CpuFusedAdam has
    module.USING_TE_OPTIMIZER = True
    module.USING_PYTORCH_OPTIMIZER = False
