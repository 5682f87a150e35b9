"""The one configuration schema. Every option has a default or a reason, a unit in its description, and is documented from here
(`docs/config.md` is generated from these classes). Unknown keys are refused with the nearest valid name."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from miles.config.precision import Precision

Boundary = Literal["auto", "chatml", "smollm2", "qwen3", "qwen3-thinking", "glm", "deepseek-v3.2", "kimi-k2", "llama-3"]  # the rules of miles.session.boundary


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class RunConfig(Section):
    """What the run is called and how long it goes on."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", description="Name; the run directory is ROOT/NAME-UTCTIME.")
    root: str = Field("runs", description="Folder on the shared file system that holds run directories.")
    seed: int = Field(1, ge=0, description="Seeds the order of tasks, the model initialisation and the trainer's random state.")
    steps: int = Field(ge=1, description="Optimizer steps to train.")
    mode: Literal["async", "sync"] = Field("async", description="`async`: rollouts and training overlap. `sync`: the trainer waits for a batch made with its newest weights.")


class ModelConfig(Section):
    """The model, as an ordinary Hugging Face folder."""

    path: str = Field(description="Hugging Face folder (config.json, safetensors, tokenizer, chat template).")
    recipe: Literal["none", "tiny_moe", "tiny_glm4_moe", "smollm2"] = Field("none", description="How `miles-submit prepare` makes the folder when it is absent; `none` expects it to exist.")
    trainer_precision: Precision = Field("bf16", description="Number format of the trainer's forward and backward.")
    rollout_precision: Precision = Field("bf16", description="Number format of the engine's weights. The legal pairs: docs/precision.md.")
    rollout_path: str | None = Field(None, description="Hugging Face folder in the rollout's format that engines start from (`tools/quantize_model` makes one from `path`); for a quantized `rollout_precision`, and only then.")
    high_precision: tuple[str, ...] = Field((), description="Regular expressions (searched in Hugging Face names) of further tensors that are not quantized, besides the family's own (docs/precision.md).")
    boundary: Boundary = Field("auto", description="Named rule for the tokens between a sampled turn and the next message; `auto` picks it from the chat template and verifies it.")
    max_context: int = Field(32768, ge=16, description="Longest sequence in tokens that model, engine and trainer are set up for.")


class HarnessConfig(Section):
    """An agent program that plays the tasks in place of the built-in loop (`tasks.kind = "harness"`, docs/harnesses.md).

    In `command` and in the values of `env` these are replaced: `{url}` (base URL of the episode's own OpenAI endpoint, ends in /v1), `{model}`, `{instruction}`,
    `{instruction_file}`, `{workspace}`, `{max_turns}`.
    """

    command: tuple[str, ...] = Field(min_length=1, description="Program and arguments, run inside the sandbox in the task's working directory. Exit code 0: it is done.")
    mounts: dict[str, str] = Field(default_factory=dict, description="What it needs, mounted read-only: absolute path inside the sandbox -> folder or file of this machine.")
    env: dict[str, str] = Field(default_factory=dict, description="Its environment variables, besides or in place of PATH, HOME, LANG, OPENAI_BASE_URL, OPENAI_API_BASE and a placeholder as OPENAI_API_KEY.")
    port: int = Field(8000, ge=1024, le=65535, description="Port of the endpoint inside the sandbox, on 127.0.0.1; every sandbox has its own.")


