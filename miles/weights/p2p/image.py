"""`Image`: the receiver's memory, one safetensors file in a folder in shared memory, which an engine loads as it loads any model folder.

It is kept from version to version: one copy of what the rank holds, the same that handing over tensors takes for the time of an update, and no second one
beside it. Messages are verified in buffers of their own before they get here, so a message that comes too late or is damaged never touches it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from miles.core import EnvironmentFault
from miles.weights.file_layout import file_layout
from miles.weights.p2p.plan import Box, Held, Tensor
from miles.weights.patch import State


class Image:
    """Made whole at once: shared memory that is too small is found here, not in the middle of a transfer."""

    def __init__(self, folder: Path, tensors: Mapping[str, Tensor], held: Held):
        """`folder` is the image's own, removed by `close`. Raises EnvironmentFault: no room."""
        self.folder, self._tensors, self._held = folder, tensors, held
        begin, self._offsets, size = file_layout({name: (tensors[name].dtype, self._shape(name)) for name in held})
        self.size = size - len(begin)
        try:
            with open(folder / "model.safetensors", "w+b") as f:
                os.posix_fallocate(f.fileno(), 0, size)  # a page that is not there would be a SIGBUS later
                f.write(begin)
                f.flush()
                self._map = mmap.mmap(f.fileno(), size)
        except OSError as e:
            self.close()
            raise EnvironmentFault(f"no room for {size / 1e9:.3g} GB of weights in {folder.parent}: {e}", "room for one copy of the model", "enlarge /dev/shm") from e
        self._data = np.frombuffer(self._map, np.uint8)

    def fits(self, tensors: Mapping[str, Tensor], held: Held) -> bool:
        """Whether it is an image of just this."""
        return self._held == held and all(self._tensors[n] == tensors[n] for n in held)

    def bytes_of(self, name: str, box: Box) -> int:
        return box.size * self._tensors[name].itemsize

    def write(self, name: str, box: Box, data: np.ndarray) -> None:
        """Put the bytes of a rectangle, row by row, in their place. data: uint8."""
        held, itemsize = self._held[name], self._tensors[name].itemsize
        rows = self._rows(name)
        rows[box.top - held.top:box.bottom - held.top, (box.left - held.left) * itemsize:(box.right - held.left) * itemsize] = data.reshape(box.bottom - box.top, -1)

    def state(self) -> State:
        """The tensors as they lie in it: views."""
        out = {}
        for name in self._held:
            out[name] = torch.from_numpy(self._bytes(name)).view(getattr(torch, self._tensors[name].dtype)).view(self._shape(name))
        return out

    def close(self) -> None:
        """Remove the file. The mapping ends with the last view of it."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.folder)

    def _shape(self, name: str) -> list[int]:
        box = self._held[name]
        return [box.bottom - box.top, box.right - box.left][:len(self._tensors[name].shape)]

    def _bytes(self, name: str) -> np.ndarray:
        size = self._held[name].size * self._tensors[name].itemsize
        return self._data[self._offsets[name]:self._offsets[name] + size]

    def _rows(self, name: str) -> np.ndarray:
        return self._bytes(name).reshape(self._held[name].bottom - self._held[name].top, -1)
