"""Names only, see torchvision.transforms."""

from torchvision.transforms import InterpolationMode, __getattr__  # noqa: F401
