"""Routing replay: the experts recorded at rollout are used again in the trainer's forward, backward and recomputation. And what each router would have chosen
itself, or without replay does choose, is compared with them.

The router still scores its experts, and gradients flow through the scores of the recorded ones; only the choice is given (R3,
"rollout routing replay", Ma et al. 2025, arXiv:2510.11370). megatron-core's RouterReplay does the work per router; this module
feeds it the right rows and keeps its state straight. The comparison costs one more top-k of scores that are there anyway. For dense models everything
here does nothing. The router of a draft layer always routes freely: engines do not record what theirs chooses.
"""

from __future__ import annotations

import contextlib

import numpy as np
import torch
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

import miles.platform
from miles.core import StructureError


class ComparingReplay(RouterReplay):
    """Made of megatron-core's RouterReplay by RoutingReplay. RECORD routes freely, REPLAY_FORWARD as recorded; both count in `counts` how the router's own choice
    differs from the loaded experts, at the rows `recorded`."""

    recorded: torch.Tensor | None  # bool [tokens]; None: nothing is loaded
    counts: torch.Tensor

    def get_replay_topk(self, scores, topk, num_groups=None, group_topk=None, default_compute_topk=None):
        found = super().get_replay_topk(scores, topk, num_groups, group_topk, default_compute_topk)
        if self.recorded is not None and self.router_replay_action in (RouterReplayAction.RECORD, RouterReplayAction.REPLAY_FORWARD):
            own = found[1]
            if self.router_replay_action is RouterReplayAction.REPLAY_FORWARD:
                _, own = default_compute_topk(scores.detach(), topk, num_groups, group_topk)
            self.counts += differences(own, self.target_topk_idx, self.recorded)
        return found


def differences(chosen: torch.Tensor, given: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """int64 [3], over the `rows` (bool [n]) of two choices of K different experts each, [n, K]: rows, those in which the two sets differ, and experts of
    `given` that were not chosen."""
    missing = (given[:, :, None] != chosen[:, None, :]).all(-1).sum(-1) * rows
    return torch.stack([rows.sum(), (missing > 0).sum(), missing.sum()])


class RoutingReplay:
    """The routers of one model. Life of a step: `start`, then per micro-batch `load` and a forward inside `forward()`, then `clear`."""

    def __init__(self, chunks: list[torch.nn.Module], moe_layers: tuple[int, ...], *, replay: bool):
        """`replay` False: routers choose freely, and are compared with what is loaded."""
        found = [(m.layer_number - 1, m.router_replay) for c in chunks for m in c.modules() if getattr(m, "router_replay", None) is not None and not m.is_mtp_layer]
        self.routers = [replay for _, replay in sorted(found, key=lambda item: item[0])]
        ordinal = {layer: i for i, layer in enumerate(moe_layers)}
        self.layers = [ordinal[layer] for layer, _ in sorted(found, key=lambda item: item[0])]  # this stage's, counted over MoE layers: what it needs of routes
        self._replay = replay
        self.counts = torch.zeros(3, dtype=torch.int64, device=miles.platform.current().device)
        """Since `start`, over routers and recorded rows: `differences`."""
        for router in self.routers:
            router.__class__ = ComparingReplay  # megatron's router has no place for another class
            router.recorded, router.counts = None, self.counts

    @property
    def active(self) -> bool:
        return bool(self.routers)

    def start(self) -> None:
        self.clear()
        self.counts.zero_()

    def load(self, routes: torch.Tensor, recorded: torch.Tensor) -> None:
        """Experts of the next micro-batch: int64 [tokens, L, K], tokens in this rank's order (sequence first), L = `layers`. `recorded`: bool [tokens], the
        others are padding, or, without replay, have no recorded experts.

        The order along K decides nothing: megatron-core gathers the scores at these indices, normalizes and scatters them back.
        """
        for i, router in enumerate(self.routers):
            router.recorded = recorded
            given = routes[:, i].contiguous()
            if self._replay:
                router.set_target_indices(given)  # and keeps them for the backward pass
            else:
                router.target_topk_idx = given

    @contextlib.contextmanager
    def forward(self):
        """Inside, routers take the loaded experts. Outside, any forward is a recomputation in backward and takes them in the order loaded. Without replay
        they route freely, both times."""
        self._act(RouterReplayAction.REPLAY_FORWARD if self._replay else RouterReplayAction.RECORD)
        try:
            yield
        finally:
            self._act(RouterReplayAction.REPLAY_BACKWARD if self._replay else None)

    def clear(self) -> None:
        """Forget loaded experts and route freely; without recomputation the backward queues would otherwise grow from step to step."""
        for router in self.routers:
            router.clear_indices()
            router.clear_router_replay_action()
            router.recorded = None

    def _act(self, action: RouterReplayAction | None) -> None:
        for router in self.routers:
            router.set_router_replay_action(action)


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