class TasksConfig(Section):
    """What the model is asked to do."""

    kind: Literal["terminal", "harness"] = Field("terminal", description="What plays the shell tasks: `terminal` = the built-in loop, `harness` = the program of [tasks.harness]. The task's tests give the reward.")
    path: str = Field(description="Folder of task folders (task.toml, instruction.md, environment/, tests/).")
    reward: str = Field("tests", pattern=r"^(tests|\w+(\.\w+)+)$", description="Reward of a sample: `tests` = what its task's tests gave; or `package.module.function(task, conversations, episode) -> float`, which is called after them (docs/algorithms.md).")
    system_prompt: str = Field("", description="First message of every session; empty: the environment's own. Not with a harness, which has its own.")
    sandbox: Literal["confined", "unconfined-i-know"] = Field("confined", description="`confined`: commands of the model run under the launcher that the site profile names. `unconfined-i-know` runs them as you, with all your rights.")
    command_timeout_s: float = Field(10.0, gt=0, description="Seconds one command may run. A harness limits its commands itself, within `rollout.deadline_s`.")
    output_limit: int = Field(2000, ge=16, description="Characters of a command's output that the model sees, half from its beginning and half from its end; a mark says how many are left out. A harness cuts by itself.")
    memory_mb: int = Field(512, ge=16, description="Address space of one process, and resident memory of all processes of a trajectory, a harness included, together, MiB.")
    processes: int = Field(64, ge=8, description="Processes and threads that a trajectory, a harness included, may have at once.")
    file_mb: int = Field(64, ge=1, description="Largest file a command may write, MiB.")
    disk_mb: int = Field(256, ge=1, description="Size of /app, MiB, with at most 128 files for each MiB. It lives in memory: up to twice this per trajectory in flight, as far as it is used.")
    cpu_s: float = Field(600.0, gt=0, description="CPU seconds of a trajectory's commands, all processes together.")
    harness: HarnessConfig | None = Field(None, description="The program of `kind = \"harness\"`.")


class RolloutConfig(Section):
    """Sampling and scheduling of trajectories."""

    in_flight: int = Field(ge=1, description="Trajectories running at once over all engines.")
    group_size: int = Field(8, ge=2, description="Samples of one prompt, compared with each other.")
    min_samples: int = Field(2, ge=2, description="Samples with which a group is still trained when the others are lost for good (failed `retries` times more, or damaged on disk); with fewer it is dropped, by the cause of the first, and replaced. Advantages are taken over the samples that are there. `group_size` = none closes short.")
    refill: Literal["trajectory", "group"] = Field("trajectory", description="When a slot is refilled: as soon as one trajectory ends, or when a whole group has.")
    max_turns: int = Field(8, ge=1, description="Turns of one trajectory.")
    max_turn_tokens: int = Field(512, ge=1, description="Tokens sampled in one turn.")
    max_session_tokens: int = Field(8192, ge=8, description="Tokens of one training sequence, given and sampled.")
    temperature: float = Field(1.0, gt=0, description="Sampling temperature; the trainer divides its logits by the same.")
    top_p: float = Field(1.0, gt=0, le=1.0, description="Nucleus sampling. Only 1.0 keeps rollout and trainer distributions equal; others are refused.")
    turn_deadline_s: float = Field(300.0, gt=0, description="Seconds for one engine reply.")
    deadline_s: float = Field(3600.0, gt=0, description="Seconds for one trajectory; over it, it ends as it is with reason `deadline`.")
    replay: str = Field("loose", pattern=r"^(strict|loose|\w+(\.\w+)+)$", description="How a harness may send earlier messages back: `strict` = unchanged; `loose` = arguments of tool calls equal as JSON, reasoning may be left out; or `package.module.function(held, given) -> bool`. Trained tokens are the same in each case.")
    history: Literal["linear", "branching"] = Field("linear", description="What becomes of a request that does not go on from a session's last turn (or repeat it): `linear` = refused, one training sequence per sample; `branching` = it goes on from the deepest turn that it still holds, and each conversation kept is a training sequence; a span sampled once is trained once.")
    max_sessions: int = Field(1024, ge=1, description="Sessions open at once over HTTP on one rollout rank; one more is answered with status 429.")
    retries: int = Field(2, ge=0, description="How often a trajectory is started again after an infrastructure failure.")
    pool_lease_s: float = Field(30.0, gt=0, description="Seconds without a sign of life after which an attached pool (`miles-submit attach`) is taken for lost: what it ran is started again elsewhere. It writes every 2 seconds; a busy file system may delay that.")
    pool_wait_s: float = Field(600.0, gt=0, description="Seconds for which an attached pool waits for the run's rollout leader, when it is away (queued, restarting, cancelled), before it ends.")


