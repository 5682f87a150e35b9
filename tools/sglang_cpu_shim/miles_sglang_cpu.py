"""SGLang plugin for machines without a GPU. SGLang calls `register` early in each of its processes."""

from __future__ import annotations

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
