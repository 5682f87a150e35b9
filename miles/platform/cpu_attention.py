"""Core attention for megatron-core on CPU: torch's scaled_dot_product_attention over packed sequences, with context parallelism.

megatron-core's own local attention refuses packed sequences (`thd`) and context parallelism. Under context parallelism keys and
values are gathered over the group instead of travelling in a ring.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

import miles.platform
from miles.platform.context_parallel import zigzag_positions

miles.platform.activate()

from megatron.core import parallel_state  # noqa: E402  (after activate)
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region  # noqa: E402
from megatron.core.transformer.module import MegatronModule  # noqa: E402


class CpuCoreAttention(MegatronModule):
    """Causal attention. Takes megatron-core's arguments of a core attention; grouped queries and a different value width are allowed."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, attention_dropout=None, softmax_scale=None,
                 cp_comm_type=None, pg_collection=None, **_unused):
        super().__init__(config=config)
        self.cp_group = getattr(pg_collection, "cp", None) or parallel_state.get_context_parallel_group()
        self.scale = softmax_scale

    def forward(self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None, packed_seq_params=None, **_unused):
        """query, key, value: [t, heads, width] when packed, else [s, b, heads, width]. Returns [t, heads*width] or [s, b, heads*width]."""
        if packed_seq_params is not None:
            return self._packed(query, key, value, packed_seq_params)
        s, b = query.shape[:2]
        key, value = self._all_ranks(key), self._all_ranks(value)
        columns = [self._one(query[:, i], self._in_order(key[:, i], [s]), self._in_order(value[:, i], [s])) for i in range(b)]
        return torch.stack(columns, dim=1).reshape(s, b, -1)

    def _packed(self, query, key, value, packed):
        padded = packed.cu_seqlens_q_padded
        bounds = (padded if padded is not None else packed.cu_seqlens_q).tolist()
        cp = self.cp_group.size()
        lengths = [(end - start) // cp for start, end in zip(bounds[:-1], bounds[1:], strict=True)]  # on this rank
        lengths = [n for n in lengths if n]
        key = self._in_order(self._all_ranks(key), lengths)
        value = self._in_order(self._all_ranks(value), lengths)
        out, start = [], 0
        for n in lengths:
            q = query[start : start + n]
            k, v = (x[start * cp : (start + n) * cp] for x in (key, value))
            out.append(self._one(q, k, v))
            start += n
        return torch.cat(out).reshape(query.shape[0], -1)

    def _all_ranks(self, x):
        return gather_from_sequence_parallel_region(x.contiguous(), group=self.cp_group) if self.cp_group.size() > 1 else x

    def _in_order(self, gathered, lengths):
        """Rows gathered rank after rank, put back into the order of each sequence."""
        cp = self.cp_group.size()
        if cp == 1:
            return gathered
        per_rank = gathered.shape[0] // cp
        order, start = [], 0
        for n in lengths:
            rows = torch.cat([torch.arange(r * per_rank + start, r * per_rank + start + n) for r in range(cp)])
            positions = torch.cat([zigzag_positions(n * cp, cp, r) for r in range(cp)])
            order.append(rows[torch.argsort(positions)])
            start += n
        return gathered[torch.cat(order)]

    def _one(self, q, k, v):
        """One sequence: q [n, heads, width], k and v [n*cp, groups, width] -> [n, heads, value width]."""
        cp = self.cp_group.size()
        mask = None
        if cp > 1:
            own = zigzag_positions(k.shape[0], cp, self.cp_group.rank())
            mask = torch.arange(k.shape[0])[None, :] <= own[:, None]
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1])
        return out[0].transpose(0, 1)
