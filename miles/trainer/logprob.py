"""Log-probabilities of given tokens from hidden states, without ever holding the logits of more than one chunk."""

from __future__ import annotations

import torch
import torch.distributed as dist

CHUNK_ELEMENTS = 32 * 2**20  # logits held at once: 128 MiB in float32


def token_logprobs(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, *, temperature: float, vocab: int,
                   tp_group: dist.ProcessGroup) -> torch.Tensor:
    """log softmax(hidden @ weight.T / temperature)[targets], float32 [n].

    hidden [n, h]; weight [v, h], this rank's rows of the (padded) output matrix; targets int64 [n]; vocab: rows that exist.
    The softmax runs over the tensor-parallel group. Gradients: of `hidden` for this rank's rows only (the caller reduces them),
    of `weight` in full.
    """
    return _TokenLogprobs.apply(hidden, weight, targets, temperature, vocab, tp_group)


class _TokenLogprobs(torch.autograd.Function):
    """Forward keeps the log-sum-exp of each row; backward computes the logits again, chunk by chunk.

    d logp_t / d logit_j = [j = target_t] - softmax_j.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, vocab, tp_group):
        rows = weight.shape[0]
        start = tp_group.rank() * rows
        ctx.settings = (temperature, max(0, min(vocab - start, rows)), start, max(1, CHUNK_ELEMENTS // rows))
        distributed = tp_group.size() > 1
        logprobs = hidden.new_empty(len(hidden), dtype=torch.float32)
        lse = torch.empty_like(logprobs)
        for part in _chunks(len(hidden), ctx.settings[3]):
            logits = _logits(hidden[part], weight, *ctx.settings[:2])
            local, own = _local_targets(targets[part], start, rows)
            chosen = torch.where(own, logits.gather(1, local[:, None])[:, 0], 0.0)
            if not distributed:
                lse[part] = logits.logsumexp(1)
            else:
                top = logits.max(1).values
                dist.all_reduce(top, op=dist.ReduceOp.MAX, group=tp_group)
                total = (logits - top[:, None]).exp().sum(1)
                dist.all_reduce(total, group=tp_group)
                dist.all_reduce(chosen, group=tp_group)
                lse[part] = top + total.log()
            logprobs[part] = chosen - lse[part]
        ctx.save_for_backward(hidden, weight, targets, lse)
        return logprobs

    @staticmethod
    def backward(ctx, grad):
        hidden, weight, targets, lse = ctx.saved_tensors
        temperature, real, start, chunk = ctx.settings
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for part in _chunks(len(hidden), chunk):
            scale = grad[part] / temperature
            local, own = _local_targets(targets[part], start, weight.shape[0])
            grad_logits = (_logits(hidden[part], weight, temperature, real) - lse[part, None]).exp().mul_(-scale[:, None])
            grad_logits.scatter_add_(1, local[:, None], torch.where(own, scale, 0.0)[:, None])
            grad_logits = grad_logits.to(weight.dtype)
            grad_hidden[part] = grad_logits @ weight
            grad_weight += grad_logits.t() @ hidden[part]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None


def _chunks(n: int, size: int):
    return (slice(i, min(i + size, n)) for i in range(0, n, size))


def _logits(hidden, weight, temperature, real):
    logits = (hidden @ weight.t()).float()
    if temperature != 1.0:
        logits /= temperature
    if real < logits.shape[1]:
        logits[:, real:] = -torch.inf  # rows that only pad the vocabulary
    return logits


def _local_targets(targets, start, rows):
    """(index into this rank's rows, whether the target is one of them)."""
    own = (targets >= start) & (targets < start + rows)
    return torch.where(own, targets - start, 0), own
