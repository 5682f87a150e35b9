"""Models in bf16 round where the engine rounds (miles.platform.rounding). bf16 has 8 bits of precision: 1 + 2^-8 lies half way between two of its numbers."""

import pytest
import torch
import worlds
from launch import Job, launch

from miles.platform.rounding import RMSNorm, add_to_residual

EIGHTH = 2.0**-3
BF16 = {"replay": True, "precision": "bf16"}


def layers(folder: str, precision: str):
    module = worlds.build(folder, {}, replay=False, precision=precision).model.chunks[0].module
    return (module.module if precision == "bf16" else module).decoder.layers


def test_a_residual_is_rounded_before_the_output_is_added_and_the_sum_is_not():
    add = add_to_residual(training=True, fused=False)
    residual, output = torch.tensor([1 + 2.0**-9, 3.0]), torch.tensor([2.0**-10, EIGHTH], dtype=torch.bfloat16)
    assert add((output, None), residual, 0.0).tolist() == [1 + 2.0**-10, 3 + EIGHTH]
    assert add((output.float(), None), residual, 0.0).tolist() == [1 + 2.0**-9 + 2.0**-10, 3 + EIGHTH]


def test_a_norm_reads_the_sum_as_it_is_and_rounds_once():
    norm = RMSNorm(2, eps=0.0, dtype=torch.bfloat16)
    with torch.no_grad():
        norm.weight.fill_(1.03125)
    x = torch.tensor([1 + 2.0**-9, 2.75])
    assert norm(x).tolist() == [0.5, 1.3671875]
    assert norm(x.to(torch.bfloat16)).tolist() == [0.498046875, 1.3671875]


@pytest.mark.parametrize(("family", "precision", "rounded"), [("qwen3_moe", "bf16", True), ("qwen3_moe", "fp32", False), ("glm4_moe", "bf16", False)])
def test_scores_of_a_softmax_router_have_the_format_of_the_weights(world, models, family, precision, rounded):
    router = layers(models[family], precision)[-1].mlp.router
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(router.weight.dtype)
    scores, exact = router.gating(hidden), hidden.float() @ router.weight.float().T
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, exact.to(torch.bfloat16).float() if rounded else exact, rtol=1e-6, atol=1e-6)
    assert torch.equal(scores, scores.to(torch.bfloat16).float()) is rounded


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_outputs_of_the_experts_are_weighted_and_added_in_float32_and_rounded_once(world, models, family):
    mlp = layers(models[family], "bf16")[-1].mlp
    hidden = torch.randn(7, 1, 64, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    with torch.no_grad():
        found, _ = mlp(hidden)
        weights, chosen = mlp.router(hidden)
        outputs = torch.stack([expert(hidden[:, 0])[0] for expert in mlp.experts.local_experts], dim=1)  # [7, experts, 64], each rounded
        expected = (outputs.float() * weights.float()[..., None]).where(chosen[..., None], 0).sum(1).to(torch.bfloat16)  # of two, in whichever order
        if mlp.shared_experts is not None:
            expected = expected + mlp.shared_experts(hidden)[:, 0]
    assert torch.equal(found[:, 0], expected)


def test_stages_recomputation_and_experts_elsewhere_round_as_one_rank_does(world, models):
    """The sum that was not rounded travels between stages, and what experts add up between ranks."""
    routes = (2, 2, 8)
    layouts = {"pp": {"pp": 2}, "ep": {"ep": 2}}
    jobs = [Job(worlds.run_steps, lay, (models["qwen3_moe"], {**BF16, "recompute": "full"}, lay, 1, 8, routes)) for lay in layouts.values()]
    (alone,) = worlds.run_steps(models["qwen3_moe"], BF16, {}, 1, 8, routes)
    for ranks in launch(jobs, ranks=2, timeout_s=300):
        for (found,) in ranks:
            for key, within in (("loss", 1e-6), ("logprob_diff_mean", 1e-6), ("grad_norm", 1e-4)):  # gradients are added up in another order
                assert found[key] == pytest.approx(alone[key], rel=within), key
