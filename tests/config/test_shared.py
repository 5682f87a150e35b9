"""Rules and memory plan of trainer and engines on the same GPUs, and the rules that keep a schedule from standing still."""

import pytest

from miles.config import load_config, load_site
from miles.config.floor import step_floor
from miles.config.memory import CONTEXT_GB, draft_plan
from miles.config.scale import dev_scale
from miles.config.schema import SiteConfig
from miles.core import ConfigError

COLOCATED = "configs/tiny_colocated.toml"
ADAPTERS = ("trainer.lora.rank=4", "trainer.lora.alpha=8")
SMALL = {"model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128,
         "intermediate_size": 4096, "vocab_size": 32000, "max_position_embeddings": 4096}


@pytest.mark.parametrize(("file", "changes", "message"), [
    (COLOCATED, ("run.mode=async",),
     "cluster.placement = 'shared' with run.mode = 'async': asynchronous mode runs both halves at once.*expected disjoint GPUs.*set cluster.placement = 'disjoint'"),
    (COLOCATED, ("cluster.rollout.nodes=2",), "cluster.trainer.nodes = 1 and cluster.rollout.nodes = 2; expected the same nodes.*set both"),
    (COLOCATED, ("cluster.rollout.gpus_per_node=4",), "cluster.trainer.gpus_per_node = 2 and cluster.rollout.gpus_per_node = 4; expected the same"),
    ("configs/tiny_async.toml", ("trainer.paused_state=disk",), "its state never leaves them; expected 'host'; remove trainer.paused_state, or set cluster.placement"),
    (COLOCATED, ("weights.transport=broadcast",), "NCCL takes a GPU once in a group; expected 'disk'; set weights.transport = 'disk'"),
    (COLOCATED, ("weights.transport=p2p",), "an engine loads a version when its turn has begun.*expected 'disk'; set weights.transport = 'disk'"),
    (COLOCATED, ("engine.speculative={}",), "the draft layers are not trained.*expected engine.release = 'kv_cache' or \\[trainer.mtp\\]; set one of them"),
    ("configs/tiny_async.toml", ("buffer.max_staleness=0",), "buffer.max_staleness = 0 in asynchronous mode drops everything.*expected >= 1; raise it"),
    ("configs/tiny_async.toml", ("rollout.in_flight=7",), "rollout.in_flight = 7 is smaller than a group of 8; expected >= 8; raise rollout.in_flight"),
    (COLOCATED, ("rollout.min_samples=9",), "rollout.min_samples = 9 is more than a group of 8 has; expected <= 8; lower rollout.min_samples"),
    (COLOCATED, ("rollout.in_flight=7",), "rollout.in_flight = 7 is smaller than a group of 8; expected >= 8; raise rollout.in_flight"),
    ("configs/tiny_async.toml", ("buffer.capacity_groups=3",), "buffer.capacity_groups = 3 never holds a step of 4 groups; expected >= 4; raise buffer.capacity"),
    (COLOCATED, ("algorithm.dual_clip=3",), "algorithm.dual_clip with proximal = 'current', under which every ratio is 1.*set algorithm.proximal = 'rollout', or remove dual_clip"),
    (COLOCATED, ("algorithm.name=cispo",), "algorithm.name = 'cispo' with proximal = 'current'.*set algorithm.proximal = 'rollout'"),
    (COLOCATED, ("algorithm.reference=elsewhere",), "algorithm.reference = 'elsewhere' with algorithm.kl_coefficient = 0, which needs none.*set algorithm.kl_coefficient"),
    *(("configs/tiny_async.toml", (*ADAPTERS, f"weights.transport={transport}"), f"weights.transport = '{transport}' with \\[trainer.lora\\].*expected 'disk'; set weights.transport")
      for transport in ("broadcast", "p2p", "auto")),
    ("configs/tiny_async.toml", (*ADAPTERS, "model.trainer_precision=bf16", "model.rollout_precision=fp8", "model.rollout_path=elsewhere"),
     "model.rollout_precision = 'fp8' with \\[trainer.lora\\].*set model.rollout_precision, or remove"),
    ("configs/tiny_async.toml", (*ADAPTERS, "trainer.mtp.lr=1e-5"), "\\[trainer.mtp\\] with \\[trainer.lora\\].*remove one of the sections"),
    (COLOCATED, ("buffer.capacity_groups=1",), "buffer.capacity_groups = 1 never holds a step of 2 groups; expected >= 2; raise buffer.capacity"),
])
def test_what_cannot_work_is_refused_with_what_to_do(file, changes, message):
    with pytest.raises(ConfigError, match=message):
        load_config(file, changes)


def test_draft_layers_may_stay_on_the_gpu_or_be_trained():
    assert load_config(COLOCATED, ("engine.speculative={}", "engine.release=kv_cache")).engine.release == "kv_cache"
    assert load_config(COLOCATED, ("engine.speculative={}", "trainer.mtp.lr=1e-5")).engine.release == "all"


def colocated(*changes):
    return load_config(COLOCATED, ("trainer.layout.ep=1", *changes))


def test_each_side_must_fit_beside_what_the_other_leaves_and_not_beside_all_of_it():
    disjoint = draft_plan(colocated("cluster.placement=disjoint"), SiteConfig(), SMALL)
    shared = draft_plan(colocated(), SiteConfig(), SMALL)
    assert shared.stages[0].total_gb == pytest.approx(disjoint.stages[0].total_gb + CONTEXT_GB)
    assert [i.name for i in shared.stages[0].items][-1] == "engine" and [i.name for i in shared.engine.items][-1] == "trainer"
    assert shared.engine.items[-1].gb == CONTEXT_GB
    # 4 layers of 4 x 1024^2 + 3 x 1024 x 4096 + 2 x 1024, embedding and head of 32000 x 1024, final norm: weights and two moments on one of two ranks, fp32
    parameters = 4 * (4 * 1024**2 + 3 * 1024 * 4096 + 2 * 1024) + 2 * 32000 * 1024 + 1024
    host = 2 * (4 * parameters + 8 * parameters / 2) / 1e9
    assert f"host memory: each trainer node holds {host:.0f} GB of trainer state while engines generate" in shared.notes


