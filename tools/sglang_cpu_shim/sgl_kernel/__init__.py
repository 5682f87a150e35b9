"""Stand-in for SGLang's CUDA kernels: every name can be imported, every call raises. The CPU path calls none of them."""

from miles_sglang_cpu import check_version, on_cuda

if on_cuda():
    raise ImportError(
        "this sgl_kernel is the stub of miles-sglang-cpu-shim, but the machine has CUDA\n"
        "  what to do: pip uninstall miles-sglang-cpu-shim, then pip install --force-reinstall sgl-kernel"
    )
check_version()

__version__ = "0.0.0+cpu.stub"


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} needs a GPU; the CPU shim only lets it be imported")

    missing.__name__ = name
    return missing