class SpeculativeConfig(Section):
    """Speculative decoding in the engine (SGLang's EAGLE / MTP)."""

    algorithm: Literal["EAGLE", "NEXTN"] = Field("EAGLE", description="SGLang's speculative algorithm.")
    num_steps: int = Field(1, ge=1, description="Draft steps.")
    topk: int = Field(1, ge=1, description="Draft branches per step.")
    num_draft_tokens: int = Field(2, ge=1, description="Draft tokens verified at once.")


class EngineConfig(Section):
    """One SGLang server per rollout rank."""

    tp: int = Field(1, ge=1, description="GPUs of one engine (tensor parallel).")
    dp_attention: int = Field(1, ge=1, description="Attention data-parallel ranks inside one engine.")
    ep: int = Field(1, ge=1, description="Expert parallel size inside one engine.")
    kv_cache: Literal["auto", "fp8_e4m3", "fp8_e5m2"] = Field("auto", description="Number format of the KV cache.")
    memory_fraction: float = Field(0.85, gt=0, lt=1, description="Share of GPU memory for weights and KV cache.")
    max_total_tokens: int | None = Field(None, ge=1, description="KV cache size in tokens; needed on CPU, chosen by SGLang on GPU.")
    max_running: int | None = Field(None, ge=1, description="Requests one engine runs at once.")
    speculative: SpeculativeConfig | None = Field(None, description="Speculative decoding; absent = off.")
    start_timeout_s: float = Field(600.0, gt=0, description="Seconds an engine may take until it answers.")
    restarts: int = Field(3, ge=0, description="How often in a row one rank restarts its engine before it gives up; counted anew once an engine has taken a further version behind the first that it served.")
    release: Literal["all", "kv_cache"] = Field("all", description="What an engine gives back while the trainer trains (`cluster.placement = \"shared\"`): `all` = KV cache and weights, and every version is then loaded whole; `kv_cache` = the weights stay on the GPU beside the trainer, and patches do.")
    port_base: int = Field(31000, ge=1024, le=65000, description="First port tried for engines and session servers; each rank takes free ones from here upward.")
    extra_args: tuple[str, ...] = Field((), description="Further flags for `sglang.launch_server`, as they are.")


class BufferConfig(Section):
    """The durable trajectory buffer."""

    capacity_groups: int = Field(ge=1, description="Finished groups that may wait; a full buffer starts no new group.")
    order: str = Field("sealed", pattern=r"^(sealed|index|\w+(\.\w+)+)$", description="Which ready groups are trained first: `sealed` = first finished, first trained; `index` = in the order of their prompts, so that what a step trains does not depend on which trajectory ended first: to reproduce or compare runs. It waits for the slowest group of each step; a group that is sampled again keeps its place. Or `package.module.function(groups, count) -> list`, which takes of the ready groups those that the next step trains (docs/buffer.md).")
    max_staleness: int = Field(ge=0, description="Largest allowed distance from the weights that sampled to those being trained, in versions, counted when the group is trained.")
    on_stale: Literal["drop", "retry"] = Field("drop", description="A group over the limit is dropped, or its prompt is sampled again.")
    filter: str = Field("none", pattern=r"^(none|equal_rewards|\w+(\.\w+)+)$", description="Finished groups that are not worth training: `none` = there are none; `equal_rewards` = all samples have the same reward, so that every advantage is 0; or `package.module.function(summaries) -> str`, which returns the reason to drop a group, or an empty string. Dropped groups are counted by reason and replaced.")
    on_filtered: Literal["drop", "retry"] = Field("drop", description="What replaces a group that `filter` drops: the next prompt, or once more the same prompt (a second time it is left).")
    keep_trained_gb: float = Field(10.0, ge=0, description="Trained groups kept on disk for analysis, GB; the oldest go first.")


