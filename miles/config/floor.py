"""The shortest time a training step can take on a site's hardware, before anything is submitted: each term as amount / rate. Pure.

Amounts follow from configuration, layout and the model's `config.json`; rates are what the site profile states. A run is slower than this floor; how much
slower says where to look. Time in which the trainer waits for trajectories is not in it. 1 GB = 1e9 bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from miles.config.memory import (
    GRADIENT_BYTES,
    engine_model_gb,
    paused_gb,
    stage_layers,
    streamed_gb,
    trained_parameters,
    trained_shapes,
)
from miles.config.schema import MilesConfig, SiteConfig
from miles.config.shape import LayerShape, ModelShape, find_hf_config, model_shape
from miles.core import ConfigError

PASSES = {"none": 3, "full": 4}  # forward passes' worth of work: forward, backward (two), and the forward that is computed again


@dataclass(frozen=True)
class Term:
    """`amount / rate` seconds, of the slowest rank or node; `rate` is None where the site profile does not state it."""

    name: str
    amount: float
    unit: str  # of the amount
    rate: float | None  # units a second
    source: str  # where the rate comes from
    note: str  # how the amount is counted

    @property
    def seconds(self) -> float | None:
        return None if self.rate is None else self.amount / self.rate


@dataclass(frozen=True)
class StepFloor:
    """`terms` follow one another in a step. `tokens`: of one trajectory, as assumed."""

    tokens: int
    trajectories: int
    terms: tuple[Term, ...]

    @property
    def seconds(self) -> float:
        """Sum of the terms whose rate is known."""
        return sum(t.seconds or 0.0 for t in self.terms)

    @property
    def unknown(self) -> tuple[str, ...]:
        """Site options without a value."""
        return tuple(dict.fromkeys(t.source for t in self.terms if t.rate is None))

    def to_json(self) -> dict[str, Any]:
        return {"tokens_per_trajectory": self.tokens, "trajectories": self.trajectories, "seconds": self.seconds, "unknown": self.unknown,
                "terms": [{"name": t.name, "amount": t.amount, "unit": t.unit, "rate": t.rate, "rate_source": t.source, "seconds": t.seconds,
                           "note": t.note} for t in self.terms]}

    def table(self) -> str:
        """The floor as plain text."""
        lines = [f"Step-time floor: {self.trajectories} trajectories of {self.tokens:,} tokens",
                 f"{'term':<22}{'amount':>16}{'rate':>18}{'seconds':>11}  counted as"]
        for t in self.terms:
            rate = "not stated" if t.rate is None else f"{t.rate:,.4g} {t.unit}/s"
            seconds = "?" if t.seconds is None else f"{t.seconds:,.2f}"
            lines.append(f"{t.name:<22}{f'{t.amount:,.4g} {t.unit}':>16}{rate:>18}{seconds:>11}  {t.note}")
        longest = max(self.terms, key=lambda t: t.seconds or 0.0)
        lines.append(f"{'sum':<56}{self.seconds:>11,.2f}" + ("  without the terms whose rate the site profile does not state" if self.unknown else "")
                     + (f"  of which {longest.name} is {longest.seconds / self.seconds:.0%}" if self.seconds else ""))
        lines += [f"note: set {source} in the site profile" for source in self.unknown]
        return "\n".join(lines)


def step_floor(config: MilesConfig, site: SiteConfig, tokens: int | None = None, density: float = 0.01, hf_config: dict[str, Any] | None = None) -> StepFloor:
    """`tokens` of a trajectory, by default as many as it may have; `density`: share of the weights that a step changes, which counts for patches on disk.

    Raises ConfigError: the layout cannot split the model, or a value is out of range.
    """
    shape = model_shape(hf_config if hf_config is not None else find_hf_config(config))
    tokens = tokens or config.rollout.max_session_tokens
    if not 0 < density <= 1:
        raise ConfigError(f"--density {density}", "a share of the weights, 0 < density <= 1", "0.01 is usual at learning rates near 1e-6")
    if not 0 < tokens <= config.rollout.max_session_tokens:
        raise ConfigError(f"--tokens {tokens}", f"1 .. {config.rollout.max_session_tokens}, rollout.max_session_tokens", "give the mean length you expect")
    trajectories = config.trainer.groups_per_step * config.rollout.group_size
    stages = stage_layers(config, len(shape.layers))
    return StepFloor(tokens, trajectories, (
        *_compute(config, site, shape, stages, trajectories, tokens), *_exchange(config, site, shape, stages), _optimizer(config, site, shape, stages),
        *_paused(config, site, shape, stages), _weights(config, site, shape, density)))


# -- compute -----------------------------------------------------------------------------------------------------------------
def _compute(config: MilesConfig, site: SiteConfig, shape: ModelShape, stages: tuple[range, ...], trajectories: int, tokens: int) -> tuple[Term, Term]:
    lay, ranks = config.trainer.layout, config.cluster.trainer.ranks
    passes = PASSES[config.trainer.recompute] + (1 if config.algorithm.kl_coefficient else 0)  # the reference scores every token
    passes -= 1 if config.trainer.lora else 0  # gradients of weights that have no adapters are not made; those of the others are left out with them, from below
    critic = PASSES[config.trainer.recompute] if config.algorithm.critic else 0  # without a head
    work = []
    for s, layers in enumerate(stages):
        forward, headless = (stage_flops(shape, layers, tokens, last=last) for last in (s == lay.pp - 1, False))
        untrained = sum(_index_flops(shape, shape.layers[i], tokens) for i in layers)  # backward, which counts two passes, leaves the sparse index out
        work.append(trajectories * tokens * (passes * forward + critic * headless - 2 * len(trained_shapes(config, shape)) * untrained))
    slowest = max(work) / (ranks / lay.pp) / 1e12
    copies = ranks // (lay.tp * lay.pp * lay.cp)
    microbatches = max(1, math.ceil(trajectories / copies * tokens / (config.trainer.max_tokens_per_microbatch * lay.cp)))
    rate = site.gpu_tflops
    return (
        Term("compute", slowest, "TFLOP", rate, "site.gpu_tflops", f"slowest of {lay.pp} stages, {passes} x forward{f' and {critic} x of the critic' if critic else ''}, evenly over its {ranks // lay.pp} ranks"),
        Term("pipeline bubble", slowest * (lay.pp - 1) / microbatches, "TFLOP", rate, "site.gpu_tflops",
             f"(pp - 1) / micro-batches of it: {lay.pp - 1} / {microbatches}"),
    )


def stage_flops(shape: ModelShape, layers: range, tokens: int, *, last: bool) -> float:
    """Floating-point operations of one token's forward pass through a pipeline stage, over all its ranks: two for each weight it meets, and
    those of causal attention over the half of `tokens` keys that a token sees on average (with sparse attention the indexer scores them, and
    attention sees those that it picks)."""
    return sum(_layer_flops(shape, shape.layers[i], tokens) for i in layers) + (2 * shape.hidden * shape.vocab if last else 0)


def _layer_flops(shape: ModelShape, layer: LayerShape, tokens: int) -> float:
    routed = shape.top_k * layer.expert if layer.experts else 0
    weights, keys = layer.attention + layer.mlp + layer.replicated - layer.frozen + routed, tokens / 2
    return _index_flops(shape, layer, tokens) + 2 * (weights + (min(keys, shape.index_topk) if shape.sparse else keys) * shape.score_width)


def _index_flops(shape: ModelShape, layer: LayerShape, tokens: int) -> float:
    """Of the sparse index of one token: the indexer's weights, and its scores of the keys that the token sees."""
    return 2 * (layer.frozen + tokens / 2 * shape.index_width) if shape.sparse and layer.indexes else 0.0


