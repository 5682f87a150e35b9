"""SGLang plugin for machines without a GPU. SGLang calls `register` early in each of its processes."""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from importlib import metadata

SGLANG_VERSION = "0.5.23"
"""The private names below were read in this version."""

PINNING_MODULES = ("sglang.srt.lora.layers", "sglang.srt.lora.backend.torch_backend", "sglang.srt.lora.backend.chunked_backend")
"""Modules that ask for page-locked host tensors although the device is the CPU."""

_FACTORIES = ("tensor", "empty", "zeros", "ones", "full", "arange", "empty_like", "zeros_like")


def on_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def check_version() -> None:
    """Stop the process when SGLang is not the version whose private names are patched here.

    SystemExit, because SGLang logs and swallows every `Exception` of a plugin, and would fail later with a message that explains nothing.
    """
    found = metadata.version("sglang")
    if found != SGLANG_VERSION:
        sys.exit(
            f"miles-sglang-cpu-shim: found sglang {found}\n  expected: {SGLANG_VERSION}, the version whose private names the shim patches\n"
            f"  what to do: pip install --no-deps sglang=={SGLANG_VERSION}, or uninstall miles-sglang-cpu-shim"
        )


def register() -> None:
    """Make page-locking a no-op. Does nothing with CUDA. Exits when the SGLang version is another one."""
    if on_cuda():
        return
    check_version()
    import torch

    host_pool = importlib.import_module("sglang.srt.mem_cache.pool_host.common")
    for name in ("_cuda_host_register", "_cuda_host_unregister"):
        if not hasattr(host_pool, name):
            sys.exit(f"miles-sglang-cpu-shim: sglang {SGLANG_VERSION} has no {host_pool.__name__}.{name}; the installation is not the released one")
        setattr(host_pool, name, lambda *args, **kwargs: None)
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    # A debugging aid of SGLang imports megatron-core where it is installed, 2 s for nothing; None makes that import fail at once.
    sys.modules.setdefault("megatron.core", None)
    _fork_instead_of_spawn()
    adapter = importlib.import_module("sglang.srt.utils.torch_memory_saver_adapter")
    saver, without = HostMemorySaver(), adapter._TorchMemorySaverAdapterNoop()
    adapter.TorchMemorySaverAdapter.create = staticmethod(lambda enable: saver if enable else without)
    proxy = _TorchWithoutPinning()
    for name in PINNING_MODULES:
        if name in sys.modules:  # the scheduler imported it before plugins ran; other processes never do
            sys.modules[name].torch = proxy


def _fork_instead_of_spawn() -> None:
    """Let the server's main process fork its scheduler and detokenizer.

    SGLang spawns them because a CUDA context does not survive a fork. Without CUDA that only makes each of them import everything
    again: 10 s of CPU per process. No thread runs yet when they are started.
    """
    import multiprocessing

    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def after(result, *args, **kwargs):
        multiprocessing.set_start_method("fork", force=True)
        return result

    HookRegistry.register("sglang.srt.entrypoints.engine._set_envs_and_config", after, HookType.AFTER)


class HostMemorySaver:
    """What torch_memory_saver is to GPU memory (`--enable-memory-saver`), for tensors on the host.

    Float tensors made inside `region(tag)` lose their memory with `pause(tag)` and get new memory at the same size with `resume(tag)`. As on a GPU, what
    they held is gone: every byte is 0xFF then, which as a float is NaN, so that whatever is used without having been written again shows.
    """

    enabled = True
    GARBAGE = 0xFF

    def __init__(self):
        self._made: dict[str, list] = {}  # tag -> weak references to storages
        self._paused: dict[str, list] = {}  # tag -> (storage, bytes)

    @contextlib.contextmanager
    def region(self, tag: str, enable_cpu_backup: bool = False):
        if enable_cpu_backup:
            raise NotImplementedError("miles-sglang-cpu-shim: keeping a copy of released weights")
        from torch.multiprocessing.reductions import StorageWeakRef
        from torch.utils._python_dispatch import TorchDispatchMode
        from torch.utils._pytree import tree_leaves

        made = self._made.setdefault(tag, [])

        class Record(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                import torch

                out = func(*args, **(kwargs or {}))
                # Floats alone: integers made there are SGLang's bookkeeping (which expert lies where), on the host beside a GPU too.
                made.extend(StorageWeakRef(t.untyped_storage()) for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.is_floating_point())
                return out

        with Record():
            yield

    def pause(self, tag: str) -> None:
        import torch

        storages = [torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in self._made.get(tag, ())]  # None for what is gone
        unique = {s._cdata: s for s in storages if s is not None and s.resizable()}
        self._paused[tag] = [(s, s.nbytes()) for s in unique.values()]
        for storage, _ in self._paused[tag]:
            storage.resize_(0)

    def resume(self, tag: str) -> None:
        for storage, size in self._paused.pop(tag):
            storage.resize_(size)
            storage.fill_(self.GARBAGE)

    def configure_subprocess(self):
        return contextlib.nullcontext()

    def cuda_graph(self, **kwargs):
        return contextlib.nullcontext()

    def disable(self):
        return contextlib.nullcontext()


class _TorchWithoutPinning(types.ModuleType):
    """`torch` as those modules see it, whose factories drop `pin_memory`.

    A proxy per module and not a patch of `torch.empty` itself: `with torch.device(...)` recognises the factories by identity,
    so replacing them would silently build tensors on the wrong device.
    """

    def __init__(self):
        super().__init__("torch")

    def __getattr__(self, name: str):
        import torch

        value = getattr(torch, name)
        if name not in _FACTORIES:
            return value

        def without_pinning(*args, **kwargs):
            kwargs.pop("pin_memory", None)
            return value(*args, **kwargs)

        return without_pinning
