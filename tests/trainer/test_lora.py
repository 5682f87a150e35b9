"""Training low-rank adapters: what is trained, in every layout alike, and what the model computes with."""

import pytest
import torch
import worlds
from launch import Job, launch

from miles.config import load_config
from miles.core import ConfigError
from miles.trainer.checkpoint import begin_checkpoint
from miles.trainer.reference import reference_folder
from miles.weights.mapping import local_weights

LORA = {"rank": 4, "alpha": 8.0}
MOE, LATENT, SPARSE = [2, 2, 8], [1, 2, 8], [3, 2, 8]
LAYOUTS = {"dp2": {}, "tp2": {"tp": 2}, "tp2-etp2": {"tp": 2, "etp": 2}, "tp2-ep2": {"tp": 2, "ep": 2}, "ep2": {"ep": 2}, "pp2": {"pp": 2}, "cp2": {"cp": 2}}
CASES = [("qwen3_moe", name, MOE) for name in LAYOUTS] + [("llama", name, None) for name in ("dp2", "tp2", "pp2")]
CASES += [("qwen3_moe", "tp2-ep2 attention", MOE)]
CASES += [("deepseek_v3", name, LATENT) for name in ("tp2-ep2", "pp2")] + [("glm_moe_dsa", name, SPARSE) for name in ("tp2", "cp2")]
SAVED = (("ep2", "tp2", "resident"), ("tp2", "pp2", "resident"), ("pp2", "ep2", "resident"), ("ep2", "tp2", "streamed"))  # a checkpoint of one goes on under the other
MADE = (("qwen3_moe", "tp2-etp2", "fp32"), ("qwen3_moe", "ep2", "bf16"), ("llama", "pp2", "fp32"), ("deepseek_v3", "tp2-ep2", "bf16"))


def options(name, routes):
    lora = LORA | {"targets": ("attention",)} if name.endswith("attention") else LORA
    return {"replay": routes is not None, "recompute": "full" if name == "pp2" else "none", "lora": lora}


@pytest.fixture(scope="module")
def two(models):
    jobs = {}
    for family, name, routes in CASES:
        layout = LAYOUTS[name.split()[0]]
        jobs[f"{family} {name}"] = Job(worlds.run_steps, layout, (models[family], options(name, routes), layout, 3, 6, routes))
    for family, name, precision in MADE:
        jobs[f"made {family} {name}"] = Job(worlds.adapters_and_what_they_make, LAYOUTS[name], (models[family], LAYOUTS[name], {"lora": LORA, "precision": precision}, 2))
    return dict(zip(jobs, launch(list(jobs.values()), ranks=2, timeout_s=900), strict=True))


@pytest.fixture(scope="module")
def resumed(models, tmp_path_factory):
    jobs, checkpoints = {}, tmp_path_factory.mktemp("checkpoints")
    for one, other, state in SAVED:
        folder = str(tmp_path_factory.mktemp("state")) if state == "streamed" else ""
        checkpoint = str(checkpoints / f"{one} {state}")
        jobs[f"save {one} {state}"] = Job(worlds.checkpoint_resume, LAYOUTS[one], (
            models["qwen3_moe"], checkpoint, LAYOUTS[one], MOE, 2, "fp32", folder, None, None, None, LORA))
        jobs[f"load {one} {state}"] = Job(worlds.resume_from, LAYOUTS[other], (models["qwen3_moe"], checkpoint, LAYOUTS[other], MOE, folder, None, None, None, LORA))
    return dict(zip(jobs, launch(list(jobs.values()), ranks=2, timeout_s=900), strict=True))


@pytest.fixture(scope="module")
def alone(world, models):
    families = {"qwen3_moe": MOE, "llama": None, "deepseek_v3": LATENT, "glm_moe_dsa": SPARSE}
    steps = {family: worlds.run_steps(models[family], options("", routes), {}, 3, 6, routes) for family, routes in families.items()}
    return steps | {"attention": worlds.run_steps(models["qwen3_moe"], options("attention", MOE), {}, 3, 6, MOE)}


