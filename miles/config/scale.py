"""`--scale dev`: a production config as a rehearsal on the development cluster. Pure.

Kept: the job script, algorithm, schedule, transport, and which parallel dimensions are used. Shrunk: every parallel dimension to 2 (context
parallelism to 1), nodes, tokens, steps; precision becomes fp32; the model is the tiny one of the nearest architecture that runs on a CPU.
"""

from __future__ import annotations

from miles.config.schema import MilesConfig

STEPS, GROUPS, SAMPLES = 3, 2, 4


def dev_scale(c: MilesConfig) -> MilesConfig:
    """The rehearsal of `c`. Validated like any config; raises pydantic's ValidationError if it cannot work."""
    data = c.model_dump()
    layout = data["trainer"]["layout"]
    small = {dim: min(layout[dim], 2) for dim in ("tp", "pp", "ep", "etp")}
    nodes = min(c.cluster.trainer.nodes, 2)
    ranks = max(small["tp"] * small["pp"], small["etp"] * small["ep"] * small["pp"])
    data["run"] |= {"name": f"{c.run.name}-dev", "steps": min(c.run.steps, STEPS)}
    data["model"] |= {"path": "models/tiny-glm4-moe", "recipe": "tiny_glm4_moe", "trainer_precision": "fp32", "rollout_precision": "fp32",
                      "rollout_path": None, "high_precision": (),
                      "boundary": "auto", "max_context": 2048}
    data["tasks"] |= {"path": "configs/tasks/terminal", "command_timeout_s": min(c.tasks.command_timeout_s, 5.0),
                      "output_limit": min(c.tasks.output_limit, 400), "memory_mb": min(c.tasks.memory_mb, 512),
                      "processes": min(c.tasks.processes, 64), "file_mb": min(c.tasks.file_mb, 64)}
    data["rollout"] |= {"in_flight": min(c.rollout.in_flight, 2 * GROUPS * SAMPLES), "group_size": min(c.rollout.group_size, SAMPLES),
                        "max_turns": min(c.rollout.max_turns, 5), "max_turn_tokens": min(c.rollout.max_turn_tokens, 48),
                        "max_session_tokens": min(c.rollout.max_session_tokens, 640), "turn_deadline_s": 60.0, "deadline_s": 180.0}
    data["engine"] |= {"tp": 1, "dp_attention": 1, "ep": 1, "kv_cache": "auto", "max_total_tokens": 24000, "max_running": 16, "speculative": None,
                       "start_timeout_s": 300.0, "extra_args": ()}
    data["buffer"] |= {"capacity_groups": 2 * GROUPS, "keep_trained_gb": min(c.buffer.keep_trained_gb, 1.0)}
    data["trainer"] |= {"groups_per_step": min(c.trainer.groups_per_step, GROUPS), "max_tokens_per_microbatch": 4096}
    data["trainer"]["layout"] = {**small, "cp": 1, "first_stage_layers": None, "last_stage_layers": None}
    data["trainer"]["optimizer"] |= {"state": "resident", "moments": "fp32"}
    data["algorithm"] |= {"reference": None}
    if c.algorithm.critic is not None:
        data["algorithm"]["critic"] |= {"path": None, "alone_steps": min(c.algorithm.critic.alone_steps, 1)}
    data["weights"] |= {"ack_timeout_s": 60.0}
    data["checkpoint"] |= {"every_steps": min(c.checkpoint.every_steps, 2)}
    data["cluster"] |= {
        "site": "configs/sites/dev.toml", "time_limit": "00:30:00", "signal_before_s": min(c.cluster.signal_before_s, 120),
        "trainer": {"nodes": nodes, "ranks_per_node": -(-ranks // nodes), "gpus_per_node": -(-ranks // nodes)},
        "rollout": {"nodes": min(c.cluster.rollout.nodes, 2), "ranks_per_node": 1,
                    "gpus_per_node": -(-ranks // nodes) if c.cluster.placement == "shared" else 1},
    }
    return MilesConfig.model_validate(data)