# -- everything that moves -----------------------------------------------------------------------------------------------------
def _exchange(config: MilesConfig, site: SiteConfig, shape: ModelShape, stages: tuple[range, ...]) -> tuple[Term, Term]:
    """Reduce-scatter of gradients and all-gather of updated parameters: (n - 1) / n of them cross the wire of each of n ranks."""
    lay, ranks = config.trainer.layout, config.cluster.trainer.ranks
    replicas = ranks // (lay.tp * lay.pp), ranks // (lay.etp * lay.ep * lay.pp)
    moved = max(sum(count * (1 - 1 / n) for m in trained_shapes(config, shape) for count, n in zip(trained_parameters(config, m, s, layers), replicas, strict=True))
                for s, layers in enumerate(stages))
    a_node = moved * config.cluster.trainer.ranks_per_node / 1e9
    note = f"of a node's {config.cluster.trainer.ranks_per_node} ranks; over {replicas[0]} replicas (experts: {replicas[1]})"
    return tuple(Term(name, a_node * width, "GB", site.node_network_gb_s, "site.node_network_gb_s", f"{width} bytes a parameter {note}")
                 for name, width in (("gradient reduction", GRADIENT_BYTES), ("parameter gathering", 4 if config.model.trainer_precision == "fp32" else 2)))


