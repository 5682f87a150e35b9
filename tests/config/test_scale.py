from miles.config import load_config
from miles.config.scale import dev_scale


def test_a_production_config_is_rehearsed_with_every_parallel_dimension_it_uses():
    c = load_config("configs/glm52_async.toml")
    d = dev_scale(c)
    lay = d.trainer.layout
    assert (lay.tp, lay.pp, lay.cp, lay.ep, lay.etp, lay.first_stage_layers) == (2, 2, 1, 2, 1, None)
    assert (d.cluster.trainer.nodes, d.cluster.trainer.ranks, d.cluster.rollout.ranks) == (2, 4, 2)
    assert d.run.name == "glm52_async-dev" and d.run.steps == 3
    # what the rehearsal is about stays as it is
    assert (d.algorithm, d.weights.transport, d.rollout.temperature, d.trainer.recompute, d.run.mode) == (
        c.algorithm, "broadcast", 0.8, "full", "async")
    assert d.trainer.optimizer.state == "resident" and d.engine.speculative is None


def test_the_rehearsal_of_bf16_moments_has_those_of_resident_state():
    c = load_config("configs/glm52_async.toml", ("trainer.optimizer.moments=bf16",))
    assert (c.trainer.optimizer.moments, dev_scale(c).trainer.optimizer.moments) == ("bf16", "fp32")


def test_a_config_that_is_small_already_keeps_its_size():
    c = load_config("configs/tiny_async.toml")
    d = dev_scale(c)
    assert d.trainer.layout == c.trainer.layout and d.cluster.trainer.ranks == 2 and d.cluster.rollout.ranks == 2
