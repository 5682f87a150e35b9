"""The step-time floor: a small layout worked by hand, and the 744B job."""

import json

import pytest
from click.testing import CliRunner
from test_memory import INDEXER, LORA, SMALL, SPARSE, glm, small

from miles.cli.main import main
from miles.config.floor import step_floor
from miles.config.schema import SiteConfig
from miles.core import ConfigError

SITE = SiteConfig(gpu_tflops=1e-6, node_disk_gb_s=1e-6, node_network_gb_s=1e-6, shared_gb_s=1e-6)  # a kilobyte and a megaflop a second
STEP = ("trainer.groups_per_step=2", "rollout.group_size=4", "rollout.in_flight=8", "trainer.max_tokens_per_microbatch=640")


def seconds(config, tokens=100, density=0.5, model=SMALL):
    return {t.name: t.seconds for t in step_floor(config, SITE, tokens, density, model).terms}


def test_compute_is_that_of_the_slowest_stage_and_its_pipeline_fills_once():
    # 100 tokens see 50 keys on average, each 16 multiplications (query and value of 2 heads of 4) a layer.
    # layer 1: 256 attention + 384 MLP + 16 norms; layers 2 to 4: 256 + 144 shared + 52 norms and router + 2 of 4 experts of 144
    # stage 2: 2 x (2 x (740 + 800)) + head 2 x 8 x 32 = 6672 operations a token, more than stage 1: 2 x (656 + 740 + 1600) = 5992
    found = seconds(small(*STEP))
    assert found["compute"] == pytest.approx(3 * 8 * 100 * 6672 / 2 / 1e6)  # forward and backward of 8 x 100 tokens, on 2 ranks
    assert found["pipeline bubble"] == pytest.approx(found["compute"] / 2)  # 800 tokens are two micro-batches of at most 640
    again = seconds(small(*STEP, "trainer.recompute=full"))
    assert again["compute"] == pytest.approx(found["compute"] * 4 / 3)
    assert seconds(small(*STEP, "algorithm.kl_coefficient=0.1"))["compute"] == pytest.approx(found["compute"] * 4 / 3)  # one more forward
    # the critic is a model of its own without a head: 3 x the slowest stage's 2 x (2 x 1540) + 3 x 6672
    critic = seconds(small(*STEP, "algorithm.advantage=gae", "algorithm.critic.lr=1e-5"))
    assert critic["compute"] == pytest.approx(8 * 100 * 3 * (6672 + 6160) / 2 / 1e6)


def test_a_sparse_index_is_computed_in_the_forward_pass_alone():
    # attention 3 x 2 x 4 + 4 x 2 x 6 + 2 x 4 x 8 = 136 up and out, 8 x 3 + 3 + 8 x 6 + 4 = 79 down; 5 of the 50 keys seen are picked, 2 x (4 + 4) each
    layout = ("trainer.layout.tp=1", "trainer.layout.pp=1")
    dense, moe = 136 + 79 + 16 + 384, 136 + 79 + 16 + 144 + 36 + 2 * 144
    index = 3 * (INDEXER + 50 * 8)  # each key seen is scored by 2 heads of 4
    rest = dense + 3 * moe + 4 * 5 * 16 + 8 * 32
    assert seconds(small(*STEP, *layout), model=SPARSE)["compute"] == pytest.approx(8 * 100 * 2 * (3 * rest + index) / 4 / 1e6)


def test_gradients_parameters_and_state_move_once_over_their_own_replicas():
    # tp 1, pp 1, ep 2 on the 4 ranks of a node: 2532 dense parameters over 4 replicas, 864 of experts over 2
    found = seconds(small(*STEP, "trainer.layout.tp=1", "trainer.layout.pp=1", "trainer.optimizer.state=stream"))
    assert found["gradient reduction"] == pytest.approx(4 * 4 * (2532 * 3 / 4 + 864 / 2) / 1e3)
    assert found["parameter gathering"] == pytest.approx(found["gradient reduction"] / 2)  # bf16
    assert found["optimizer I/O"] == pytest.approx(2 * 4 * 12 * (2532 / 4 + 864 / 2) / 1e3)
    assert found["pipeline bubble"] == 0
    # one rank for each part: nothing is exchanged
    alone = seconds(small(*STEP))
    assert (alone["gradient reduction"], alone["parameter gathering"], alone["optimizer I/O"]) == (0, 0, 0)


