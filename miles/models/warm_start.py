"""Supervised training on weighted demonstrations: plain torch, loss on the assistant's tokens alone."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as nnf
import transformers

from miles.models.demonstrations import Demonstration
from miles.models.prepare import Say

EPOCHS = 30
BATCH = 24  # demonstrations
PEAK_LR = 3e-3


@dataclass(frozen=True)
class Example:
    tokens: list[int]
    mask: list[int]  # 1 where the assistant wrote the token, its end mark included
    weight: float


def encode(tokenizer: transformers.PreTrainedTokenizerFast, d: Demonstration) -> Example:
    """ChatML tokens of a demonstration. The join is exact: every piece starts or ends with a special token, which no merge crosses."""
    tokens: list[int] = []
    mask: list[int] = []
    for m in d.messages:
        before, said, after = f"<|im_start|>{m['role']}\n", f"{m['content']}<|im_end|>", "\n"
        for text, own in ((before, 0), (said, int(m["role"] == "assistant")), (after, 0)):
            ids = tokenizer.encode(text, add_special_tokens=False)
            tokens += ids
            mask += [own] * len(ids)
    return Example(tokens, mask, d.weight)


def train(model: transformers.PreTrainedModel, tokenizer: transformers.PreTrainedTokenizerFast, demonstrations: Sequence[Demonstration],
          seed: int, say: Say, epochs: int = EPOCHS, batch_size: int = BATCH, peak_lr: float = PEAK_LR) -> None:
    """AdamW with a cosine schedule over `epochs` passes, in place. The order depends on `seed` alone.

    Loss: sum over assistant tokens of weight * -log p, over the sum of the weights of those tokens, plus the router's balance loss where the architecture
    has one (GLM-4 MoE balances by a bias instead).
    """
    examples = [encode(tokenizer, d) for d in demonstrations]
    steps = epochs * math.ceil(len(examples) / batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min((s + 1) / 20, 0.5 * (1 + math.cos(math.pi * s / steps)) + 0.02))
    rng = random.Random(seed)
    model.train()
    balance = getattr(model.config, "router_aux_loss_coef", 0.0)
    for epoch in range(1, epochs + 1):
        order = sorted(range(len(examples)), key=lambda i: len(examples[i].tokens) + rng.random() * 30)  # similar lengths together: less padding
        batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
        rng.shuffle(batches)
        total = count = 0.0
        for batch in batches:
            tokens, weights, real = pad([examples[i] for i in batch], tokenizer.pad_token_id)
            out = model(input_ids=tokens, attention_mask=real, use_cache=False,
                        **({"output_router_logits": True} if balance else {}))
            nll = nnf.cross_entropy(out.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
            w = weights[:, 1:].flatten()
            loss = (nll * w).sum() / w.sum()
            (loss + balance * out.aux_loss if balance else loss).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
            total += (nll.detach() * w).sum().item()
            count += w.sum().item()
        if epoch % 6 == 0 or epoch == epochs:
            say(f"  pass {epoch} of {epochs}: loss {total / count:.3f}")
    model.eval()


def pad(examples: Sequence[Example], pad_id: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(tokens int64 [B, T], loss weights float32 [B, T], attention mask int64 [B, T]), padded on the right.

    The mask comes from the lengths: a tokenizer may pad with the token that also ends a message.
    """
    length = max(len(e.tokens) for e in examples)
    tokens = torch.full((len(examples), length), pad_id, dtype=torch.int64)
    weights = torch.zeros(len(examples), length)
    real = torch.zeros(len(examples), length, dtype=torch.int64)
    for row, e in enumerate(examples):
        tokens[row, : len(e.tokens)] = torch.tensor(e.tokens)
        real[row, : len(e.tokens)] = 1
        weights[row, : len(e.tokens)] = torch.tensor(e.mask) * e.weight
    return tokens, weights, real
