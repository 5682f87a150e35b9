"""What a transfer leaves to be published."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Filled:
    """A transfer that every receiver has whole."""

    link: str  # "<rollout epoch>.<trainer epoch>"
    serial: int
    receivers: tuple[str, ...]  # digest over the digests of what each receiver got, hex
    tensors: dict[str, dict[str, Any]]  # as in a manifest
    bytes: int  # over the wire, of all receivers
