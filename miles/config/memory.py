"""Memory plan per GPU, before anything is submitted: what each trainer rank and each engine GPU must hold, and what does not fit.

Pure: configuration, site profile and the model's `config.json` in, numbers out. Weights, gradients and optimizer state are counted
exactly from the layout; activations, engine work space and reserves are estimates, each with its formula in its note. 1 GB = 1e9 bytes.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from miles.config.precision import FORMATS
from miles.config.schema import MilesConfig, SiteConfig
from miles.config.shape import LayerShape, ModelShape, find_hf_config, model_shape
from miles.core import ConfigError

GB = 1e9
TRAINER_BYTES = {
    "fp32": 4.0,
    "bf16": 2.0,
    "fp8": 3.0,
    "mxfp8": 3.0 + 1 / 32,
    "nvfp4": 2.5 + 1 / 16,
    "int4": 2.5,
}  # low precision: beside a bf16 copy
ENGINE_BYTES = {name: f.bytes_per_element for name, f in FORMATS.items()}  # with scales
GRADIENT_BYTES = 4  # accumulated and reduced in fp32
STATE_BYTES = 12  # fp32 parameter and two Adam moments
STREAMED_BYTES = {"fp32": STATE_BYTES, "bf16": 8}  # by the format of the moments
STREAM_BUFFERS_GB = 3.0  # optimizer buckets being read, computed and written
RESERVE_GB = 8.0  # CUDA context, NCCL buffers, allocator fragmentation, weight gathering
CONTEXT_GB = 2.0  # what a process keeps on a shared GPU when it has given its memory back: CUDA context, libraries, NCCL buffers
ROUTING_IMBALANCE = 1.5  # tokens an expert-parallel rank may get, over the even share


@dataclass(frozen=True)
class Item:
    name: str
    gb: float
    note: str = ""


@dataclass(frozen=True)
class StagePlan:
    """One pipeline stage; every rank of it holds the same amounts. Layers are counted from 1, inclusive."""

    stage: int
    first_layer: int
    last_layer: int
    parameters: float  # per rank
    items: tuple[Item, ...]

    @property
    def total_gb(self) -> float:
        return sum(i.gb for i in self.items)


@dataclass(frozen=True)
class EnginePlan:
    """One engine GPU. `kv_tokens` is what fits, `kv_worst_tokens` what the sessions of one attention rank need when all reach their
    limit."""

    items: tuple[Item, ...]
    kv_bytes_per_token: float
    kv_tokens: int
    kv_worst_tokens: int

    @property
    def total_gb(self) -> float:
        return sum(i.gb for i in self.items)


@dataclass(frozen=True)
class Plan:
    """`problems` lists what does not fit (one message each); `notes` what a reader should know."""

    model_parameters: int
    gpu_memory_gb: float
    resident_state_gb: float  # optimizer state over all ranks, per rank on average, if resident
    stages: tuple[StagePlan, ...]
    engine: EnginePlan
    disk_per_node_gb: float
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        out = asdict(self)
        for stage, plan in zip(out["stages"], self.stages, strict=True):
            stage["total_gb"] = plan.total_gb
        out["engine"]["total_gb"] = self.engine.total_gb
        return out

    def table(self) -> str:
        """The plan as plain text."""
        names = [i.name for i in self.stages[0].items]
        lines = [
            f"Memory plan per GPU of {self.gpu_memory_gb:g} GB; model of {self.model_parameters / 1e9:.4g} B parameters",
            "trainer stage   layers   params/rank" + "".join(f"{n:>14}" for n in names) + f"{'total GB':>12}",
        ]
        for s in self.stages:
            lines.append(
                f"{s.stage + 1:>13}{f'{s.first_layer}-{s.last_layer}':>9}{s.parameters / 1e9:>11.2f} B"
                + "".join(f"{i.gb:>14.1f}" for i in s.items)
                + f"{s.total_gb:>12.1f}"
            )
        lines.append(
            f"optimizer state if resident: {self.resident_state_gb:.0f} GB a rank on average"
            + (f"; on disk: {self.disk_per_node_gb:.0f} GB a node" if self.disk_per_node_gb else "")
        )
        lines.append(
            "engine GPU: " + ", ".join(f"{i.name} {i.gb:.1f}" for i in self.engine.items) + f", total {self.engine.total_gb:.1f} GB"
        )
        lines.append(
            f"  KV cache: {self.engine.kv_bytes_per_token / 1e3:.1f} kB a token, room for {self.engine.kv_tokens:,} tokens; "
            f"all sessions at their limit need {self.engine.kv_worst_tokens:,}"
        )
        lines += [f"note: {n}" for n in self.notes] + [f"PROBLEM: {p}" for p in self.problems]
        return "\n".join(lines)


def memory_plan(config: MilesConfig, site: SiteConfig, hf_config: dict[str, Any] | None = None) -> Plan:
    """The plan of a configuration that fits. Raises ConfigError: the layout cannot split the model, or something does not fit
    (`draft_plan` returns such a plan with its problems instead)."""
    plan = draft_plan(config, site, hf_config)
    if plan.problems:
        raise ConfigError(
            "\n".join(plan.problems), "a plan that fits every GPU", "change the keys named above; `miles-submit check` prints the plan"
        )
    return plan


def draft_plan(config: MilesConfig, site: SiteConfig, hf_config: dict[str, Any] | None = None) -> Plan:
    """Like `memory_plan`, but what does not fit is listed in `Plan.problems`. Raises ConfigError only for a layout that cannot split the
    model."""
    shape = model_shape(hf_config if hf_config is not None else find_hf_config(config))
    stages = stage_layers(config, len(shape.layers))
    wrong = layout_problems(config, shape, stages)
    if wrong:
        raise ConfigError("\n".join(wrong), "a layout that splits the model evenly", "change the keys named above")
    problems, notes = [], []
    shared = config.cluster.placement == "shared"  # the two are never on a GPU together: each fits beside what the other leaves there
    engine, engine_problems = _engine(config, site, shape)
    stays = _engine_leaves(config, engine) if shared else None
    models = trained_shapes(config, shape)
    plans = tuple(_stage(config, models, s, layers, stays) for s, layers in enumerate(stages))
    state = [sum(_resident_gb(config, m, s, layers) for m in models) for s, layers in enumerate(stages)]
    resident = sum(state) / len(state)
    streamed = config.trainer.optimizer.state == "stream"
    # a step reads one and writes another, and the third is a checkpoint's while that is copied
    files = [3 * sum(streamed_gb(config, m, s, layers) for m in models) if streamed else 0.0 for s, layers in enumerate(stages)]
    paused = [paused_gb(config, models, s, layers) if shared else 0.0 for s, layers in enumerate(stages)]
    to_disk = config.trainer.paused_state == "disk"
    disk = max(file + (gb if to_disk else 0.0) for file, gb in zip(files, paused, strict=True)) * config.cluster.trainer.ranks_per_node
    if config.cluster.trainer.gpus_per_node:
        problems += _trainer_fit(config, site, plans)
    if site.node_disk_gb is not None and disk > site.node_disk_gb:
        problems.append(
            f"the trainer's state needs {disk:.0f} GB of disk a trainer node, the site has node_disk_gb = {site.node_disk_gb:g}; "
            "use more trainer ranks, or a larger disk (trainer.optimizer.state_dir)"
            + (", or set trainer.optimizer.moments = 'bf16'" if streamed and config.trainer.optimizer.moments == "fp32" else "")
            + (", or trainer.paused_state = 'host'" if to_disk else "")
        )
    elif disk and site.node_disk_gb is None:
        notes.append(f"site.node_disk_gb is not set: the {disk:.0f} GB of the trainer's state on disk a node are not checked against it")
    host_problems, host_notes = _host(config, plans, 0.0 if to_disk else max(paused), engine_model_gb(config, shape))
    problems, notes = problems + host_problems, notes + host_notes
    if config.cluster.rollout.gpus_per_node:
        problems += engine_problems
        if not engine_problems and engine.kv_worst_tokens > engine.kv_tokens:
            notes.append(
                "the engine's KV cache cannot hold all its sessions at their limit at once: SGLang then queues or retracts requests"
            )
    if shape.sparse:
        notes.append("the indexer of sparse attention stays as it is in model.path: it has neither gradients nor optimizer state")
    if shape.draft and not config.trainer.mtp:
        notes.append(f"the {len(shape.draft)} draft (multi-token prediction) layer is served by a speculating engine, from its model folder, and not trained")
    return Plan(shape.total, site.gpu_memory_gb, resident, plans, engine, disk, tuple(problems), tuple(notes))


# -- layout ------------------------------------------------------------------------------------------------------------------
def stage_layers(config: MilesConfig, layers: int) -> tuple[range, ...]:
    """Layers (from 0) of each pipeline stage, as megatron-core splits them. Raises ConfigError when the rest does not divide."""
    lay = config.trainer.layout
    first, last = lay.first_stage_layers, lay.last_stage_layers
    middle = lay.pp - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0)
    if rest < 0 or (middle and (rest % middle or not rest)) or (not middle and rest):
        raise ConfigError(
            f"trainer.layout: {layers} layers do not split over pp = {lay.pp} with first_stage_layers = {first}, last_stage_layers = {last}"
            f" ({rest} layers left for {middle} stages)",
            "the same whole number of layers on every other stage",
            "set trainer.layout.first_stage_layers / last_stage_layers",
        )
    counts = ([first] if first is not None else []) + [rest // middle] * middle + ([last] if last is not None else [])
    starts = [sum(counts[:i]) for i in range(lay.pp)]
    return tuple(range(s, s + c) for s, c in zip(starts, counts, strict=True))


def layout_problems(config: MilesConfig, shape: ModelShape, stages: tuple[range, ...]) -> list[str]:
    """What the layout cannot split, and pipeline stages that would start on a layer without an index of its own."""
    lay, engine, out = config.trainer.layout, config.engine, []

    def divides(size: int, what: str, key: str, parts: int):
        if size % parts:
            out.append(f"{key} = {parts} does not divide the model's {size} {what}")

    divides(shape.heads, "attention heads", "trainer.layout.tp", lay.tp)
    divides(shape.kv_heads, "key-value heads", "trainer.layout.tp", lay.tp)
    divides(shape.ffn, "MLP columns", "trainer.layout.tp", lay.tp)
    divides(shape.heads, "attention heads", "engine.tp / engine.dp_attention", engine.tp // engine.dp_attention)
    if shape.experts:
        divides(shape.experts, "experts", "trainer.layout.ep", lay.ep)
        divides(shape.expert_ffn, "columns of an expert", "trainer.layout.etp", lay.etp)
        divides(shape.experts, "experts", "engine.ep", engine.ep)
    else:
        out += [
            f"{key} = {n}, but the model has no experts"
            for key, n in (("trainer.layout.ep", lay.ep), ("trainer.layout.etp", lay.etp), ("engine.ep", engine.ep))
            if n > 1
        ]
    computing = [i for i, layer in enumerate(shape.layers) if layer.indexes]
    for number, layers in enumerate(stages, 1):
        if not shape.layers[layers.start].indexes:
            before = max(i for i in computing if i < layers.start)
            after = min((i for i in computing if i > layers.start), default=None)
            near = f"{before + 1}" + (f" or {after + 1}" if after is not None else "")
            out.append(
                f"trainer.layout: pipeline stage {number} starts on layer {layers.start + 1}, which reuses the sparse index of layer "
                f"{before + 1} "
                f"on another stage; expected a start on a layer that computes its own (nearest: {near}); set first_stage_layers / "
                f"last_stage_layers"
            )
    if config.trainer.mtp and len(shape.draft) != 1:
        out.append(f"[trainer.mtp], but the model has {len(shape.draft)} draft layers (num_nextn_predict_layers); expected one; remove the section")
    if shape.max_context and config.model.max_context > shape.max_context:
        out.append(f"model.max_context = {config.model.max_context} is beyond the {shape.max_context} positions the model was made for")
    return out


# -- trainer -----------------------------------------------------------------------------------------------------------------
def trained_shapes(config: MilesConfig, shape: ModelShape) -> list[ModelShape]:
    """The policy, with its draft layer where that is trained and its adapters, and with `advantage = "gae"` the critic, whose output layer is one row on every
    tensor-parallel rank."""
    alone = replace(shape, draft=())
    return [shape if config.trainer.mtp else replace(alone, lora=config.trainer.lora), *([replace(alone, head=shape.hidden * config.trainer.layout.tp)] if config.algorithm.critic else [])]


def rank_parameters(config: MilesConfig, shape: ModelShape, stage: int, layers: range) -> tuple[float, float]:
    """Parameters one rank of a stage holds of a model of `trained_shapes`: (dense, routed experts)."""
    lay = config.trainer.layout
    part = [shape.layers[i] for i in layers]
    dense = sum((x.attention + x.mlp) / lay.tp + x.replicated for x in part)
    if stage == 0:
        dense += shape.embedding / lay.tp
    if stage == lay.pp - 1:
        dense += shape.hidden + (shape.head or (shape.embedding if lay.pp > 1 else 0)) / lay.tp  # a tied head on its own stage is a copy
        part += shape.draft
        dense += sum((x.attention + x.mlp) / lay.tp + x.replicated - 2 * shape.hidden**2 * (1 - 1 / lay.tp) for x in shape.draft)  # its projection is split too
        dense += shape.embedding / lay.tp if shape.draft and lay.pp > 1 else 0  # a copy: the draft layer embeds tokens
    of_dense, of_experts = adapter_parameters(config, shape, layers)
    return dense + of_dense, sum(x.experts * x.expert for x in part) / (lay.ep * lay.etp) + of_experts


def adapter_parameters(config: MilesConfig, shape: ModelShape, layers: range) -> tuple[float, float]:
    """Those of the adapters of some layers on one rank: (dense, routed experts)."""
    if shape.lora is None:
        return 0.0, 0.0
    lay, dense, experts = config.trainer.layout, 0.0, 0.0
    for x in (shape.layers[i] for i in layers):
        for target in shape.lora.targets:
            split, whole = x.sides[target]
            if target == "experts":
                experts += shape.lora.rank * x.experts * (split / lay.etp + whole) / lay.ep
            else:
                dense += shape.lora.rank * (split / lay.tp + whole)
    return dense, experts


def trained_parameters(config: MilesConfig, shape: ModelShape, stage: int, layers: range) -> tuple[float, float]:
    """Those of `rank_parameters` that have gradients and optimizer state."""
    if shape.lora is not None:
        return adapter_parameters(config, shape, layers)
    dense, experts = rank_parameters(config, shape, stage, layers)
    drafts = shape.draft if stage == config.trainer.layout.pp - 1 else ()
    return dense - sum(x.frozen for x in (*(shape.layers[i] for i in layers), *drafts)), experts


def _resident_gb(config: MilesConfig, shape: ModelShape, stage: int, layers: range) -> float:
    """Optimizer state of one rank in memory: fp32 training has no second fp32 copy of the parameters."""
    return (STATE_BYTES - (4 if config.model.trainer_precision == "fp32" else 0)) * _rank_shard(config, shape, stage, layers) / GB


def streamed_gb(config: MilesConfig, shape: ModelShape, stage: int, layers: range) -> float:
    """Optimizer state of one rank in a file, which has the parameters always."""
    return STREAMED_BYTES[config.trainer.optimizer.moments] * _rank_shard(config, shape, stage, layers) / GB


def _rank_shard(config: MilesConfig, shape: ModelShape, stage: int, layers: range) -> float:
    """Parameters whose optimizer state one rank has: dense parts are divided over the data- and context-parallel ranks, experts over the
    expert-data-parallel ones."""
    lay, ranks = config.trainer.layout, config.cluster.trainer.ranks
    dense, experts = trained_parameters(config, shape, stage, layers)
    return dense / (ranks / (lay.tp * lay.pp)) + experts / (ranks / (lay.etp * lay.ep * lay.pp))


def _engine_leaves(config: MilesConfig, engine: EnginePlan) -> Item:
    """What an engine keeps on a shared GPU while the trainer trains."""
    weights = engine.items[0].gb if config.engine.release == "kv_cache" else 0.0
    return Item("engine", (CONTEXT_GB + weights) if config.cluster.rollout.gpus_per_node else 0.0,
                "context of the engine's process" + (" and its weights" if weights else ""))


def _host(config: MilesConfig, stages: tuple[StagePlan, ...], paused: float, version: float) -> tuple[list[str], list[str]]:
    """(problems, notes) about what is kept in host memory beside what ranks have on GPUs; `paused`: GB of a trainer rank's state; `version`: GB of the weights that are
    published. The trainer's leader holds the newest version; a rollout node one copy that its engines load (miles.weights.shared), and none where CPU engines patch their own memory."""
    trainer, rollout, held = config.cluster.trainer, config.cluster.rollout, {}
    weights = max(s.parameters for s in stages) * TRAINER_BYTES[config.model.trainer_precision] / GB
    if paused:
        held["trainer state while engines generate"] = paused
    if config.algorithm.kl_coefficient and (config.algorithm.reference or not config.trainer.lora):
        held["reference weights"] = weights
    if config.trainer.lora:
        held["frozen weights under adapters"] = weights
    of_trainer = {name: gb * trainer.ranks_per_node for name, gb in held.items()}
    notes = [f"host memory: each trainer node holds {gb:.0f} GB of {name}" for name, gb in of_trainer.items()]
    if not config.trainer.lora:  # whose versions are the adapters
        of_trainer["the newest version of the weights (the leader's node)"] = version
    copies = rollout.ranks_per_node if config.trainer.lora else 1  # each rank merges adapters for itself
    of_rollout = {"the newest version of the weights": version * copies} if rollout.gpus_per_node else {}
    if version >= 1:  # less is not worth a line
        notes += [f"host memory: the trainer leader's node holds {version:.0f} GB of the newest version of the weights"] if not config.trainer.lora else []
        notes += [f"host memory: each rollout node holds {gb:.0f} GB of {name}, for its engines to load" for name, gb in of_rollout.items()]
    problems = []
    for what, component, parts in (("trainer", trainer, of_trainer), ("rollout", rollout, of_rollout)):
        if component.memory_gb is not None and sum(parts.values()) > component.memory_gb:
            problems.append(f"host memory: {' and '.join(f'{gb:.0f} GB of {name}' for name, gb in parts.items())} on a {what} node, cluster.{what}.memory_gb = "
                            f"{component.memory_gb:g}; raise it" + (", or use more trainer nodes" if what == "trainer" else ""))
    return problems, notes


