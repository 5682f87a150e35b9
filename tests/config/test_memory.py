"""The memory plan: small layouts worked by hand, and the 744B job."""

import json

import pytest

from miles.config import load_config, load_site
from miles.config.memory import draft_plan, kv_bytes_per_token, memory_plan, stage_layers
from miles.config.schema import SiteConfig
from miles.config.shape import find_hf_config, model_shape
from miles.core import ConfigError

GLM = "configs/glm52_async.toml"

# hidden 8, 4 layers (1 dense), 2 heads of 4, MLP 16, 4 experts of 6 columns, top-2, one shared expert, vocabulary 32
SMALL = dict(
    model_type="glm4_moe",
    hidden_size=8,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=4,
    intermediate_size=16,
    moe_intermediate_size=6,
    n_routed_experts=4,
    n_shared_experts=1,
    num_experts_per_tok=2,
    first_k_dense_replace=1,
    vocab_size=32,
)


def small(*changes):
    """4 ranks on one node with GPUs: tp 2, pp 2, ep 2."""
    return load_config(
        "configs/tiny_async.toml",
        (
            "cluster.trainer.ranks_per_node=4",
            "cluster.trainer.gpus_per_node=4",
            "trainer.layout.tp=2",
            "trainer.layout.pp=2",
            "trainer.layout.ep=2",
            "model.trainer_precision=bf16",
            "model.rollout_precision=bf16",
            *changes,
        ),
    )


def items(stage):
    return {i.name: round(i.gb * 1e9) for i in stage.items}


def glm(*changes):
    config = load_config(GLM, changes)
    return config, load_site(config.cluster.site)


def test_a_small_layout_worked_by_hand():
    plan = draft_plan(small(), SiteConfig(), SMALL)
    # per layer: attention 4 x 8 x 8 = 256; dense MLP 3 x 8 x 16 = 384; expert 3 x 8 x 6 = 144; norms 16; router 4 x 8 + 4 = 36
    # embedding and head 32 x 8 = 256 each, final norm 8
    # stage 1 (layers 1, 2), tp 2, ep 2: 256/2 + [256 + 384]/2 + 16 + [256 + 144]/2 + 16 + 36 + 4 x 144 / 2 = 1004
    # stage 2 (layers 3, 4): 2 x ([256 + 144]/2 + 52 + 288) + 8 + 256/2 = 1216
    assert [s.parameters for s in plan.stages] == [1004, 1216]
    assert [(s.first_layer, s.last_layer) for s in plan.stages] == [(1, 2), (3, 4)]
    assert [items(s)["weights"] for s in plan.stages] == [2008, 2432]
    assert [items(s)["gradients"] for s in plan.stages] == [4016, 4864]
    # 4 ranks: one data-parallel rank for the dense part and, with ep 2, one for the experts: 12 bytes of everything
    assert [items(s)["optimizer"] for s in plan.stages] == [12 * 1004, 12 * 1216]


def test_a_critic_has_weights_gradients_and_state_of_its_own_and_no_vocabulary():
    critic = ("algorithm.advantage=gae", "algorithm.critic.lr=1e-5")
    plan = draft_plan(small(*critic), SiteConfig(), SMALL)
    both = [2 * 1004, 1216 + 1216 - 128 + 8]  # stage 2: a row of 8 on each tensor-parallel rank in place of half of the head
    assert [s.parameters for s in plan.stages] == [1004, 1216]  # of the policy
    assert [items(s)["weights"] for s in plan.stages] == [2 * n for n in both]
    assert [items(s)["gradients"] for s in plan.stages] == [4 * n for n in both]
    assert [items(s)["optimizer"] for s in plan.stages] == [12 * n for n in both]
    streamed = draft_plan(small(*critic, "trainer.optimizer.state=stream"), SiteConfig(), SMALL)
    assert round(streamed.disk_per_node_gb * 1e9) == 4 * 3 * 12 * max(both)
    assert items(streamed.stages[0])["optimizer"] == 2 * 3e9