def test_state_that_waits_on_disk_is_counted_there_and_not_on_the_host():
    parameters = 4 * (4 * 1024**2 + 3 * 1024 * 4096 + 2 * 1024) + 2 * 32000 * 1024 + 1024
    disk = ("trainer.paused_state=disk", "cluster.trainer.memory_gb=1")
    plan = draft_plan(colocated(*disk), SiteConfig(node_disk_gb=1), SMALL)
    assert plan.disk_per_node_gb == pytest.approx(2 * (4 * parameters + 8 * parameters / 2) / 1e9)  # two ranks: weights, and two moments on one of them, fp32
    assert not any("host memory" in text for text in (*plan.notes, *plan.problems)) and f"on disk: {plan.disk_per_node_gb:.0f} GB a node" in plan.table()
    assert plan.problems == ("the trainer's state needs 2 GB of disk a trainer node, the site has node_disk_gb = 1; use more trainer ranks, or a larger disk "
                             "(trainer.optimizer.state_dir), or trainer.paused_state = 'host'",)
    assert any("the 2 GB of the trainer's state on disk a node are not checked" in note for note in draft_plan(colocated(*disk), SiteConfig(), SMALL).notes)
    # streamed optimizer state lies there anyway: three files of 12 bytes a parameter, beside the weights
    both = draft_plan(colocated(*disk, "trainer.optimizer.state=stream"), SiteConfig(), SMALL)
    assert both.disk_per_node_gb == pytest.approx(2 * (4 * parameters + 3 * 12 * parameters / 2) / 1e9)
    host = draft_plan(colocated("trainer.optimizer.state=stream"), SiteConfig(), SMALL)
    assert f"host memory: each trainer node holds {2 * 4 * parameters / 1e9:.0f} GB of trainer state while engines generate" in host.notes


def test_a_step_of_state_that_waits_on_disk_writes_and_reads_it_once():
    plan = draft_plan(colocated("trainer.paused_state=disk"), SiteConfig(), SMALL)
    floors = [{t.name: t for t in step_floor(colocated(*x), SiteConfig(node_disk_gb_s=2.0), hf_config=SMALL).terms} for x in (("trainer.paused_state=disk",), ())]
    assert floors[0]["pause and resume I/O"].seconds == pytest.approx(plan.disk_per_node_gb) and "pause and resume I/O" not in floors[1]


def test_the_weights_of_a_reference_policy_are_counted_on_the_host_beside_what_else_is_there():
    parameters = 4 * (4 * 1024**2 + 3 * 1024 * 4096 + 2 * 1024) + 2 * 32000 * 1024 + 1024
    plain, held = (draft_plan(colocated(*kl, "cluster.trainer.memory_gb=3"), SiteConfig(), SMALL) for kl in ((), ("algorithm.kl_coefficient=0.1",)))
    assert not plain.problems and not any("reference" in note for note in plain.notes)
    assert f"host memory: each trainer node holds {2 * 4 * parameters / 1e9:.0f} GB of reference weights" in held.notes
    assert len(held.problems) == 1 and (
        "while engines generate and 1 GB of reference weights and 1 GB of the newest version of the weights (the leader's node) on a trainer node, cluster.trainer.memory_gb = 3") in held.problems[0]
    assert held.stages == plain.stages  # nothing on the GPU


def test_weights_that_stay_on_the_gpu_count_in_the_trainers_phase():
    everything, cache = (draft_plan(colocated(f"engine.release={r}"), SiteConfig(), SMALL) for r in ("all", "kv_cache"))
    assert cache.stages[0].total_gb == pytest.approx(everything.stages[0].total_gb + everything.engine.items[0].gb)


def test_a_gpu_that_fits_either_phase_is_enough_and_a_smaller_one_is_refused():
    need = max(s.total_gb for s in draft_plan(colocated(), SiteConfig(), SMALL).stages)
    assert draft_plan(colocated(), SiteConfig(gpu_memory_gb=need + 0.1), SMALL).problems == ()
    assert "trainer stage 1 needs" in draft_plan(colocated(), SiteConfig(gpu_memory_gb=need - 0.1), SMALL).problems[0]


def test_host_memory_that_cannot_take_the_trainers_state_is_refused():
    plan = draft_plan(colocated("cluster.trainer.memory_gb=1"), SiteConfig(), SMALL)
    assert any("trainer state while engines generate and 1 GB of the newest version of the weights (the leader's node) on a trainer node, cluster.trainer.memory_gb = 1; raise it" in p
               for p in plan.problems)


def test_the_rehearsal_of_a_colocated_job_is_colocated():
    small = dev_scale(load_config(COLOCATED, ("cluster.trainer.nodes=4", "cluster.rollout.nodes=4", "cluster.trainer.ranks_per_node=4", "cluster.trainer.gpus_per_node=4",
                                              "cluster.rollout.gpus_per_node=4", "cluster.rollout.ranks_per_node=4")))
    assert small.cluster.placement == "shared" and small.cluster.trainer.nodes == small.cluster.rollout.nodes == 2
    assert small.cluster.trainer.gpus_per_node == small.cluster.rollout.gpus_per_node
    assert load_site(small.cluster.site).mpi == "pmi2"