def paused_gb(config: MilesConfig, models: list[ModelShape], stage: int, layers: range) -> float:
    """What a rank of the stage puts by while engines have its GPU: streamed optimizer state is not there to begin with."""
    state = 0.0 if config.trainer.optimizer.state == "stream" else sum(_resident_gb(config, m, stage, layers) for m in models)
    return _weights_gb(config, models, stage, layers) + state


def _weights_gb(config: MilesConfig, models: list[ModelShape], stage: int, layers: range) -> float:
    return sum(sum(rank_parameters(config, m, stage, layers)) for m in models) * TRAINER_BYTES[config.model.trainer_precision] / GB


def _stage(config: MilesConfig, models: list[ModelShape], stage: int, layers: range, stays: Item | None = None) -> StagePlan:
    """`models`: those of `trained_shapes`. `stays`: what else is on the GPU."""
    count = sum(rank_parameters(config, models[0], stage, layers))
    streamed = config.trainer.optimizer.state == "stream"
    state = (
        Item("optimizer", STREAM_BUFFERS_GB * len(models), "buckets in flight; the state is on disk")
        if streamed
        else Item("optimizer", sum(_resident_gb(config, m, stage, layers) for m in models), f"{STATE_BYTES} bytes a parameter over its data-parallel ranks")
    )
    both = "of the policy and the critic" if config.algorithm.critic else ""
    return StagePlan(
        stage,
        layers.start + 1,
        layers.stop,
        count,
        (
            Item("weights", _weights_gb(config, models, stage, layers), both),
            Item("gradients", sum(sum(trained_parameters(config, m, stage, layers)) for m in models) * GRADIENT_BYTES / GB, f"accumulated in fp32 {both}".strip()),
            state,
            Item("activations", activations_gb(config, models[0], stage, layers), "see activations_gb"),
            Item("reserve", RESERVE_GB if config.cluster.trainer.gpus_per_node else 0.0, "CUDA context, NCCL, fragmentation"),
            *([stays] if stays else []),
        ),
    )