def test_a_draft_layer_that_is_trained_lies_on_the_last_stage_with_a_copy_of_the_embedding():
    drafting = SMALL | {"num_nextn_predict_layers": 1}
    plain, plan = (draft_plan(small(*mtp), SiteConfig(), drafting) for mtp in ((), ("trainer.mtp.lr=1e-5",)))
    assert [s.parameters for s in plain.stages] == [1004, 1216] and any("not trained" in note for note in plain.notes)
    # attention and shared expert [256 + 144]/2, norms 16, router 36, its own three norms 24, projection 2 x 8 x 8 / 2, experts 4 x 144 / 2, embedding 256/2
    draft = 200 + 16 + 36 + 24 + 64 + 288 + 128
    assert [s.parameters for s in plan.stages] == [1004, 1216 + draft] and not any("not trained" in note for note in plan.notes)
    assert items(plan.stages[1])["optimizer"] == 12 * (1216 + draft)
    one = draft_plan(small("trainer.mtp.lr=1e-5", "trainer.layout.pp=1", "trainer.layout.tp=1"), SiteConfig(), drafting).stages[0].parameters
    assert one - draft_plan(small("trainer.layout.pp=1", "trainer.layout.tp=1"), SiteConfig(), drafting).stages[0].parameters == 256 + 144 + 16 + 36 + 24 + 128 + 288
    critic = ("algorithm.advantage=gae", "algorithm.critic.lr=1e-5")
    judged, both = (draft_plan(small(*critic, *mtp), SiteConfig(), drafting) for mtp in ((), ("trainer.mtp.lr=1e-5",)))
    assert items(both.stages[1])["weights"] - items(judged.stages[1])["weights"] == 2 * draft  # the critic has none


LORA = ("trainer.lora.rank=3", "trainer.lora.alpha=6")


def test_gradients_and_optimizer_state_of_adapters_worked_by_hand():
    plan = draft_plan(small(*LORA), SiteConfig(), SMALL)
    # sides of matrices, those that tp 2 splits and those that it does not: attention 8 + 24, 8 + 8 (in + out); dense MLP 8 + 32, 16 + 8; shared expert 8 + 12, 6 + 8
    attention, dense, shared = 3 * ((24 + 8) / 2 + 8 + 8), 3 * ((32 + 16) / 2 + 8 + 8), 3 * ((12 + 6) / 2 + 8 + 8)
    experts = 3 * 4 * (8 + 12 + 6 + 8) / 2  # ep 2
    adapters = [2 * attention + dense + shared + experts, 2 * (attention + shared + experts)]
    assert adapters == [591, 750] and [s.parameters for s in plan.stages] == [1004 + 591, 1216 + 750]
    for stage, count in zip(plan.stages, adapters, strict=True):
        assert items(stage)["weights"] == 2 * stage.parameters and (items(stage)["gradients"], items(stage)["optimizer"]) == (4 * count, 12 * count)
    assert any("of frozen weights under adapters" in note for note in plan.notes)
    held = {reference: [n for n in draft_plan(small(*LORA, *named), SiteConfig(), SMALL).notes if "reference weights" in n]
            for reference, named in (("frozen", ["algorithm.kl_coefficient=0.1"]), ("named", ["algorithm.kl_coefficient=0.1", "algorithm.reference=other"]))}
    assert not held["frozen"] and len(held["named"]) == 1  # the frozen weights are the reference where none is named
    alone = draft_plan(small(*LORA, "trainer.lora.targets=['attention']"), SiteConfig(), SMALL)
    assert [items(s)["gradients"] for s in alone.stages] == [4 * 2 * attention] * 2


def test_a_critic_is_trained_whole_beside_adapters():
    critic = ("algorithm.advantage=gae", "algorithm.critic.lr=1e-5")
    plain, beside = (draft_plan(small(*changes), SiteConfig(), SMALL).stages[0] for changes in (critic, (*critic, *LORA)))
    assert items(plain)["gradients"] == 4 * 2 * 1004 and items(beside)["gradients"] == 4 * (1004 + 591)