class LayoutConfig(Section):
    """Parallel layout of the trainer (megatron-core)."""

    tp: int = Field(1, ge=1, description="Tensor parallel.")
    pp: int = Field(1, ge=1, description="Pipeline parallel.")
    cp: int = Field(1, ge=1, description="Context parallel.")
    ep: int = Field(1, ge=1, description="Expert parallel.")
    etp: int = Field(1, ge=1, description="Expert tensor parallel.")
    first_stage_layers: int | None = Field(None, ge=1, description="Layers of the first pipeline stage when uneven.")
    last_stage_layers: int | None = Field(None, ge=1, description="Layers of the last pipeline stage when uneven.")


class OptimizerConfig(Section):
    """Adam and where its state lives."""

    lr: float = Field(gt=0, description="Learning rate.")
    warmup_steps: int = Field(0, ge=0, description="Steps over which the learning rate rises linearly from 0.")
    beta1: float = Field(0.9, ge=0, lt=1, description="Adam beta 1.")
    beta2: float = Field(0.98, ge=0, lt=1, description="Adam beta 2.")
    eps: float = Field(1e-8, gt=0, description="Adam epsilon.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay.")
    clip_grad: float = Field(1.0, ge=0, description="Global gradient norm limit; 0 = off.")
    state: Literal["resident", "stream"] = Field("resident", description="fp32 parameters and moments in memory, or streamed to `state_dir` bucket by bucket.")
    state_dir: str = Field("", description="Node-local folder for streamed state, and for what waits on disk (`trainer.paused_state`); empty: the site profile's `scratch`.")
    moments: Literal["fp32", "bf16"] = Field("fp32", description="Format of Adam's moments in streamed state: with `bf16` it takes 8 bytes a parameter instead of 12. They are computed in fp32 and rounded stochastically.")
    state_on_network: bool = Field(False, description="Let `state_dir` be on a network file system (Lustre, NFS), which is refused otherwise: all ranks share its bandwidth. For nodes without a disk.")


class MtpConfig(Section):
    """Multi-token prediction: the model's draft layer is trained to predict what the policy samples, and published with it, so that engines that speculate with it
    (`[engine.speculative]`) keep accepting its drafts. Absent = the trainer leaves it out, and engines keep the one they started with. The policy is trained the
    same with and without it."""

    lr: float = Field(gt=0, description="Learning rate of the draft layer; warm-up and everything else as in [trainer.optimizer], with a gradient norm and its limit of its own.")


class LoraConfig(Section):
    """Low-rank adapters (LoRA): the weights of `model.path` stay as they are, and of each matrix W [out, in] of the kinds below two factors, B [out, rank] and A [rank, in], are
    trained: used is W + (alpha / rank) B A. Gradients, optimizer state, checkpoints and what is published are of the factors alone. Absent = all weights are trained."""

    rank: int = Field(ge=1, description="Rank of the factors.")
    alpha: float = Field(gt=0, description="Scale of their product, times the rank. A value as large as `rank` is a scale of 1.")
    targets: tuple[Literal["attention", "mlp", "experts"], ...] = Field(("attention", "mlp", "experts"), min_length=1, description="Matrices that have them: `attention` = all projections of attention; `mlp` = those of dense and of shared feed-forward layers; `experts` = those of each routed expert. Embedding, output layer, routers and norms have none.")


class TrainerConfig(Section):
    """The training step."""

    layout: LayoutConfig = Field(default_factory=LayoutConfig, description="Parallel layout.")
    groups_per_step: int = Field(ge=1, description="Groups one optimizer step consumes.")
    max_tokens_per_microbatch: int = Field(8192, ge=16, description="Bound on the tokens of one packed micro-batch per data-parallel rank.")
    routing_replay: bool = Field(True, description="MoE: replay the experts recorded at rollout in forward and backward. With `false` the trainer's routers choose; either way the run log says how often they differ from the engine's (`routing_differs`).")
    recompute: Literal["none", "full"] = Field("none", description="Activation recomputation.")
    paused_state: Literal["host", "disk"] = Field("host", description="Where weights and optimizer state wait while engines have the GPUs (`cluster.placement = \"shared\"`): `host` = in page-locked host memory; `disk` = in a file in `optimizer.state_dir`, which takes 128 MiB of host memory a rank and the time of writing and reading it in every step (docs/optimizer.md).")
    optimizer: OptimizerConfig = Field(description="Optimizer.")
    mtp: MtpConfig | None = Field(None, description="The draft layer's training.")
    lora: LoraConfig | None = Field(None, description="Adapters in place of all weights.")

    @property
    def on_disk(self) -> bool:
        """Some of its state lies in `optimizer.state_dir`."""
        return self.optimizer.state == "stream" or self.paused_state == "disk"