def activations_gb(config: MilesConfig, shape: ModelShape, stage: int, layers: range) -> float:
    """Estimate of a rank's peak activations, GB: inputs kept per layer and micro-batch in flight (1F1B: pp - stage of them), one layer's
    forward and backward, and on the last stage the logits (fp32 value, softmax, gradient). With full recomputation only the layer
    inputs are kept. Tokens of the layer inputs and of the dispatch are divided by tp (sequence parallelism). A sparse index (int32, the keys picked for
    each token, the same on all tp ranks) is kept from forward to backward."""
    lay, tokens = config.trainer.layout, config.trainer.max_tokens_per_microbatch
    width = 4 if config.model.trainer_precision == "fp32" else 2
    share = tokens / lay.tp
    held = (*(shape.layers[i] for i in layers), *(shape.draft if stage == lay.pp - 1 else ()))
    works = [width * _layer_elements(shape, x, share, lay.etp) for x in held]
    kept = [share * shape.hidden * width] * len(works) if config.trainer.recompute == "full" else works
    logits = tokens * shape.vocab / lay.tp * 12 if stage == lay.pp - 1 else 0
    picked = 4 * tokens * shape.index_topk * sum(x.indexes for x in held)
    return ((sum(kept) + picked) * (lay.pp - stage) + max(2 * max(works), logits)) / GB


