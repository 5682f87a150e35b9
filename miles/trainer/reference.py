"""The reference policy: frozen weights in host memory, which change places with the trained ones for a pass that only scores."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from miles.config import MilesConfig
from miles.core import ConfigError
from miles.trainer.model import PolicyModel
from miles.weights.mapping import load_hf, local_weights, read_architecture


def reference_folder(config: MilesConfig) -> str | None:
    """The folder that a reference is read from; None where it is what the adapters are trained on."""
    return config.algorithm.reference or (None if config.trainer.lora else config.model.path)


class ReferencePolicy:
    """This rank's part of the weights of a Hugging Face folder, beside a model of the same architecture and layout.

    The weights come from the folder whenever a trainer starts, never from a checkpoint, so that a resumed run is held to the same policy. Experts are
    replayed in the reference pass too: then the two policies are one function of different weights, equal where their weights are. Routed freely, the
    reference would differ from the start by every token that the engine routed differently.
    """

    def __init__(self, model: PolicyModel, folder: str | Path | None):
        """Leaves `model` as it was. folder: None for the frozen weights under the model's adapters, which are in host memory already and change places with
        the merged ones. Raises ConfigError: the folder has another architecture."""
        if folder is None:
            self._live, self._host = map(list, zip(*model.adapters.merged_and_frozen(), strict=True))
            return
        found = read_architecture(folder, draft=bool(model.arch.draft_layers))
        if found != (wanted := replace(model.arch, adapters=None)):
            raise ConfigError(f"the reference {folder} has the architecture {found}", f"that of model.path: {wanted}", "correct algorithm.reference")
        self._live = list(local_weights(model.chunks))
        self._host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda).copy_(t) for t in self._live]
        load_hf(model.chunks, folder, model.arch)
        self._exchange()

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model has the reference's weights; afterwards its own again, bit for bit."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        """Tensor by tensor, so that the device never holds more than one of them twice."""
        for live, host in zip(self._live, self._host, strict=True):
            held = live.clone()
            live.copy_(host)
            host.copy_(held)