class CriticConfig(Section):
    """The critic of `advantage = "gae"` (PPO): a model of its own with the architecture, layout and precision of the policy, and one number in place of the vocabulary."""

    path: str | None = Field(None, description="Hugging Face folder that its weights come from, of the same architecture as `model.path`; absent = `model.path`. The value of every token is 0 at the start.")
    lr: float = Field(gt=0, description="Its learning rate; warm-up and everything else as in [trainer.optimizer].")
    alone_steps: int = Field(0, ge=0, description="First steps in which the critic alone is trained, so that the policy does not follow values that mean nothing yet.")
    gamma: float = Field(1.0, gt=0, le=1, description="Discount of a reward for each sampled token that comes before it.")
    lam: float = Field(0.95, ge=0, le=1, description="Lambda: 0 = advantages of one step, all bias of the critic; 1 = reward to come minus value, all its variance.")


class AlgorithmConfig(Section):
    """The loss: advantages from rewards, an objective for each token, an importance weight for having been sampled elsewhere, the divergence from a reference
    policy, the entropy. Equations and papers are in `miles/trainer/algorithms/`."""

    name: str = Field("grpo", pattern=r"^(grpo|gspo|cispo|\w+(\.\w+)+)$", description="Objective of each token: `grpo` = PPO's clipped ratio; `gspo` = one clipped ratio per sequence; `cispo` = clipped weight, unclipped gradient; or `package.module.function(tokens) -> objective`.")
    advantage: str = Field("grpo", pattern=r"^(grpo|dr_grpo|rloo|reinforce\+\+|reinforce\+\+_baseline|gae|\w+(\.\w+)+)$", description="From rewards to advantages: `grpo` = minus the group's mean, over its standard deviation; `dr_grpo` = minus the mean alone; `rloo` = minus the mean of the others; `reinforce++` = normalised over the step; `reinforce++_baseline` = minus the group's mean, then normalised over the step; `gae` = of each token, from the values of the critic of [algorithm.critic], normalised over the step; or `package.module.function(rewards, groups) -> advantages`.")
    proximal: Literal["current", "rollout"] = Field("current", description="Policy that ratios are taken against: `current` = the one before this update, so that the clip never acts (each batch is trained on once) and `importance` alone corrects for stale tokens; `rollout` = the one that sampled, so that the clip acts on how far training has moved since, and importance weights are 1.")
    clip_low: float = Field(0.2, gt=0, lt=1, description="Lower clip of the policy ratio (1 - clip_low).")
    clip_high: float = Field(0.28, gt=0, description="Upper clip of the policy ratio (1 + clip_high).")
    dual_clip: float | None = Field(None, gt=1, description="`grpo` alone: a token of negative advantage A never has an objective below dual_clip * A; absent = off.")
    importance: Literal["truncate", "mask", "none"] = Field("truncate", description="Trainer-over-engine ratios outside the bounds below: brought to the nearest one (TIS), or their tokens left out (IcePop); `none` = every weight is 1.")
    importance_level: Literal["token", "sequence", "geometric"] = Field("token", description="Whose ratio: each token's, the product over its sequence, or their geometric mean.")
    importance_low: float = Field(0.0, ge=0, description="Lower bound of importance ratios.")
    importance_high: float = Field(2.0, gt=0, description="Upper bound of importance ratios.")
    kl_coefficient: float = Field(0.0, ge=0, description="Weight of the divergence from the reference policy, per token; 0 = there is no reference: no pass that scores with it, no memory for it.")
    kl: Literal["k1", "k2", "k3", "unbiased"] = Field("k3", description="Its estimator, with x = pi_ref / pi of the sampled token: `k1` = -log x, taken out of the token's advantage; and as terms of the loss `k2` = (log x)^2 / 2, `k3` = x - 1 - log x, `unbiased` = `k3` times the policy ratio.")
    reference: str | None = Field(None, description="Hugging Face folder of the reference policy, of the same architecture as `model.path`; absent = `model.path`. Each trainer rank keeps its part in host memory; with `[trainer.lora]` and none named, its frozen weights are the reference and nothing more is kept.")
    critic: CriticConfig | None = Field(None, description="The critic of `advantage = \"gae\"`.")
    entropy_coefficient: float = Field(0.0, ge=0, description="Weight of the entropy bonus: nats of the distribution over the vocabulary, per token.")
    reduction: Literal["token", "sequence", "constant"] = Field("token", description="`token`: mean over all sampled tokens of the step. `sequence`: mean over samples of their token means; the leaves of a branching history are one sample. `constant`: sum over tokens, over samples times `rollout.max_session_tokens`, so that a token's weight depends on no length (Dr.GRPO).")