def _layer_elements(shape: ModelShape, layer: LayerShape, share: float, etp: int) -> float:
    """Elements one layer's forward makes on a rank: query, key, value, output, MLP, and 4 hidden vectors a token; routed experts see
    `top_k` copies of a token, dispatched and combined. Each tp rank works on all the tokens with its 1/tp of the columns."""
    dense = share * (shape.attention_width + 4 * shape.hidden + layer.mlp / shape.hidden)
    if not layer.experts:
        return dense
    return dense + share * shape.top_k * ROUTING_IMBALANCE * (2 * shape.hidden * etp + 3 * shape.expert_ffn)


def _trainer_fit(config: MilesConfig, site: SiteConfig, stages: tuple[StagePlan, ...]) -> list[str]:
    worst = max(stages, key=lambda s: s.total_gb)
    if worst.total_gb <= site.gpu_memory_gb:
        return []
    parts = ", ".join(f"{i.name} {i.gb:.0f}" for i in worst.items)
    state = next(i for i in worst.items if i.name == "optimizer")
    if config.trainer.optimizer.state == "resident" and worst.total_gb - state.gb + STREAM_BUFFERS_GB <= site.gpu_memory_gb:
        do = f"the resident optimizer state ({state.gb:.0f} GB) is what does not fit: set trainer.optimizer.state = 'stream'"
    else:
        do = "use more trainer ranks (cluster.trainer.nodes, trainer.layout), fewer trainer.max_tokens_per_microbatch, or larger GPUs"
    return [
        f"trainer stage {worst.stage + 1} needs {worst.total_gb:.0f} GB a GPU ({parts}), the site's GPUs have {site.gpu_memory_gb:g} GB; "
        f"{do}"
    ]


