"""How often a model solves its tasks when it is sampled: real episodes, replies generated in batches with Hugging Face transformers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace

import torch
import transformers

from miles.env import EpisodeLimits, Task, run_episode

_AT_ONCE = 64  # episodes, and the largest batch


def sampled_success(model: transformers.PreTrainedModel, tokenizer: transformers.PreTrainedTokenizerFast, tasks: Sequence[Task],
                    limits: EpisodeLimits, samples: int, seed: int, max_turn_tokens: int) -> dict[str, float]:
    """Mean reward of `samples` episodes of each task, at temperature 1."""
    generate = _BatchedChat(model, tokenizer, max_turn_tokens)
    gate = asyncio.Semaphore(_AT_ONCE)

    async def one(task: Task) -> float:
        async with gate, generate.player() as chat:
            return (await run_episode(task, chat, limits)).reward

    async def all_of_them() -> list[float]:
        return await asyncio.gather(*(one(t) for t in tasks for _ in range(samples)))

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        rewards = asyncio.run(all_of_them())
    return {t.name: sum(rewards[i * samples : (i + 1) * samples]) / samples for i, t in enumerate(tasks)}


class _BatchedChat:
    """Collects the requests of all episodes that wait, and answers them together once nobody else is still acting (or after a moment)."""

    _PATIENCE_S = 0.2

    def __init__(self, model: transformers.PreTrainedModel, tokenizer: transformers.PreTrainedTokenizerFast, max_tokens: int):
        self.model, self.tokenizer, self.max_tokens = model, tokenizer, max_tokens
        self.players = 0
        self.waiting: list[tuple[list[int], asyncio.Future]] = []
        self.timer: asyncio.TimerHandle | None = None

    def player(self) -> _Player:
        return _Player(self)

    async def ask(self, ids: list[int]) -> list[int]:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self.waiting.append((ids, future))
        if self.timer is None:
            self.timer = loop.call_later(self._PATIENCE_S, self.answer)
        if len(self.waiting) >= self.players:
            self.answer()
        return await future

    def answer(self) -> None:
        if self.timer:
            self.timer.cancel()
            self.timer = None
        batch, self.waiting = self.waiting, []
        if not batch:
            return
        longest = max(len(ids) for ids, _ in batch)
        pad = self.tokenizer.pad_token_id
        tokens = torch.tensor([[pad] * (longest - len(ids)) + ids for ids, _ in batch])
        with torch.no_grad():
            out = self.model.generate(input_ids=tokens, attention_mask=(tokens != pad).long(), max_new_tokens=self.max_tokens, do_sample=True,
                                      temperature=1.0, top_k=0, top_p=1.0, eos_token_id=self.tokenizer.eos_token_id, pad_token_id=pad)
        for (_, future), row in zip(batch, out[:, longest:].tolist(), strict=True):
            end = row.index(self.tokenizer.eos_token_id) + 1 if self.tokenizer.eos_token_id in row else len(row)
            if not future.done():
                future.set_result(row[:end])


class _Player:
    """One episode's chat. Sampled tokens are kept as they are; only what is appended is tokenized."""

    def __init__(self, chat: _BatchedChat):
        self.chat = chat
        self.ids: list[int] = []
        self.seen = 0

    async def __aenter__(self) -> _Player:
        self.chat.players += 1
        return self

    async def __aexit__(self, *_exc) -> None:
        self.chat.players -= 1

    async def __call__(self, messages: list[dict[str, str]]) -> SimpleNamespace:
        tokenizer = self.chat.tokenizer
        new = [m for m in messages[self.seen :] if m["role"] != "assistant"]  # its own replies are in `ids` already
        text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in new) + "<|im_start|>assistant\n"
        self.ids += tokenizer.encode(("\n" if self.seen else "") + text, add_special_tokens=False)
        self.seen = len(messages)
        reply = await self.chat.ask(self.ids)
        self.ids += reply
        ended = reply[-1] == tokenizer.eos_token_id
        content = tokenizer.decode(reply[:-1] if ended else reply)
        return SimpleNamespace(content=content, finish_reason="stop" if ended else "length", message={"role": "assistant", "content": content})