def test_adapters_travel_whole_and_alone_and_other_weights_have_no_gradient():
    # sides of matrices: attention 48 in each layer, dense MLP 64, shared expert 34 and 4 experts of 34 in three layers; rank 3, bf16
    found = seconds(small(*STEP, *LORA))
    assert found["weight update"] == pytest.approx(2 * 3 * (4 * 48 + 64 + 3 * 5 * 34) / 1e3)
    assert found["compute"] == pytest.approx(seconds(small(*STEP))["compute"] * 2 / 3)


def test_weights_travel_whole_by_broadcast_and_at_their_entropy_by_disk():
    # 656 + 3 x (256 + 144 + 52 + 4 x 144) + embedding and head 512 + norm 8 = 4260 parameters
    assert seconds(small(*STEP, "weights.transport=broadcast"))["weight update"] == pytest.approx(2 * 4260 / 1e3)
    assert seconds(small(*STEP, "weights.transport=disk"))["weight update"] == pytest.approx(4260 * (1 + 0.5) / 8 / 1e3)  # half: a bit each, and its sign
    assert seconds(small(*STEP, "weights.transport=disk"), density=1.0)["weight update"] == pytest.approx(4260 / 8 / 1e3)  # signs alone


def test_a_rate_that_the_site_does_not_state_is_named_and_left_out():
    floor = step_floor(small(*STEP), SiteConfig(gpu_tflops=1e-6), 100, 0.5, SMALL)
    assert floor.unknown == ("site.node_network_gb_s", "site.shared_gb_s")
    assert floor.seconds == pytest.approx(1.5 * 3 * 8 * 100 * 6672 / 2 / 1e6)
    assert "set site.shared_gb_s in the site profile" in floor.table()


@pytest.mark.parametrize("tokens, density, what", [(641, 0.5, "--tokens 641"), (100, 0.0, "--density"), (100, 1.5, "--density")])
def test_values_out_of_range_are_refused(tokens, density, what):
    with pytest.raises(ConfigError, match=what):
        step_floor(small(*STEP), SITE, tokens, density, SMALL)


def test_plan_shows_every_term_of_the_744b_job():
    config, site = glm()
    done = CliRunner().invoke(main, ["plan", "configs/glm52_async.toml", "--json"])
    assert done.exit_code == 0
    printed = json.loads(done.stdout)
    assert round(printed["memory"]["resident_state_gb"]) == 279
    terms = {t["name"]: t for t in printed["step_floor"]["terms"]}
    # one file read and the other written, on 4 ranks of a node
    assert terms["optimizer I/O"]["amount"] == pytest.approx(2 / 3 * printed["memory"]["disk_per_node_gb"])  # a step moves two files, the third is a checkpoint's
    assert terms["compute"]["rate"] == site.gpu_tflops and printed["step_floor"]["tokens_per_trajectory"] == config.rollout.max_session_tokens
    text = CliRunner().invoke(main, ["plan", "configs/glm52_async.toml"]).stdout
    assert all(name in text for name in ("compute", "pipeline bubble", "gradient reduction", "parameter gathering", "optimizer I/O", "weight update"))


def test_plan_of_what_does_not_fit_says_so_in_its_exit_code():
    done = CliRunner().invoke(main, ["plan", "configs/glm52_async.toml", "--set", "trainer.optimizer.state=resident"])
    assert done.exit_code == 2 and "PROBLEM" in done.stdout