# -- engine ------------------------------------------------------------------------------------------------------------------
def kv_bytes_per_token(config: MilesConfig, shape: ModelShape) -> float:
    """KV cache bytes of one token on one GPU, over all layers. Sparse MLA in fp8 stores 512 fp8 values with one fp32 scale per 128 and
    the 64 rotary values in bf16: 656 bytes a layer; its index key is fp8 with one fp32 scale (SGLang 0.5.23, mem_cache)."""
    layers = len(shape.layers) + (len(shape.draft) if config.engine.speculative else 0)
    native = 4 if config.model.rollout_precision == "fp32" else 2
    width = 1 if config.engine.kv_cache.startswith("fp8") else native
    index = shape.index_dim + shape.index_dim // 128 * 4
    if shape.kv_latent:
        row = (
            shape.kv_latent + shape.kv_latent // 128 * 4 + 2 * shape.kv_rope
            if shape.sparse and width == 1
            else (shape.kv_latent + shape.kv_rope) * width
        )
        return layers * (row + index)
    attention_tp = config.engine.tp // config.engine.dp_attention
    return layers * 2 * math.ceil(shape.kv_heads / attention_tp) * shape.head_dim * width


def engine_model_gb(config: MilesConfig, shape: ModelShape) -> float:
    """The weights that engines serve, each once, GB: embeddings, head, router and norms are not quantized."""
    layers = shape.layers + (shape.draft if config.engine.speculative else ())
    quantized = sum(x.total - x.replicated for x in layers)
    plain = sum(x.replicated for x in layers) + shape.embedding + shape.head + shape.hidden
    return (ENGINE_BYTES[config.model.rollout_precision] * quantized + (4 if config.model.rollout_precision == "fp32" else 2) * plain) / GB