def assert_equal_steps(steps, wanted):
    for got, want in zip(steps, wanted, strict=True):
        for key in ("loss", "grad_norm", "logprob_diff_mean", "kl_mean"):
            assert got[key] == pytest.approx(want[key], rel=2e-5, abs=1e-6), key
        assert got["skipped"] == want["skipped"]


@pytest.mark.parametrize(("family", "name"), [c[:2] for c in CASES])
def test_losses_and_gradient_norms_equal_one_rank(two, alone, family, name):
    # of the first step the gradient of B alone, since B is 0; the second and third also see what the steps before made of the adapters, and copies are compared
    for rank in two[f"{family} {name}"]:
        assert_equal_steps(rank, alone["attention" if name.endswith("attention") else family])


@pytest.mark.parametrize("family", ["qwen3_moe", "llama"])
def test_the_first_step_scores_with_the_weights_of_the_folder(world, models, alone, family):
    routes = MOE if family == "qwen3_moe" else None
    whole = worlds.run_steps(models[family], {"replay": routes is not None}, {}, 1, 6, routes)[0]
    assert alone[family][0]["loss"] == whole["loss"] and alone[family][0]["logprob_diff_mean"] == whole["logprob_diff_mean"]
    assert 0 < alone[family][0]["grad_norm"] != whole["grad_norm"]


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "glm_moe_dsa"])
def test_gradients_of_the_factors_follow_from_that_of_the_merged_weight(world, models, family):
    """dA = s B^T dW', dB = s dW' A^T, where dW' is what training all weights has, at the same weights."""
    unclipped = {"optimizer": {"clip_grad": 0.0}}
    adapted, whole = worlds.build(models[family], {}, lora=LORA, **unclipped), worlds.build(models[family], {}, **unclipped)
    ours, theirs = (dict(step.model.chunks[0].module.named_parameters()) for step in (adapted, whole))
    factors = {name: [ours[name.removesuffix("weight") + f"lora_{x}"] for x in "ab"] for name in ours if name.removesuffix("weight") + "lora_a" in ours}
    with torch.no_grad():
        for _, b in factors.values():
            b.normal_(0, 0.05)
        adapted.model.updated()
        for name, parameter in theirs.items():
            parameter.copy_(ours[name])
    before = {name: [f.detach().clone() for f in pair] for name, pair in factors.items()}
    for step in (adapted, whole):
        step.run(worlds.sequences(6, 13), number=0)
    for name, (a, b) in before.items():
        gradient = theirs[name].main_grad
        torch.testing.assert_close(factors[name][0].main_grad, 2 * b.t() @ gradient)
        torch.testing.assert_close(factors[name][1].main_grad, 2 * gradient @ a.t())


@pytest.mark.parametrize(("family", "name", "matrices"), [("qwen3_moe", "tp2-etp2", 56), ("qwen3_moe", "ep2", 56), ("llama", "pp2", 14), ("deepseek_v3", "tp2-ep2", 40)])
def test_weights_are_what_the_folder_and_the_adapters_make_bit_for_bit(two, family, name, matrices):
    leader, other = two[f"made {family} {name}"]
    assert leader["different"] == [] and leader["moved"] == matrices
    assert other == {"exported": 0}


def test_new_adapters_are_the_same_in_every_layout(two, world, models):
    for family, name, precision in (MADE[0], MADE[2]):
        one = worlds.adapters_and_what_they_make(models[family], {}, {"lora": LORA, "precision": precision}, 0)
        assert one["different"] == [] and one["moved"] == 0 and two[f"made {family} {name}"][0]["new"] == one["new"]