def _optimizer(config: MilesConfig, site: SiteConfig, shape: ModelShape, stages: tuple[range, ...]) -> Term:
    if config.trainer.optimizer.state != "stream":
        return Term("optimizer I/O", 0.0, "GB", site.node_disk_gb_s or 1.0, "site.node_disk_gb_s", "resident state: nothing is read or written")
    a_node = config.cluster.trainer.ranks_per_node * max(sum(streamed_gb(config, m, s, layers) for m in trained_shapes(config, shape)) for s, layers in enumerate(stages))
    return Term("optimizer I/O", 2 * a_node, "GB", site.node_disk_gb_s, "site.node_disk_gb_s",
                f"fp32 parameters and {config.trainer.optimizer.moments} moments, read and written on a node's disk")


def _paused(config: MilesConfig, site: SiteConfig, shape: ModelShape, stages: tuple[range, ...]) -> tuple[Term, ...]:
    if config.trainer.paused_state != "disk":
        return ()  # to host memory, at a rate that the site profile does not state
    a_node = config.cluster.trainer.ranks_per_node * max(paused_gb(config, trained_shapes(config, shape), s, layers) for s, layers in enumerate(stages))
    return (Term("pause and resume I/O", 2 * a_node, "GB", site.node_disk_gb_s, "site.node_disk_gb_s", "what waits while engines generate, written and read on a node's disk"),)


def _weights(config: MilesConfig, site: SiteConfig, shape: ModelShape, density: float) -> Term:
    whole = engine_model_gb(config, shape)
    if lora := config.trainer.lora:
        count = lora.rank * sum(sum(x.sides[t]) * (x.experts if t == "experts" else 1) for x in shape.layers for t in lora.targets)
        return Term("weight update", count * (4 if config.model.trainer_precision == "fp32" else 2) / 1e9, "GB", site.shared_gb_s, "site.shared_gb_s", "all adapters")
    if config.weights.transport == "disk":
        # Which elements changed, and one bit for the direction of each: the entropy bound of a patch of changes by one ulp.
        bits = (-(density * math.log2(density) + (1 - density) * math.log2(1 - density)) if density < 1 else 0.0) + density
        return Term("weight update", shape.total * bits / 8e9, "GB", site.shared_gb_s, "site.shared_gb_s",
                    f"a patch of {density:.2%} of the weights at its entropy bound; a keyframe: {whole:,.4g} GB")
    return Term("weight update", whole, "GB", site.node_network_gb_s, "site.node_network_gb_s", "all weights of an engine into each rollout node")