def _engine(config: MilesConfig, site: SiteConfig, shape: ModelShape) -> tuple[EnginePlan, list[str]]:
    e = config.engine
    attention_tp = e.tp // e.dp_attention  # what dp-attention does not split is repeated: an upper bound for shared experts and embeddings
    layers = shape.layers + (shape.draft if e.speculative else ())
    width = ENGINE_BYTES[config.model.rollout_precision]
    plain = 4 if config.model.rollout_precision == "fp32" else 2  # embeddings, head, router and norms are not quantized
    weights = (
        width * sum(x.experts * x.expert / e.tp + (x.attention + x.mlp) / attention_tp for x in layers)
        + plain * (sum(x.replicated for x in layers) + (shape.embedding + (shape.head or shape.embedding)) / attention_tp)
    ) / GB
    trainer = CONTEXT_GB if config.cluster.placement == "shared" and config.cluster.trainer.gpus_per_node else 0.0  # what it leaves there
    room = site.gpu_memory_gb * e.memory_fraction - weights - trainer
    per_token = kv_bytes_per_token(config, shape)
    fits = max(0, int(room * GB / per_token))
    tokens = min(fits, e.max_total_tokens or fits)
    ranks = config.cluster.rollout.ranks * e.dp_attention
    worst = math.ceil(config.rollout.in_flight / ranks) * config.rollout.max_session_tokens
    plan = EnginePlan(
        (
            Item("weights", weights),
            Item("KV cache", tokens * per_token / GB),
            Item("work space", site.gpu_memory_gb * (1 - e.memory_fraction), "1 - engine.memory_fraction"),
            *([Item("trainer", trainer, "context of the trainer's process")] if trainer else []),
        ),
        per_token,
        tokens,
        worst,
    )
    if room <= 0:
        return plan, [
            f"engine: weights of {weights:.0f} GB a GPU exceed engine.memory_fraction x {site.gpu_memory_gb:g} GB = "
            f"{site.gpu_memory_gb * e.memory_fraction:.0f} GB; raise engine.tp (more GPUs an engine), lower model.rollout_precision, or "
            f"use larger GPUs"
        ]
    if tokens < config.rollout.max_session_tokens:
        return plan, [
            f"engine: room for {tokens:,} tokens of KV cache, one session may have rollout.max_session_tokens = "
            f"{config.rollout.max_session_tokens:,}; raise engine.tp, engine.memory_fraction or engine.max_total_tokens"
        ]
    return plan, []
