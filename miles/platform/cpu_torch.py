"""A view of the `torch` module for megatron-core on a machine without CUDA: same objects, but CUDA means CPU."""

from __future__ import annotations

import contextlib
import functools
from types import ModuleType

import torch

CPU = torch.device("cpu")
FACTORIES = (
    "tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "randint", "eye", "linspace", "empty_like", "zeros_like",
    "ones_like", "full_like", "as_tensor", "randperm", "empty_strided",
)


class ModuleView(ModuleType):
    """A module whose attributes are those of another one, except for `overrides`."""

    def __init__(self, real: ModuleType, overrides: dict):
        super().__init__(real.__name__)
        self.__dict__["_real"] = real
        self.__dict__.update(overrides)

    def __getattr__(self, name):
        return getattr(self._real, name)

    def __dir__(self):
        return dir(self._real)


class Stream:
    """Work on a CPU is done when the call returns: there is one stream and it never has to be waited for."""

    cuda_stream = 0

    def __init__(self, *args, **kwargs):
        pass

    def wait_stream(self, stream):
        pass

    def wait_event(self, event):
        pass

    def synchronize(self):
        pass

    def record_event(self, event=None):
        return event or Event()

    def query(self):
        return True

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return False

    @staticmethod
    def priority_range():
        return (0, 0)

    def __eq__(self, other):
        return isinstance(other, Stream)

    def __hash__(self):
        return 0


class Event:
    """An event that has always happened."""

    def __init__(self, *args, **kwargs):
        pass

    def record(self, *args):
        pass

    def wait(self, *args):
        pass

    def synchronize(self):
        pass

    def query(self):
        return True

    def elapsed_time(self, end):
        return 0.0


def cpu_view_of_torch() -> ModuleView:
    """`torch`, with `torch.cuda` answered by the CPU and tensor factories that take device="cuda" for "cpu"."""
    stream = Stream()

    def get_rng_state(device="cuda"):
        return torch.get_rng_state()

    def set_rng_state(state, device="cuda"):
        torch.set_rng_state(state)

    def manual_seed(seed):
        torch.default_generator.manual_seed(seed)

    def current_stream(device=None):
        return stream

    def nothing(*args, **kwargs):
        return None

    cuda = {
        "current_device": lambda: CPU, "set_device": nothing, "device_count": lambda: 1, "get_device_capability": lambda *a: (0, 0),
        "synchronize": nothing, "empty_cache": nothing,
        "current_stream": current_stream, "default_stream": current_stream, "Stream": Stream, "Event": Event,
        "stream": lambda s: contextlib.nullcontext(), "is_current_stream_capturing": lambda: False,
        "get_rng_state": get_rng_state, "set_rng_state": set_rng_state, "manual_seed": manual_seed, "manual_seed_all": manual_seed,
        "random": ModuleView(torch.cuda.random, {"get_rng_state": get_rng_state, "set_rng_state": set_rng_state}),
        "nvtx": ModuleView(torch.cuda.nvtx, {"range_push": nothing, "range_pop": nothing}),
    }
    overrides = {name: _on_cpu(getattr(torch, name)) for name in FACTORIES}
    return ModuleView(torch, {**overrides, "cuda": ModuleView(torch.cuda, cuda)})


def _on_cpu(factory):
    @functools.wraps(factory)
    def make(*args, **kwargs):
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return make


def _names_cuda(device) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int)  # a bare number is a CUDA ordinal