def test_the_adapters_of_latent_attention_worked_by_hand():
    plan = draft_plan(small(*LORA, "trainer.layout.first_stage_layers=3", "trainer.lora.targets=['attention']"), SiteConfig(), SPARSE)
    # in + out of the projections: down 8 + 3 and 8 + 6, up 3 + 8 and 4 + 12, of which tp 2 splits the heads' side; out 8 (split) + 8
    assert [items(s)["gradients"] for s in plan.stages] == [4 * n * 3 * (11 + 14 + 3 + 4 + 8 + (8 + 12 + 8) / 2) for n in (3, 1)]


@pytest.mark.parametrize("count", [0, 2])
def test_training_a_draft_layer_that_the_model_does_not_have_is_refused(count):
    with pytest.raises(ConfigError, match=rf"\[trainer.mtp\], but the model has {count} draft layers"):
        draft_plan(small("trainer.mtp.lr=1e-5"), SiteConfig(), SMALL | {"num_nextn_predict_layers": count})


# the same with latent attention and a sparse index in layers 1, 2 and 4: 2 heads of 4, 5 keys of a token
SPARSE = SMALL | {"model_type": "glm_moe_dsa", "q_lora_rank": 3, "kv_lora_rank": 4, "qk_nope_head_dim": 2, "qk_rope_head_dim": 2, "v_head_dim": 4,
                  "index_n_heads": 2, "index_head_dim": 4, "index_topk": 5, "index_topk_freq": 2, "index_skip_topk_offset": 2}
INDEXER = 3 * 8 + 8 * 4 + 2 * 4 + 8 * 2  # queries, key and its norm, weights of the heads


def test_an_indexer_has_neither_gradients_nor_optimizer_state():
    plan = draft_plan(small("trainer.layout.first_stage_layers=3"), SiteConfig(), SPARSE)
    assert [(s.first_layer, s.last_layer) for s in plan.stages] == [(1, 3), (4, 4)]
    for stage, computing in zip(plan.stages, (2, 1), strict=True):
        trained = stage.parameters - computing * INDEXER
        assert items(stage)["weights"] == 2 * stage.parameters
        assert (items(stage)["gradients"], items(stage)["optimizer"]) == (4 * trained, 12 * trained)


def test_the_indexer_of_a_draft_layer_is_not_trained_either():
    last = draft_plan(small("trainer.layout.first_stage_layers=3", "trainer.mtp.lr=1e-5"), SiteConfig(), SPARSE | {"num_nextn_predict_layers": 1}).stages[1]
    assert items(last)["weights"] == 2 * last.parameters and items(last)["gradients"] == 4 * (last.parameters - 2 * INDEXER)


def test_the_keys_that_an_index_picked_are_kept_until_the_backward_pass():
    def activations(top_k):
        return items(draft_plan(small("trainer.layout.first_stage_layers=3", "trainer.max_tokens_per_microbatch=1000", "rollout.max_session_tokens=640"),
                                SiteConfig(), SPARSE | {"index_topk": top_k}).stages[0])["activations"]

    assert activations(105) - activations(5) == 2 * 2 * 4 * 1000 * 100  # two layers that compute one, two micro-batches in flight, int32


def test_optimizer_state_is_divided_over_the_data_parallel_ranks_of_each_part():
    # tp 1, pp 1, ep 2 on 4 ranks: dense state over 4 ranks, experts over 2
    plan = draft_plan(small("trainer.layout.tp=1", "trainer.layout.pp=1"), SiteConfig(), SMALL)
    dense = 256 + 384 + 16 + 256 + 3 * (256 + 144 + 16 + 36) + 8 + 256
    experts = 3 * 4 * 144 // 2
    assert plan.stages[0].parameters == dense + experts
    assert items(plan.stages[0])["optimizer"] == 12 * dense / 4 + 12 * experts / 2


