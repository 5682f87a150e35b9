"""The nouns, as frozen dataclasses. Arrays carry their axes in a comment: T tokens, N sampled tokens, L MoE layers, K experts per token."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from miles.core.errors import StructureError

NO_VERSION = -1
"""The weight version of a token that was given (prompt, tool output), not sampled."""


class Role(enum.StrEnum):
    """What a process of a run is. One Slurm het group (component) per role."""

    TRAINER = "trainer"
    ROLLOUT = "rollout"


@dataclass(frozen=True)
class Layout:
    """Parallel layout of the trainer: sizes of each megatron-core dimension.

    `tp * pp * cp * dp` ranks hold the dense part; experts use `etp * ep * pp * expert_dp` of the same ranks.
    """

    world: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1

    def __post_init__(self):
        dense, expert = self.tp * self.pp * self.cp, self.etp * self.ep * self.pp
        for name, size in (("tp*pp*cp", dense), ("etp*ep*pp", expert)):
            if self.world % size:
                raise StructureError(
                    f"layout: {name} = {size} does not divide the world of {self.world} ranks",
                    f"a world size that is a multiple of {size}",
                    "change trainer.layout or cluster.trainer nodes and ranks_per_node",
                )

    @property
    def dp(self) -> int:
        return self.world // (self.tp * self.pp * self.cp)


@dataclass(frozen=True)
class Drafts:
    """What speculative decoding did for a turn, or for several."""

    passes: int = 0  # passes of the model that checked drafts; each also samples one token itself
    proposed: int = 0  # draft tokens
    accepted: int = 0  # of them

    def __add__(self, other: Drafts) -> Drafts:
        return Drafts(self.passes + other.passes, self.proposed + other.proposed, self.accepted + other.accepted)


@dataclass(frozen=True)
class Turn:
    """One engine reply, stored as it came. P = length of the whole input of this turn, N = tokens sampled.

    `input_ids[:len(previous input + output)]` equals the previous turn's tokens exactly (checked at assembly).
    """

    input_ids: np.ndarray  # int32 [P]
    output_ids: np.ndarray  # int32 [N]
    logprobs: np.ndarray  # float32 [N], natural log, of the distribution sampled from (after temperature)
    versions: np.ndarray  # int32 [N], weight version each token was sampled with
    finish_reason: str  # stop | length | abort
    cached_tokens: int = 0  # prompt tokens the engine served from its prefix cache
    routes: np.ndarray | None = None  # uint8|uint16 [P+N-1-routes_start, L, K], the set of experts chosen per position and MoE layer
    routes_start: int = 0  # position of the first row of `routes`
    seconds: float = 0.0
    drafts: Drafts = Drafts()
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Trajectory:
    """One training sequence: a leaf of one sample's history. Every token is trained (mask 1, sampled here) or given (mask 0).

    A sample with a linear history has one leaf. The leaves of a branching one may share sampled spans; such a span is trained in the first of them
    and given in the others, so sums over leaves count each trained token once. The figures of turns likewise belong to the leaf that trains the turn.
    What is known of the sample as a whole (reward, finish_reason, seconds, meta but for reused_tokens and drafts) is equal in all its leaves.
    """

    group_id: int
    sample: int  # 0 .. group_size-1
    task_id: str
    tokens: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # uint8 [T], 1 = sampled, and trained in this leaf
    logprobs: np.ndarray  # float32 [T], 0 where loss_mask is 0
    versions: np.ndarray  # int32 [T], NO_VERSION where loss_mask is 0
    routes: np.ndarray | None  # uint8|uint16 [T-1, L, K]; row t = experts that processed token t, a set: any order, ascending from the buffer
    reward: float
    finish_reason: str  # done | turns | length | deadline | crashed (a harness) | tests:CAUSE (they said nothing that counts)
    turns: int  # that this leaf trains; so are those of the three counts of tokens below
    exact: bool  # every sampled token, trained here or not, and its KV prefix come from one single weight version
    cached_tokens: int = 0  # prompt tokens served from the prefix cache
    cacheable_tokens: int = 0  # prompt tokens whose KV this engine had already computed for this session
    prompt_tokens: int = 0  # prompt tokens sent
    seconds: float = 0.0
    leaf: int = 0  # 0 .. leaves of the sample - 1, in the order of their last answers
    meta: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        n = len(self.tokens)
        for name in ("loss_mask", "logprobs", "versions"):
            if len(getattr(self, name)) != n:
                raise StructureError(
                    f"trajectory {self.key}: {name} has {len(getattr(self, name))} entries", f"{n}, one per token", cause=f"length:{name}"
                )
        if self.routes is not None and len(self.routes) != n - 1:
            raise StructureError(f"trajectory {self.key}: routes has {len(self.routes)} rows", f"{n - 1}, tokens - 1", cause="length:routes")
        sampled = self.loss_mask.astype(bool)
        if not sampled.any():
            raise StructureError(f"trajectory {self.key}: no sampled token", "at least one", cause="empty")
        if (self.versions[sampled] < 0).any() or (self.versions[~sampled] != NO_VERSION).any():
            raise StructureError(
                f"trajectory {self.key}: a sampled token without a version, or a given token with one",
                "versions >= 0 exactly where loss_mask is 1", cause="versions",
            )
        if not np.isfinite(self.logprobs).all():
            raise StructureError(f"trajectory {self.key}: non-finite log-probability", "finite float32", cause="logprobs")

    @property
    def key(self) -> str:
        return f"g{self.group_id:08d}s{self.sample:03d}l{self.leaf:03d}"

    @property
    def sampled_tokens(self) -> int:
        return int(np.count_nonzero(self.loss_mask))

    @property
    def oldest_version(self) -> int:
        return int(self.versions[self.loss_mask.astype(bool)].min())

    @property
    def newest_version(self) -> int:
        return int(self.versions.max())

    @property
    def sampled_by(self) -> list[int]:
        """The versions that sampled its tokens, each once, ascending."""
        return np.unique(self.versions[self.loss_mask.astype(bool)]).tolist()


@dataclass(frozen=True)
class Group:
    """The samples of one prompt that are compared with each other. May hold fewer than `group_size` samples, and several leaves of each."""

    group_id: int
    task_id: str
    trajectories: tuple[Trajectory, ...]  # in the order of (sample, leaf)

    def __post_init__(self):
        if not self.trajectories:
            raise StructureError(f"group {self.group_id}: no trajectory", "at least one", cause="empty-group")

    @property
    def oldest_version(self) -> int:
        return min(t.oldest_version for t in self.trajectories)