class WeightsConfig(Section):
    """How new weights reach the engines."""

    transport: Literal["disk", "broadcast", "p2p", "auto"] = Field("disk", description="`disk`: patches on the shared file system. `broadcast`: one group over the trainer leader and the engines (NCCL on GPU, gloo on CPU). `p2p`: every trainer rank sends its shards straight to the rollout ranks over MPI while engines generate; nothing is gathered, and each rollout rank keeps one copy of the model in /dev/shm. `auto`: each of them is tried on two of the first versions, and the one after which all engines serve a version soonest is kept.")
    keyframe_every: int = Field(10, ge=1, description="Every so many versions all tensors are written in full.")
    keep_keyframes: int = Field(2, ge=1, description="Keyframes (with the patches after them) kept on disk; up to twice as many while an engine may still be reading older ones.")
    pause: Literal["in_place", "retract"] = Field("in_place", description="What happens to running requests: held with their KV cache, or put back and prefilled again.")
    ack_timeout_s: float = Field(300.0, gt=0, description="Seconds that a transfer over the wire (`broadcast`, `p2p`) may take before it has failed and weights go another way; and that a synchronous batch waits for an engine of the run that does not serve its version.")


class CheckpointConfig(Section):
    """Checkpoints and restarts."""

    every_steps: int = Field(10, ge=1, description="Steps between checkpoints.")
    keep: int = Field(2, ge=1, description="Checkpoints kept.")


class ComponentConfig(Section):
    """Nodes of one half of the job, a component of its own unless GPUs are shared."""

    nodes: int = Field(ge=1, description="Nodes.")
    ranks_per_node: int = Field(1, ge=1, description="MPI ranks per node.")
    gpus_per_node: int = Field(0, ge=0, description="GPUs asked of Slurm per node.")
    cpus_per_rank: int = Field(1, ge=1, description="CPU cores per rank.")
    memory_gb: float | None = Field(None, gt=0, description="Memory per node, GB; absent = the partition's default.")

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


