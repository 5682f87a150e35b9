"""What is kept of a step whose loss or gradients were not finite: the micro-batches of a rank, from which it can be run again.

RUN/attempts/NNNN/nonfinite/step_000012.rank_00003.e000001.npz, an npz without pickle. Sequences lie end to end; `lengths` int64 [S] says where one ends.

    tokens, loss_mask, logprobs, versions   [sum of lengths]
    routes                                  [sum of lengths - 1, L, K] of the MoE layers `layers` (counted over MoE layers); only where some were fed
    advantage, exact, rollout, weight       [S], as the step had them; weight: of each sampled token in the loss
    microbatch                              [S], which micro-batch of the rank it was in
    NAME.M                                  what an earlier pass found about the sampled tokens of micro-batch M: log-probabilities of the `reference`,
                                            `advantages` of a critic; of the first context-parallel rank, where the loss is made
    step, version, omitted                  the step, the weight version that it trained, sequences left out because the file would be too large
"""

from __future__ import annotations

import io
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch.distributed as dist
from megatron.core import parallel_state

from miles.rundir import publish_bytes
from miles.trainer.batching import BatchPlan, Sequence
from miles.trainer.forward import Figures

KEEP = 5  # steps that one rank writes
MAX_BYTES = 64 * 2**20  # of the arrays of sequences in one file; the first one is always there
TOKENS = ("tokens", "loss_mask", "logprobs", "versions")


@dataclass(frozen=True)
class Fed:
    """The micro-batches of one data-parallel rank in one step: its sequences in the order of the plan, their weights, and what is known of their tokens. Of
    those that are kept, routes have all rows."""

    plan: BatchPlan
    data_rank: int
    sequences: list[Sequence]
    weights: list[float]
    known: list[Figures]
    layers: Seq[int]
    version: int  # of the weights that were to be trained

    @property
    def microbatch_of(self) -> list[int]:
        """Of each sequence."""
        return [m for m, part in enumerate(self.plan.bins[self.data_rank]) for _ in part]


class NonFinite:
    """Writes the files of one rank; of ranks with the same sequences and layers the first one does."""

    def __init__(self, folder: Path, epoch: int):
        self.folder, self._epoch, self._kept = folder, epoch, 0

    def keep(self, fed: Fed, step: int, microbatches: Seq[int]) -> Path | None:
        """The file with these micro-batches of a step. None: they have no sequences, this rank does not write, or it has written enough."""
        first = parallel_state.get_tensor_model_parallel_rank() == 0 and parallel_state.get_context_parallel_rank() == 0
        if not first or self._kept >= KEEP or not set(microbatches) & set(fed.microbatch_of):
            return None
        self._kept += 1
        self.folder.mkdir(exist_ok=True)
        path = self.folder / f"step_{step:06d}.rank_{dist.get_rank():05d}.e{self._epoch:06d}.npz"
        publish_bytes(path, reproducer(fed, step, microbatches))
        return path


def reproducer(fed: Fed, step: int, microbatches: Seq[int]) -> bytes:
    """The bytes of a file; at least one sequence must be in `microbatches`. Pure."""
    wanted = [(m, i) for m, i in zip(fed.microbatch_of, range(len(fed.sequences)), strict=True) if m in microbatches]
    chosen, size = [], 0
    for m, i in wanted:
        s = fed.sequences[i]
        size += sum(getattr(s, name).nbytes for name in TOKENS) + (0 if s.routes is None else s.routes.nbytes)
        if chosen and size > MAX_BYTES:
            break
        chosen.append((m, i))
    kept = [fed.sequences[i] for _, i in chosen]
    arrays = {name: np.concatenate([getattr(s, name) for s in kept]) for name in TOKENS}
    if kept[0].routes is not None:
        arrays |= {"routes": np.concatenate([s.routes for s in kept]), "layers": np.array(fed.layers, np.int64)}
    arrays |= {f"{name}.{m}": values.detach().float().cpu().numpy() for m in sorted({m for m, _ in chosen}) for name, values in fed.known[m].items()}
    out = io.BytesIO()
    np.savez_compressed(
        out, **arrays, lengths=np.array([len(s.tokens) for s in kept], np.int64), advantage=np.array([s.advantage for s in kept], np.float64),
        exact=np.array([s.exact for s in kept], bool), rollout=np.array([s.rollout for s in kept], np.int64),
        weight=np.array([fed.weights[i] for _, i in chosen], np.float64), microbatch=np.array([m for m, _ in chosen], np.int64),
        step=np.int64(step), version=np.int64(fed.version), omitted=np.int64(len(wanted) - len(chosen)))
    return out.getvalue()


def read_sequences(path: Path) -> list[Sequence]:
    """Those of a file, to be fed again. Their rollouts are numbered anew from 0, as a step of them alone numbers them."""
    with np.load(path, allow_pickle=False) as f:
        data = dict(f)
    ends = np.cumsum(data["lengths"])[:-1]
    columns = {name: np.split(data[name], ends) for name in TOKENS}
    routes = np.split(data["routes"], np.cumsum(data["lengths"] - 1)[:-1]) if "routes" in data else [None] * len(data["lengths"])
    _, rollout = np.unique(data["rollout"], return_inverse=True)
    return [Sequence(**{name: columns[name][i] for name in TOKENS}, routes=routes[i], advantage=float(data["advantage"][i]), exact=bool(data["exact"][i]),
                     rollout=int(rollout[i])) for i in range(len(data["lengths"]))]
