"""Stand-in with names only: SGLang and transformers import torchvision, their text path calls nothing of it."""

from miles_sglang_cpu import on_cuda

if on_cuda():
    raise ImportError(
        "this torchvision is the stub of miles-sglang-cpu-shim, but the machine has CUDA\n"
        "  what to do: pip uninstall miles-sglang-cpu-shim, then pip install --force-reinstall torchvision"
    )

__version__ = "0.28.0"  # the release that goes with torch 2.13, for version comparisons at import
