"""Packed micro-batches through a model, in any parallel layout: the one way in which weights are trained and scored.

    plan -> micro-batches -> model -> head (on the last pipeline stage, at the sampled tokens) -> loss
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region

import miles.platform
from miles.platform.context_parallel import zigzag_positions
from miles.trainer.batching import BatchPlan, PackedMicrobatch, Sequence, held_rows, pack, padded_rows, plan_batch
from miles.trainer.model import PolicyModel
from miles.trainer.mtp import MtpLoss
from miles.trainer.replay import RoutingReplay, check_routes

Figures = dict[str, Any]


@dataclass(frozen=True)
class SampledRows:
    """The n sampled tokens of a micro-batch whose rows this context-parallel rank holds, and what a pass before this one found out about them."""

    packed: PackedMicrobatch
    rows: np.ndarray  # int64 [N / cp], rows of the micro-batch on this rank, in its order
    selected: np.ndarray  # int64 [n], those of `rows` whose target was sampled
    known: Figures  # by name, [n] each

    def of(self, name: str) -> torch.Tensor:
        """[n] on the device: the field `name` of the micro-batch."""
        return torch.from_numpy(getattr(self.packed, name)[self.rows][self.selected]).to(miles.platform.current().device)

    def gathered(self, values: torch.Tensor) -> torch.Tensor:
        """[..., N] from [..., n]: for all rows of the micro-batch, over context-parallel ranks; 0 where nothing was sampled. Without gradient."""
        out = values.new_zeros(*values.shape[:-1], len(self.packed.mask))
        out[..., torch.from_numpy(self.rows[self.selected]).to(values.device)] = values.detach()
        if parallel_state.get_context_parallel_world_size() > 1:
            dist.all_reduce(out, group=parallel_state.get_context_parallel_group())
        return out

    @property
    def sequences(self) -> int:
        return len(self.packed.bounds) - 1

    def drafted(self) -> SampledRows:
        """The same for the rows whose target after the next was sampled. Fields of it: `draft_targets`."""
        return SampledRows(self.packed, self.rows, np.flatnonzero(self.packed.draft_mask[self.rows]), {})


Head = Callable[..., Any]
"""(hidden_states [n, h], weight of the output layer, SampledRows) -> whatever the loss is made of."""
LossFunction = Callable[[SampledRows, Any], tuple[torch.Tensor, Figures]]
"""(SampledRows, what the head gave) -> (loss to be summed over micro-batches and ranks, what `run` returns)."""


class PackedForward:
    """Runs one model. `data_rank` of `data_ranks` takes the sequences of `plan.of_rank(data_rank)`."""

    def __init__(self, model: PolicyModel, max_tokens: int, *, shared_head: bool = False):
        """`max_tokens`: of a micro-batch on one context-parallel rank. `shared_head`: every tensor-parallel rank has the whole output layer, and so the
        whole gradient of its input, instead of a part of either."""
        self.model, self._max_tokens, self._shared_head = model, max_tokens, shared_head
        self.replay = RoutingReplay(model.chunks, model.arch.moe_layers, replay=model.routing_replay)
        self.device = miles.platform.current().device
        self.data_rank = parallel_state.get_data_parallel_rank()
        self.data_ranks = parallel_state.get_data_parallel_world_size()
        self._cp, self._cp_rank = model.layout.cp, parallel_state.get_context_parallel_rank()
        self._total_align = math.lcm(padded_rows(1, self._cp), model.layout.tp * self._cp)

    def plan(self, lengths: list[int]) -> BatchPlan:
        """Where each sequence of `lengths` tokens goes. Equal on all ranks for equal input. Raises StructureError: a sequence is too long."""
        return plan_batch([padded_rows(max(n - 1, 1), self._cp) for n in lengths], self.data_ranks, self._max_tokens * self._cp)

    def held_rows(self, fed: int) -> tuple[tuple[int, int], ...]:
        """Which rows of a sequence of `fed` tokens this context-parallel rank holds."""
        return held_rows(fed, self._cp, self._cp_rank)

    def of_this_rank(self, s: Sequence) -> Sequence:
        """`s`, whose routes are whole, with those of this pipeline stage's layers and of the rows that this rank holds."""
        if s.routes is None:
            return s
        return replace(s, routes=np.concatenate([s.routes[start:stop, self.replay.layers] for start, stop in self.held_rows(s.fed)]))

    def with_all_rows(self, s: Sequence) -> Sequence:
        """Collective over the context-parallel ranks: `s` with the routes of the rows of all of them, in order."""
        if s.routes is None or self._cp == 1:
            return s
        whole, at = torch.zeros((s.fed, *s.routes.shape[1:]), dtype=torch.int32), 0
        for start, stop in self.held_rows(s.fed):
            whole[start:stop] = torch.from_numpy(s.routes[at : at + stop - start].astype(np.int32))
            at += stop - start
        whole = whole.to(self.device)
        dist.all_reduce(whole, group=parallel_state.get_context_parallel_group())
        return replace(s, routes=whole.cpu().numpy().astype(s.routes.dtype))

    def microbatches(self, plan: BatchPlan, mine: list[Sequence], weights: list[float]) -> Iterator[PackedMicrobatch]:
        """Those of this data-parallel rank. `weights[i]`: loss weight of each sampled token of `mine[i]`. Raises StructureError: routes do not fit the model."""
        routes_shape = (len(self.replay.layers), self.model.arch.top_k) if self.replay.active else None
        start = 0
        for bin_ in plan.bins[self.data_rank]:
            part = slice(start, start + len(bin_))
            start = part.stop
            packed = pack(mine[part], weights[part], cp=self._cp, cp_rank=self._cp_rank, total_align=self._total_align, routes_shape=routes_shape,
                          routes_needed=self.model.routing_replay)
            if packed.routes is not None:
                check_routes(packed.routes, self.model.arch.experts)
            yield packed

    def run(self, microbatches: Iterable[tuple[PackedMicrobatch, Figures]], count: int, head: Head, loss: LossFunction, *, forward_only: bool = False,
            mtp: MtpLoss | None = None) -> list[Figures]:
        """Forward, and backward into the gradient buffers, over `count` micro-batches, each with what is `known` of its tokens. Returns what `loss` found
        of each on the last pipeline stage, and nothing on the others. `mtp`: that of the draft layer, which is added, with its figures; a pass that is forward
        only has none. A collective call."""
        self.replay.start()
        with torch.set_grad_enabled(not forward_only):
            outputs = get_forward_backward_func()(
                forward_step_func=partial(self._forward, head, loss, mtp), data_iterator=iter(microbatches), model=self.model.chunks, num_microbatches=count,
                seq_length=self._max_tokens, micro_batch_size=1, forward_only=forward_only,
            )
        self.replay.clear()
        return outputs

    def over_step(self, values: torch.Tensor, op=dist.ReduceOp.SUM) -> torch.Tensor:
        """Collective: `values` of the last pipeline stage, reduced over data- and context-parallel ranks and given to all stages."""
        dist.all_reduce(values, op=op, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        if self.model.layout.pp > 1:
            dist.broadcast(values, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=parallel_state.get_pipeline_model_parallel_group())
        return values

    def routing_differences(self) -> tuple[float, float]:
        """Collective, over all ranks: of the (token, MoE layer) of the last `run` whose experts were recorded, the share at which the router itself chose, or would
        have chosen, another set; and of the recorded experts the share that it left out. Not a number where none were recorded."""
        counts = self.replay.counts.clone()
        dist.all_reduce(counts)  # each row of a layer is on one rank
        rows, differing, missing = counts.tolist()
        return (differing / rows, missing / (rows * self.model.arch.top_k)) if rows else (math.nan, math.nan)

    def _forward(self, head: Head, loss: LossFunction, mtp: MtpLoss | None, microbatches: Iterator[tuple[PackedMicrobatch, Figures]], chunk: torch.nn.Module):
        packed, known = next(microbatches)
        rows = self._rows_of_this_rank(packed.bounds)
        tokens = SampledRows(packed, rows, np.flatnonzero(packed.mask[rows]), known)

        def tensor(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(self.device)

        if self.replay.active:
            routes, recorded = packed.routes, packed.recorded
            if self.model.config.sequence_parallel:
                routes, recorded = (np.split(a, self.model.layout.tp)[parallel_state.get_tensor_model_parallel_rank()] for a in (routes, recorded))
            self.replay.load(tensor(routes), tensor(recorded))
        bounds = tensor(packed.bounds)
        packed_params = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, cu_seqlens_q_padded=bounds, cu_seqlens_kv_padded=bounds,
            max_seqlen_q=packed.longest, max_seqlen_kv=packed.longest,
        )
        with self.replay.forward():
            output = chunk(tensor(packed.input_ids[rows])[None], tensor(packed.positions[rows])[None], None, packed_seq_params=packed_params,
                           output_processor=partial(self._head, head, mtp), output_processor_context=tokens)

        def summed(output):
            value, figures = loss(tokens, output[0])
            if mtp is not None:
                drafted, further = mtp.loss(output[1])
                value, figures = value + drafted, figures | further
            return value, torch.zeros((), dtype=torch.int, device=value.device), figures  # megatron's own token count is not used

        return output, summed

    def _head(self, head: Head, mtp: MtpLoss | None, *, hidden_states, output_layer, output_weight, context, draft_states=None):
        """The output hook of DraftingModel on the last stage: what `head` gives, and what that of the draft layer does. The loss of the latter moves no output layer."""
        weight = output_layer.weight if output_weight is None else output_weight
        found = head(self._selected(hidden_states, context), weight, context)
        if mtp is None:
            return (found,)
        drafted = context.drafted()
        return found, mtp.head(self._selected(draft_states, drafted), weight.detach(), drafted)

    def _selected(self, hidden_states: torch.Tensor, tokens: SampledRows) -> torch.Tensor:
        """[n, h] of what the last layer gives, [rows of this tensor-parallel rank, 1, h]."""
        group = parallel_state.get_tensor_model_parallel_group()
        if self.model.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=not self._shared_head, group=group)
        elif group.size() > 1 and not self._shared_head:
            hidden_states = copy_to_tensor_model_parallel_region(hidden_states, group=group)
        return hidden_states[:, 0][torch.from_numpy(tokens.selected).to(self.device)]

    def _rows_of_this_rank(self, bounds: np.ndarray) -> np.ndarray:
        """Rows of the packed micro-batch that this context-parallel rank holds, in its order."""
        if self._cp == 1:
            return np.arange(bounds[-1])
        return np.concatenate([a + zigzag_positions(int(b - a), self._cp, self._cp_rank).numpy() for a, b in zip(bounds[:-1], bounds[1:], strict=True)])
