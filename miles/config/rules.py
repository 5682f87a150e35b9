"""Rules that span sections. Each returns what was found, what was expected and what to do. Pure: no device, no network, no file."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from miles.config.precision import FORMATS, LEGAL, TRAINED, refusal

if TYPE_CHECKING:
    from miles.config.schema import HarnessConfig, MilesConfig

HARNESS_PLACEHOLDERS = ("url", "model", "instruction", "instruction_file", "workspace", "max_turns")
_TAKEN = ("/app", "/miles", "/tests", "/logs", "/usr", "/etc", "/proc", "/dev", "/tmp", "/bin", "/sbin", "/lib", "/lib32", "/lib64")  # by the sandbox and the environment


def problems(c: MilesConfig) -> list[str]:
    """Everything wrong with a configuration as a whole, one message per problem."""
    out: list[str] = []

    def refuse(found: str, expected: str, do: str):
        out.append(f"{found}; expected {expected}; {do}")

    lay, ranks = c.trainer.layout, c.cluster.trainer.ranks
    for name, size in (("tp*pp*cp", lay.tp * lay.pp * lay.cp), ("etp*ep*pp", lay.etp * lay.ep * lay.pp)):
        if ranks % size:
            refuse(f"trainer.layout: {name} = {size} does not divide the {ranks} trainer ranks", f"a multiple of {size} ranks",
                   "change cluster.trainer.nodes / ranks_per_node or trainer.layout")
    if (lay.first_stage_layers or lay.last_stage_layers) and lay.pp == 1:
        refuse("trainer.layout: first_stage_layers / last_stage_layers with pp = 1", "pp >= 2", "remove them or raise pp")

    if c.cluster.placement == "shared":
        _shared(c, refuse)
    elif c.trainer.paused_state == "disk":
        refuse("trainer.paused_state = 'disk' with cluster.placement = 'disjoint': the trainer has GPUs of its own, and its state never leaves them", "'host'",
               "remove trainer.paused_state, or set cluster.placement = 'shared' (to keep optimizer state on disk: trainer.optimizer.state = 'stream')")
    for name, part in (("trainer", c.cluster.trainer), ("rollout", c.cluster.rollout)):
        if part.gpus_per_node and part.gpus_per_node % part.ranks_per_node:
            refuse(f"cluster.{name}: {part.ranks_per_node} ranks per node on {part.gpus_per_node} GPUs would put two ranks on one GPU or leave some idle",
                   "ranks_per_node to divide gpus_per_node", f"change cluster.{name}.ranks_per_node or gpus_per_node")

    m = c.model
    if why := refusal(m.trainer_precision, m.rollout_precision):
        refuse(f"precision: trainer {m.trainer_precision} with rollout {m.rollout_precision}: {why}", "one of " + ", ".join(f"{t}->{r}" for t, r in sorted(LEGAL) if t in TRAINED),
               "change model.trainer_precision or model.rollout_precision")
    if m.trainer_precision not in TRAINED:
        refuse(f"model.trainer_precision = {m.trainer_precision!r}: the trainer has no forward and backward in {m.trainer_precision} yet", " or ".join(TRAINED),
               "set model.trainer_precision")
    if (m.rollout_path is not None) != (FORMATS[m.rollout_precision].block is not None):
        refuse(f"model.rollout_precision = {m.rollout_precision!r} {'without' if m.rollout_path is None else 'with'} model.rollout_path",
               "a folder in the rollout's format for a quantized rollout, and none for any other", "make it with tools/quantize_model, or remove it")
    if m.high_precision and FORMATS[m.rollout_precision].block is None:
        refuse(f"model.high_precision with model.rollout_precision = {m.rollout_precision!r}, which quantizes nothing", "no patterns", "remove model.high_precision")

    if c.weights.transport == "p2p" and FORMATS[m.rollout_precision].block is not None:
        refuse(f"weights.transport = 'p2p' with model.rollout_precision = {m.rollout_precision!r}: weights are quantized where they are whole, and shards are not",
               "'broadcast' or 'disk'", "set weights.transport, or a rollout precision that quantizes nothing")

    if c.trainer.lora:
        _adapters(c, refuse)
    if c.rollout.top_p != 1.0:
        refuse(f"rollout.top_p = {c.rollout.top_p}: the engine would sample from a cut distribution that the trainer does not see", "1.0", "set rollout.top_p = 1.0")
    if c.rollout.min_samples > c.rollout.group_size:
        refuse(f"rollout.min_samples = {c.rollout.min_samples} is more than a group of {c.rollout.group_size} has", f"<= {c.rollout.group_size}",
               "lower rollout.min_samples, or raise rollout.group_size")
    if c.rollout.in_flight < c.rollout.group_size:
        refuse(f"rollout.in_flight = {c.rollout.in_flight} is smaller than a group of {c.rollout.group_size}", f">= {c.rollout.group_size}",
               "raise rollout.in_flight")
    if c.buffer.capacity_groups < c.trainer.groups_per_step:
        refuse(f"buffer.capacity_groups = {c.buffer.capacity_groups} never holds a step of {c.trainer.groups_per_step} groups",
               f">= {c.trainer.groups_per_step}", "raise buffer.capacity_groups")
    if c.buffer.order == "index" and c.buffer.on_stale != "retry":
        refuse(f"buffer.order = 'index' with buffer.on_stale = {c.buffer.on_stale!r}: which groups grow too old depends on time, and so would what is trained",
               "'retry'", "set buffer.on_stale = 'retry', or buffer.order = 'sealed'")
    if c.run.mode == "async" and c.buffer.max_staleness == 0:
        refuse("buffer.max_staleness = 0 in asynchronous mode drops everything that overlaps an update", ">= 1", "raise it, or set run.mode = 'sync'")
    if c.rollout.max_session_tokens > c.model.max_context:
        refuse(f"rollout.max_session_tokens = {c.rollout.max_session_tokens} exceeds model.max_context = {c.model.max_context}",
               f"<= {c.model.max_context}", "lower the one or raise the other")
    if c.rollout.max_session_tokens > c.trainer.max_tokens_per_microbatch * lay.cp:
        refuse(f"rollout.max_session_tokens = {c.rollout.max_session_tokens} does not fit a micro-batch of "
               f"{c.trainer.max_tokens_per_microbatch} tokens x cp {lay.cp}", "every trajectory to fit one micro-batch",
               "raise trainer.max_tokens_per_microbatch or trainer.layout.cp")
    if c.trainer.optimizer.moments == "bf16" and c.trainer.optimizer.state != "stream":
        refuse("trainer.optimizer.moments = 'bf16' with state = 'resident', whose moments are megatron-core's, in fp32", "state = 'stream'",
               "set trainer.optimizer.state, or moments = 'fp32'")
    a = c.algorithm
    if a.importance != "none" and a.importance_low >= a.importance_high:
        refuse(f"algorithm: importance_low = {a.importance_low} >= importance_high = {a.importance_high}", "importance_low < importance_high", "change one of them")
    if a.dual_clip is not None and a.name != "grpo":
        refuse(f"algorithm.dual_clip with algorithm.name = {a.name!r}, which has no such bound", "name = 'grpo'", "remove dual_clip")
    if a.proximal == "current" and (a.dual_clip is not None or a.name in ("gspo", "cispo")):
        refuse(f"algorithm.{'dual_clip' if a.dual_clip is not None else f'name = {a.name!r}'} with proximal = 'current', under which every ratio is 1 and no bound ever acts",
               "proximal = 'rollout'", "set algorithm.proximal = 'rollout'" + (", or remove dual_clip" if a.dual_clip is not None else ""))
    if a.name == "gspo" and a.reduction == "token":
        refuse("algorithm.name = 'gspo' with reduction = 'token': a sequence's objective would count as often as it has tokens", "reduction = 'sequence'",
               "set algorithm.reduction = 'sequence'")
    if (a.advantage == "gae") != (a.critic is not None):
        refuse(f"algorithm.advantage = {a.advantage!r} {'without' if a.critic is None else 'with'} a section [algorithm.critic]",
               "advantage = 'gae' and its section together", "set algorithm.advantage, or add or remove [algorithm.critic]")
    if a.critic is not None and c.buffer.filter == "equal_rewards":
        refuse("buffer.filter = 'equal_rewards' with a critic, for which groups of equal rewards have advantages too, and which would learn from the others alone",
               "'none'", "set buffer.filter = 'none'")
    if a.critic is not None and a.critic.alone_steps >= c.run.steps:
        refuse(f"algorithm.critic.alone_steps = {a.critic.alone_steps} of run.steps = {c.run.steps}: the policy would never be trained", "fewer",
               "lower algorithm.critic.alone_steps, or raise run.steps")
    if a.reference is not None and not a.kl_coefficient:
        refuse(f"algorithm.reference = {a.reference!r} with algorithm.kl_coefficient = 0, which needs none", "a coefficient above 0",
               "set algorithm.kl_coefficient, or remove algorithm.reference")
    gpus = c.cluster.rollout.gpus_per_node
    per_rank = gpus // c.cluster.rollout.ranks_per_node if gpus else 0
    if gpus and c.engine.tp > per_rank:
        refuse(f"engine.tp = {c.engine.tp} needs more GPUs than the {per_rank} a rollout rank has", f"<= {per_rank}",
               "lower engine.tp or rollout.ranks_per_node")
    if c.engine.tp % c.engine.dp_attention or c.engine.tp % c.engine.ep:
        refuse(f"engine: tp = {c.engine.tp} is not a multiple of dp_attention = {c.engine.dp_attention} and ep = {c.engine.ep}",
               "both to divide tp", "change engine.tp, engine.dp_attention or engine.ep")
    if (c.tasks.kind == "harness") != (c.tasks.harness is not None):
        refuse(f"tasks.kind = {c.tasks.kind!r} {'without' if c.tasks.harness is None else 'with'} a section [tasks.harness]",
               "kind = 'harness' and its section together", "set tasks.kind, or add or remove [tasks.harness]")
    elif c.tasks.harness is not None:
        if c.tasks.sandbox != "confined":
            refuse(f"tasks.sandbox = {c.tasks.sandbox!r} with a harness, which runs what the model writes", "'confined'", "set tasks.sandbox = 'confined'")
        if c.tasks.system_prompt:
            refuse("tasks.system_prompt with a harness, which writes its own", "none", "remove it, and set the prompt in the harness's own configuration")
        _harness(c.tasks.harness, refuse)
    return out


def _shared(c: MilesConfig, refuse) -> None:
    trainer, rollout = c.cluster.trainer, c.cluster.rollout
    if c.run.mode == "async":
        refuse("cluster.placement = 'shared' with run.mode = 'async': asynchronous mode runs both halves at once, and each plans for the whole memory of its GPUs",
               "disjoint GPUs for trainer and rollout, or taking turns",
               "set cluster.placement = 'disjoint' and give each component its own nodes, or set run.mode = 'sync'")
    for what in ("nodes", "gpus_per_node"):
        one, other = getattr(trainer, what), getattr(rollout, what)
        if one != other:
            refuse(f"cluster.placement = 'shared' with cluster.trainer.{what} = {one} and cluster.rollout.{what} = {other}", "the same nodes and GPUs",
                   f"set both to the same {what}")
    if c.weights.transport == "broadcast":
        refuse("weights.transport = 'broadcast' with cluster.placement = 'shared': the trainer leader and an engine are on one GPU, and NCCL takes a GPU once in a group",
               "'disk'", "set weights.transport = 'disk'")
    elif c.weights.transport != "disk":
        refuse(f"weights.transport = {c.weights.transport!r} with cluster.placement = 'shared': an engine loads a version when its turn has begun, and the trainer has given up its memory by then",
               "'disk'", "set weights.transport = 'disk'")
    if c.engine.speculative and c.engine.release == "all" and c.trainer.mtp is None:
        refuse("engine.speculative with cluster.placement = 'shared' and engine.release = 'all': the draft layers are not trained, so nobody gives them back to the engine",
               "engine.release = 'kv_cache' or [trainer.mtp]", "set one of them, or remove engine.speculative")


def _adapters(c: MilesConfig, refuse) -> None:
    if c.weights.transport != "disk":
        refuse(f"weights.transport = {c.weights.transport!r} with [trainer.lora]: adapters are merged where the frozen weights are, in rollout ranks, and the others write whole weights "
               "into engines", "'disk'", "set weights.transport = 'disk'")
    if FORMATS[c.model.rollout_precision].block is not None:
        refuse(f"model.rollout_precision = {c.model.rollout_precision!r} with [trainer.lora]: what is quantized is the merged weight, and adapters are merged in rollout ranks, which do not quantize",
               "a rollout precision that quantizes nothing", "set model.rollout_precision, or remove [trainer.lora]")
    if c.trainer.mtp:
        refuse("[trainer.mtp] with [trainer.lora]: the draft layer is trained whole, and with adapters no weight is", "one of them", "remove one of the sections")


def _harness(h: HarnessConfig, refuse) -> None:
    for where, text in (*((f"command[{i}]", t) for i, t in enumerate(h.command)), *((f"env.{k}", t) for k, t in h.env.items())):
        for name in re.findall(r"(?<!\$)\{([a-z_]+)\}", text):
            if name not in HARNESS_PLACEHOLDERS:
                refuse(f"tasks.harness.{where} has {{{name}}}", "one of " + " ".join(f"{{{p}}}" for p in HARNESS_PLACEHOLDERS), "correct the placeholder")
    for inside in h.mounts:
        path = PurePosixPath(inside)
        if not path.is_absolute() or str(path) != inside or ".." in path.parts or len(path.parts) < 2 or "/" + path.parts[1] in _TAKEN:
            refuse(f"tasks.harness.mounts: {inside!r}", f"an absolute path such as '/opt/agent' outside {' '.join(_TAKEN)}", "choose another path inside the sandbox")
