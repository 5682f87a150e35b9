"""Routing replay: the experts recorded at rollout are used again in the trainer's forward, backward and recomputation.

The router still scores its experts, and gradients flow through the scores of the recorded ones; only the choice is given (R3,
"rollout routing replay", Ma et al. 2025, arXiv:2510.11370). megatron-core's RouterReplay does the work per router; this module
feeds it the right rows and keeps its state straight. For dense models everything here does nothing. The router of a draft layer always routes freely: engines
do not record what theirs chooses.
"""

from __future__ import annotations

import contextlib

import numpy as np
import torch
from megatron.core.transformer.moe.router_replay import RouterReplayAction

from miles.core import StructureError


class RoutingReplay:
    """The routers of one model. Life of a step: `clear`, then per micro-batch `load` and a forward inside `forward()`."""

    def __init__(self, chunks: list[torch.nn.Module], moe_layers: tuple[int, ...]):
        found = [(m.layer_number - 1, m.router_replay) for c in chunks for m in c.modules() if getattr(m, "router_replay", None) is not None and not m.is_mtp_layer]
        self.routers = [replay for _, replay in sorted(found, key=lambda item: item[0])]
        ordinal = {layer: i for i, layer in enumerate(moe_layers)}
        self.layers = [ordinal[layer] for layer, _ in sorted(found, key=lambda item: item[0])]  # this stage's, counted over MoE layers: what it needs of routes

    @property
    def active(self) -> bool:
        return bool(self.routers)

    def load(self, routes: torch.Tensor) -> None:
        """Experts of the next micro-batch: int64 [tokens, L, K], tokens in this rank's order (sequence first), L = `layers`.

        The order along K decides nothing: megatron-core gathers the scores at these indices, normalizes and scatters them back.
        """
        for i, replay in enumerate(self.routers):
            replay.set_target_indices(routes[:, i].contiguous())

    @contextlib.contextmanager
    def forward(self):
        """Inside, routers take the loaded experts. Outside, any forward is a recomputation in backward and takes them in the order loaded."""
        self._act(RouterReplayAction.REPLAY_FORWARD)
        try:
            yield
        finally:
            self._act(RouterReplayAction.REPLAY_BACKWARD)

    def clear(self) -> None:
        """Forget loaded experts and route freely; without recomputation the backward queues would otherwise grow from step to step."""
        for replay in self.routers:
            replay.clear_indices()
            replay.clear_router_replay_action()

    def _act(self, action: RouterReplayAction) -> None:
        for replay in self.routers:
            replay.set_router_replay_action(action)


def check_routes(routes: np.ndarray, experts: int) -> None:
    """Every row must name K different experts that exist: a repeated one would lose a token in the dispatch without an error.

    Raises StructureError.
    """
    ordered = np.sort(routes, axis=-1)
    if routes.size and int(ordered[..., -1].max()) >= experts:
        raise StructureError(f"routes name expert {int(ordered[..., -1].max())}", f"experts 0..{experts - 1}",
                             "the engine runs another model than the trainer", cause="routes")
    repeated = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
    if repeated.any():
        row = tuple(int(i) for i in np.argwhere(repeated)[0])
        raise StructureError(f"routes at token {row[0]}, layer {row[1]} name an expert twice: {routes[row].tolist()}",
                             f"{routes.shape[-1]} different experts", "check the recording of routes", cause="routes")