def test_streamed_state_takes_three_files_with_the_parameters_in_each_also_in_fp32():
    for precision in ("bf16", "fp32"):
        plan = draft_plan(small("trainer.optimizer.state=stream", f"model.trainer_precision={precision}", f"model.rollout_precision={precision}"), SiteConfig(), SMALL)
        assert round(plan.disk_per_node_gb * 1e9) == 4 * 3 * 12 * 1216  # four ranks of a node, the fuller stage's parameters


def test_bf16_moments_take_two_thirds_of_the_disk_and_need_streamed_state():
    stream = draft_plan(small("trainer.optimizer.state=stream", "trainer.optimizer.moments=bf16"), SiteConfig(node_disk_gb=1e-6), SMALL)
    assert round(stream.disk_per_node_gb * 1e9) == 4 * 3 * 8 * 1216
    assert "moments" not in stream.problems[0]
    wide = draft_plan(small("trainer.optimizer.state=stream"), SiteConfig(node_disk_gb=1e-6), SMALL)
    assert "or set trainer.optimizer.moments = 'bf16'" in wide.problems[0]
    with pytest.raises(ConfigError, match="moments = 'bf16' with state = 'resident'"):
        small("trainer.optimizer.moments=bf16")


def test_activations_worked_by_hand():
    plan = draft_plan(
        small("trainer.max_tokens_per_microbatch=1000", "trainer.recompute=full", "rollout.max_session_tokens=640"), SiteConfig(), SMALL
    )
    # 500 tokens a tensor-parallel rank; bf16. attention width 2 x 8 + 2 x 8 = 32, 4 x 8 hidden, MLP columns 3 x 16 or 3 x 6
    dense_layer = 500 * (32 + 32 + 48)
    moe_layer = 500 * (32 + 32 + 18) + 500 * 2 * 1.5 * (16 + 18)
    assert moe_layer > dense_layer
    kept = 2 * 500 * 8 * 2  # two layer inputs
    assert items(plan.stages[0])["activations"] == 2 * kept + 2 * 2 * moe_layer  # two micro-batches in flight on the first stage
    logits = 1000 * 16 * 12
    assert items(plan.stages[1])["activations"] == kept + max(logits, 2 * 2 * moe_layer)


def test_kv_cache_bytes_of_grouped_and_of_latent_attention():
    config, _ = glm()
    # 656 bytes of latent and 132 of index key a layer, 78 layers and the draft layer
    assert kv_bytes_per_token(config, model_shape(find_hf_config(config))) == 79 * (656 + 132)
    assert kv_bytes_per_token(small(), model_shape(SMALL)) == 4 * 2 * 2 * 4 * 2  # 4 layers, key and value, 2 heads of 4, bf16


def test_the_744b_job_fits_only_with_streamed_state():
    config, site = glm()
    plan = memory_plan(config, site)
    assert round(plan.resident_state_gb) == 279
    assert [(s.first_layer, s.last_layer) for s in plan.stages] == [(1, 18), (19, 38), (39, 58), (59, 78)]
    assert max(s.total_gb for s in plan.stages) < site.gpu_memory_gb
    # fullest rank: 20 layers x 32 experts x 37,748,736 = 24.16 B parameters of experts, 12 bytes each in three files, on each rank of a node of four
    assert 4 * 3 * 12 * 24.16 < plan.disk_per_node_gb < 4 * 3 * 12 * 25
    with pytest.raises(
        ConfigError, match=r"resident optimizer state \(298 GB\) is what does not fit: set trainer.optimizer.state = 'stream'"
    ):
        memory_plan(*glm("trainer.optimizer.state=resident"))


def test_the_version_that_the_744b_job_publishes_is_counted_on_the_host_of_both_sides():
    """fp8 with its scales: 757 GB once with the trainer's leader, and once on each rollout node for its engines to load."""
    assert [n for n in memory_plan(*glm()).notes if "host memory" in n] == [
        "host memory: the trainer leader's node holds 757 GB of the newest version of the weights",
        "host memory: each rollout node holds 757 GB of the newest version of the weights, for its engines to load"]
    for side, whose in (("trainer", r" \(the leader's node\)"), ("rollout", "")):
        with pytest.raises(ConfigError, match=rf"host memory: 757 GB of the newest version of the weights{whose} on a {side} node, cluster.{side}.memory_gb = 700; raise it"):
            memory_plan(*glm(f"cluster.{side}.memory_gb=700"))
        memory_plan(*glm(f"cluster.{side}.memory_gb=760"))