@pytest.mark.parametrize(("one", "state"), [(one, state) for one, _, state in SAVED])
def test_a_resumed_run_goes_on_bit_for_bit_and_another_layout_with_the_same_steps(resumed, one, state):
    for rank in resumed[f"save {one} {state}"]:
        assert rank["resumed"] == rank["went_on"] and rank["different"] == [] and rank["random"][0] == rank["random"][1]
    assert_equal_steps(resumed[f"load {one} {state}"][0], resumed[f"save {one} {state}"][0]["went_on"])


def test_streamed_state_trains_what_resident_state_does(resumed):
    assert [r["went_on"] for r in resumed["save ep2 streamed"]] == [r["went_on"] for r in resumed["save ep2 resident"]]


def test_adapters_alone_have_gradients_and_optimizer_state_and_are_in_checkpoints(world, models, tmp_path):
    step = worlds.build(models["llama"], {}, lora=LORA)
    # of each layer: A [4, 64] for qkv, for o_proj, for gate and up, and [4, 96] for down; B [128, 4], [64, 4], [192, 4], [64, 4]
    count = 2 * 4 * (64 + 64 + 64 + 96 + 128 + 64 + 192 + 64)
    assert sum(p.numel() for p in step.model.chunks[0].module.parameters() if p.requires_grad) == count
    assert sum(b.grad_data.numel() for b in step.model.chunks[0].buffers) < count + 128  # and padding
    assert sum(p.numel() for part in step.optimizer.chained_optimizers for g in part.optimizer.param_groups for p in g["params"]) == count
    saving = begin_checkpoint(tmp_path, step.model, step.optimizer)
    saving.wait()
    saving.finish()
    assert sum(p.stat().st_size for p in tmp_path.glob("*.distcp")) < 4 * 4 * count + 200_000  # adapters, their main values and two moments; names


def test_the_reference_policy_is_the_folder(world, models):
    step = worlds.build(models["qwen3_moe"], {}, lora=LORA, algorithm={"kl_coefficient": 0.1})
    figures = [step.run(worlds.sequences(6, i), number=i).reference_kl_mean for i in range(3)]
    assert figures[0] == pytest.approx(0, abs=1e-9) and figures[2] > figures[1] > 0
    trained, folder = (list(local_weights(s.model.chunks)) for s in (step, worlds.build(models["qwen3_moe"], {})))
    before = [t.clone() for t in trained]
    assert not all(torch.equal(a, b) for a, b in zip(trained, folder, strict=True))
    with step.reference.in_place():
        assert all(torch.equal(a, b) for a, b in zip(trained, folder, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(trained, before, strict=True)), "bit for bit"


def test_the_frozen_weights_are_the_reference_without_a_copy_unless_another_is_named(world, models):
    adapters = worlds.build(models["qwen3_moe"], {}, lora=LORA, algorithm={"kl_coefficient": 0.1})
    assert {t.data_ptr() for t in adapters.reference._host} == {w.base.data_ptr() for w in adapters.model.adapters._adapted}
    lora, named = ("trainer.lora.rank=4", "trainer.lora.alpha=8"), ("algorithm.kl_coefficient=0.1", "algorithm.reference=other")
    configs = [load_config("configs/tiny_async.toml", options) for options in (lora, (*lora, *named), ())]
    assert [reference_folder(c) for c in configs] == [None, "other", configs[2].model.path]


def test_a_critic_is_trained_whole_beside_the_adapters(world, models, tmp_path):
    critic = {"advantage": "gae", "critic": {"lr": 1e-3}}
    result = worlds.checkpoint_resume(models["qwen3_moe"], str(tmp_path / "c"), {}, MOE, 2, "fp32", "", critic, None, None, LORA)
    assert result["resumed"] == result["went_on"] and result["different"] == [] and all(s["critic_grad_norm"] > 0 for s in result["resumed"])


def test_a_model_without_the_matrices_named_is_refused(world, models):
    with pytest.raises(ConfigError, match=r"trainer.lora.targets = \['experts'\]: a pipeline stage has no such weight"):
        worlds.build(models["llama"], {}, lora={**LORA, "targets": ("experts",)})
