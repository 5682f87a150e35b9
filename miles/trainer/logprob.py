"""Log-probabilities of given tokens, and entropies, from hidden states, without ever holding the logits of more than one chunk."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

CHUNK_ELEMENTS = 32 * 2**20  # logits held at once: 128 MiB in float32


class Scores(NamedTuple):
    """Of n given tokens, each float32 [n]."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    highest: torch.Tensor  # equal to `logprobs` just where the given token is the most likely one; without gradient


def token_logprobs(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, *, temperature: float, vocab: int,
                   tp_group: dist.ProcessGroup) -> Scores:
    """Of p = softmax(hidden @ weight.T / temperature): log p[targets], the entropy -sum_j p_j log p_j in nats, and the largest log p.

    hidden [n, h]; weight [v, h], this rank's rows of the (padded) output matrix; targets int64 [n]; vocab: rows that exist.
    The softmax runs over the tensor-parallel group. Gradients: of `hidden` for this rank's rows only (the caller reduces them),
    of `weight` in full, where it wants one. (float64 in, float64 out.)
    """
    return Scores(*_TokenLogprobs.apply(hidden, weight, targets, temperature, vocab, tp_group))


class _TokenLogprobs(torch.autograd.Function):
    """Forward keeps the log-sum-exp and the entropy H of each row; backward computes the logits z again, chunk by chunk.

    d log p_t / d z_j = [j = t] - p_j;    d H / d z_j = -p_j (log p_j + H).
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, vocab, tp_group):
        rows = weight.shape[0]
        start = tp_group.rank() * rows
        ctx.settings = (temperature, max(0, min(vocab - start, rows)), start, max(1, CHUNK_ELEMENTS // rows))
        ctx.set_materialize_grads(False)  # None: nothing depends on that output
        distributed = tp_group.size() > 1
        logprobs = hidden.new_empty(len(hidden), dtype=_wide(hidden))
        lse, entropy, highest = torch.empty_like(logprobs), torch.empty_like(logprobs), torch.empty_like(logprobs)
        for part in _chunks(len(hidden), ctx.settings[3]):
            logits = _logits(hidden[part], weight, *ctx.settings[:2])
            local, own = _local_targets(targets[part], start, rows)
            chosen = torch.where(own, logits.gather(1, local[:, None])[:, 0], 0.0)
            top = logits.max(1).values
            if distributed:
                dist.all_reduce(top, op=dist.ReduceOp.MAX, group=tp_group)
            shifted = logits[:, : ctx.settings[1]].sub_(top[:, None])  # no rows that only pad: 0 * -inf below
            grown = shifted.exp()
            sums = torch.stack([grown.sum(1), grown.mul_(shifted).sum(1), chosen])
            if distributed:
                dist.all_reduce(sums, group=tp_group)
            log_total = sums[0].log()
            lse[part] = top + log_total
            logprobs[part], highest[part] = sums[2] - lse[part], top - lse[part]
            entropy[part] = log_total - sums[1] / sums[0]
        ctx.save_for_backward(hidden, weight, targets, lse, entropy)
        ctx.mark_non_differentiable(highest)
        return logprobs, entropy, highest

    @staticmethod
    def backward(ctx, grad, grad_entropy, _):
        hidden, weight, targets, lse, entropy = ctx.saved_tensors
        temperature, real, start, chunk = ctx.settings
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=_wide(weight)) if ctx.needs_input_grad[1] else None
        for part in _chunks(len(hidden), chunk):
            local, own = _local_targets(targets[part], start, weight.shape[0])
            log_p = _logits(hidden[part], weight, temperature, real).sub_(lse[part, None])
            grad_logits = log_p.exp()  # p, and then in place the gradient
            scale = torch.zeros_like(lse[part]) if grad is None else grad[part] / temperature
            if grad_entropy is None:
                grad_logits.mul_(-scale[:, None])
            else:
                by_entropy = grad_entropy[part] / temperature
                factor = log_p.add_(entropy[part, None]).mul_(-by_entropy[:, None]).sub_(scale[:, None])
                grad_logits[:, :real].mul_(factor[:, :real])
            grad_logits.scatter_add_(1, local[:, None], torch.where(own, scale, 0.0)[:, None])
            grad_logits = grad_logits.to(weight.dtype)
            grad_hidden[part] = grad_logits @ weight
            if grad_weight is not None:
                grad_weight += grad_logits.t() @ hidden[part]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None


def _chunks(n: int, size: int):
    return (slice(i, min(i + size, n)) for i in range(0, n, size))


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _logits(hidden, weight, temperature, real):
    logits = (hidden @ weight.t()).to(_wide(hidden))
    if temperature != 1.0:
        logits /= temperature
    if real < logits.shape[1]:
        logits[:, real:] = -torch.inf  # rows that only pad the vocabulary
    return logits


def _local_targets(targets, start, rows):
    """(index into this rank's rows, whether the target is one of them)."""
    own = (targets >= start) & (targets < start + rows)
    return torch.where(own, targets - start, 0), own