def test_the_744b_job_does_not_fit_80_gb_gpus_and_a_small_disk():
    config, _ = glm()
    with pytest.raises(ConfigError, match="the site's GPUs have 80 GB"):
        memory_plan(config, load_site("configs/sites/h100.toml"))
    with pytest.raises(ConfigError, match="needs 3576 GB of disk a trainer node, the site has node_disk_gb = 1000"):
        memory_plan(config, SiteConfig(gpu_memory_gb=279, node_disk_gb=1000))


def test_a_stage_that_would_reuse_another_stages_index_is_refused():
    with pytest.raises(
        ConfigError, match=r"pipeline stage 2 starts on layer 20, which reuses the sparse index of layer 19 .*nearest: 19 or 23"
    ):
        memory_plan(*glm("trainer.layout.first_stage_layers=19", "trainer.layout.last_stage_layers=19"))


def test_layers_that_do_not_split_are_refused():
    config = load_config(GLM, ("trainer.layout.last_stage_layers=19",))
    with pytest.raises(ConfigError, match=r"78 layers do not split over pp = 4 .*\(41 layers left for 2 stages\)"):
        stage_layers(config, 78)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("trainer.layout.tp=4", "trainer.layout.tp = 4 does not divide the model's 2 attention heads"),
        ("engine.ep=3", "engine.ep = 3 does not divide the model's 4 experts"),
        ("model.max_context=4096", "model.max_context = 4096 is beyond the 2048 positions"),
    ],
)
def test_sizes_that_do_not_divide_are_named(change, message):
    config = small(
        "cluster.trainer.ranks_per_node=8", "cluster.trainer.gpus_per_node=8", "engine.tp=3", "cluster.rollout.gpus_per_node=3", change
    )
    with pytest.raises(ConfigError, match=message):
        draft_plan(config, SiteConfig(), {**SMALL, "max_position_embeddings": 2048})


def test_expert_parallelism_of_a_dense_model_is_refused():
    dense = {k: v for k, v in SMALL.items() if "expert" not in k} | {"model_type": "llama"}
    with pytest.raises(ConfigError, match="trainer.layout.ep = 2, but the model has no experts"):
        draft_plan(small(), SiteConfig(), dense)


def test_asynchronous_mode_on_shared_gpus_is_refused_with_the_reason():
    with pytest.raises(
        ConfigError, match="cluster.placement = 'shared' with run.mode = 'async': asynchronous mode runs both halves at once"
    ):
        load_config(GLM, ("cluster.placement=shared",))


def test_two_ranks_on_one_gpu_are_refused():
    with pytest.raises(ConfigError, match="cluster.trainer: 8 ranks per node on 4 GPUs"):
        load_config(GLM, ("cluster.trainer.ranks_per_node=8",))


def test_training_in_order_without_sampling_again_what_grew_too_old_is_refused():
    with pytest.raises(ConfigError, match="buffer.order = 'index' with buffer.on_stale = 'drop'"):
        load_config("configs/tiny_async.toml", ("buffer.order=index",))
    assert load_config("configs/tiny_async.toml", ("buffer.order=index", "buffer.on_stale=retry")).buffer.order == "index"


def test_the_plan_prints_and_is_json():
    plan = memory_plan(*glm())
    assert "optimizer state if resident: 279 GB a rank" in plan.table()
    assert json.loads(json.dumps(plan.to_json()))["stages"][3]["first_layer"] == 59


def test_a_model_without_config_json_is_named(tmp_path):
    config = load_config(GLM, (f"model.path={tmp_path}/nothing",))
    with pytest.raises(ConfigError, match="has no config.json and no stored model has that name"):
        find_hf_config(config)