class ClusterConfig(Section):
    """The Slurm job."""

    site: str = Field("configs/sites/dev.toml", description="Site profile: account, partition, modules, scratch, environment.")
    placement: Literal["disjoint", "shared"] = Field("disjoint", description="`disjoint`: trainer and rollout have their own GPUs. `shared`: both on the same nodes and GPUs, in turns: engines give their memory back while the trainer trains, the trainer keeps its state in host memory or on disk (`trainer.paused_state`) while they generate. Synchronous mode alone.")
    time_limit: str = Field("01:00:00", pattern=r"^(\d+-)?\d{1,2}:\d{2}:\d{2}$", description="Slurm time limit, [days-]hours:minutes:seconds.")
    signal_before_s: int = Field(120, ge=10, description="Seconds before the time limit at which Slurm sends USR2; the run then checkpoints and requeues itself.")
    max_restarts: int = Field(5, ge=0, description="How often a step that dies is started again within one attempt, counted anew whenever training has got further than ever before (a version of a later step).")
    frozen_s: float = Field(3600.0, ge=10, description="Seconds after which a rank whose main thread runs no line of Python counts as frozen (stopped, or waiting for a driver or a file system that does not answer): it is killed, and its step started again as after a crash. Computing, compiling, loading and waiting over MPI run Python all the time; a collective does not while it waits for other ranks, which may take 600 s, so less than that is for tests. A thread of a rank that writes or reads files and uses no processor time for so long counts as hanging, and ends the rank (docs/faults.md).")
    max_requeues: int = Field(20, ge=0, description="How often the job requeues itself without a newer checkpoint than it began with; with one it always does. A pool, which has none: how often in all.")
    trainer: ComponentConfig = Field(description="Component 0; with shared GPUs one of two steps on the same nodes.")
    rollout: ComponentConfig = Field(description="Component 1; likewise.")


class MilesConfig(Section):
    """A whole run."""

    run: RunConfig
    model: ModelConfig
    tasks: TasksConfig
    rollout: RolloutConfig
    engine: EngineConfig = Field(default_factory=EngineConfig)
    buffer: BufferConfig
    trainer: TrainerConfig
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    weights: WeightsConfig = Field(default_factory=WeightsConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    cluster: ClusterConfig

    @model_validator(mode="after")
    def _across_sections(self):
        from miles.config.rules import (
            problems,  # rules are listed in one place; imported late because they read this class
        )

        found = problems(self)
        if found:
            raise ValueError("\n".join(found))
        return self


class SiteConfig(Section):
    """What differs between clusters: `configs/sites/NAME.toml`."""

    account: str | None = Field(None, description="Slurm account.")
    partition: str | None = Field(None, description="Slurm partition.")
    qos: str | None = Field(None, description="Slurm quality of service.")
    constraint: str | None = Field(None, description="Slurm node constraint.")
    reservation: str | None = Field(None, description="Slurm reservation.")
    mpi: str = Field("pmi2", description="`srun --mpi=` value that matches the MPI library.")
    setup: tuple[str, ...] = Field((), description="Shell lines run before anything else (module load, source venv).")
    python: str = Field(".venv/bin/python", description="Python interpreter, relative to the project or absolute.")
    srun_prefix: tuple[str, ...] = Field((), description="Words put before the command of every rank, e.g. a container launcher.")
    sandbox: Literal["bubblewrap", "apptainer", "enroot"] = Field("bubblewrap", description="Launcher that confines commands of the model on rollout nodes. Only bubblewrap bounds disk use, and only it is tried.")
    sandbox_image: str = Field("", description="Image of `apptainer` or `enroot`, with bash, coreutils and util-linux; bubblewrap shows the node's own /usr.")
    scratch: str = Field("/tmp", description="Node-local scratch folder.")
    env: dict[str, str] = Field(default_factory=dict, description="Environment variables of every rank.")
    sbatch: tuple[str, ...] = Field((), description="Further #SBATCH options for every component, as they are.")
    gpu_memory_gb: float = Field(80.0, gt=0, description="Memory of one GPU, GB, for the memory plan.")
    node_disk_gb: float | None = Field(None, gt=0, description="Free node-local disk, GB, for the plan of the trainer's state.")
    gpu_tflops: float | None = Field(None, gt=0, description="Peak of one GPU at the trainer's precision, dense, TFLOP/s, for the step-time floor of `plan`.")
    node_disk_gb_s: float | None = Field(None, gt=0, description="Bandwidth of a node's `scratch`, reads and writes together, GB/s, for `plan`.")
    node_network_gb_s: float | None = Field(None, gt=0, description="Network bandwidth of a node, one direction, GB/s, for `plan`.")
    shared_gb_s: float | None = Field(None, gt=0, description="Bandwidth of the shared file system for one file, GB/s, for `plan`.")
