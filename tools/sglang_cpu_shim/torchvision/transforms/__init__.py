"""Names of torchvision.transforms; every call raises."""

import enum


class InterpolationMode(enum.Enum):
    """The real values: transformers builds tables from them at import."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"torchvision's {name}: images are not served by the CPU shim")

    missing.__name__ = name
    return missing
