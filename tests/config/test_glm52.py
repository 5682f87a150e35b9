"""The big job's configuration holds the values it was specified with."""

from miles.config import load_config, load_site


def test_the_big_job_has_its_specified_values():
    c = load_config("configs/glm52_async.toml")
    assert (c.cluster.trainer.nodes, c.cluster.trainer.ranks, c.cluster.rollout.nodes, c.cluster.rollout.ranks) == (8, 32, 8, 8)
    assert c.cluster.trainer.nodes * c.cluster.trainer.gpus_per_node + c.cluster.rollout.nodes * c.cluster.rollout.gpus_per_node == 64
    lay = c.trainer.layout
    assert (lay.tp, lay.pp, lay.first_stage_layers, lay.last_stage_layers, lay.cp, lay.ep, lay.etp) == (2, 4, 18, 20, 4, 8, 1)
    assert c.cluster.trainer.ranks // (lay.tp * lay.pp * lay.cp) == 1  # data parallel
    assert (c.trainer.recompute, c.trainer.optimizer.state, c.trainer.optimizer.lr) == ("full", "stream", 1e-6)
    e = c.engine
    assert (c.model.rollout_precision, e.tp, e.dp_attention, e.ep, e.kv_cache, e.memory_fraction) == ("fp8", 4, 4, 4, "fp8_e4m3", 0.85)
    assert (e.speculative.algorithm, e.speculative.num_steps, e.speculative.topk, e.speculative.num_draft_tokens) == ("EAGLE", 1, 1, 2)
    r = c.rollout
    assert (c.trainer.groups_per_step, r.group_size, r.in_flight) == (8, 8, 128)
    assert (r.max_session_tokens, r.max_turn_tokens, r.max_turns, r.deadline_s, r.temperature) == (65536, 8192, 30, 3600, 0.8)
    a = c.algorithm
    assert (a.clip_low, a.clip_high, a.importance_low, a.importance_high) == (0.2, 0.28, 0.0, 2.0)
    assert c.run.mode == "async" and c.cluster.placement == "disjoint"
    assert load_site(c.cluster.site).gpu_memory_gb == 279
