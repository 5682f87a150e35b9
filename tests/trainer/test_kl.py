"""Divergence from a reference and entropy in the loss, by hand; the estimators against the divergence itself; the reference's weights."""

import math

import pytest
import torch
import worlds
from hypothesis import given
from hypothesis import strategies as st

from miles.config.schema import AlgorithmConfig
from miles.core import ConfigError
from miles.trainer.algorithms import PolicyLoss, SampledTokens, kl
from miles.trainer.reference import ReferencePolicy
from miles.weights.mapping import local_weights


def tokens(new, reference, *, old=None, rollout=None, advantages=None, entropy=None):
    """Tokens of these probabilities; by default sampled by the policy that is trained, weight 1, advantage 0."""
    n, logprobs = len(new), torch.tensor(new).log().requires_grad_()
    old = logprobs.detach() if old is None else torch.tensor(old).log()
    return SampledTokens(logprobs, torch.zeros(n) if entropy is None else entropy, old, old if rollout is None else torch.tensor(rollout).log(),
                         torch.tensor(advantages or [0.0] * n), torch.ones(n), torch.zeros(n, dtype=torch.int64), 1, reference=torch.tensor(reference).log())


def slope(t, value):
    return torch.autograd.grad(value.sum(), t.logprobs)[0].tolist()


LN2 = math.log(2)


@pytest.mark.parametrize(("estimator", "value", "gradient"), [
    (kl.k1, [LN2, -LN2], [1.0, 1.0]),
    (kl.k2, [LN2**2 / 2, LN2**2 / 2], [LN2, -LN2]),
    (kl.k3, [0.5 - 1 + LN2, 2 - 1 - LN2], [1 - 0.5, 1 - 2]),
    (kl.unbiased, [0.5 - 1 + LN2, 2 - 1 - LN2], [LN2, -LN2]),  # sampled by the policy itself: the ratio is 1, its gradient is not 0
])
def test_estimators_by_hand(estimator, value, gradient):
    t = tokens([0.4, 0.1], [0.2, 0.2])  # x = 1/2 and 2
    assert estimator(t).tolist() == pytest.approx(value, abs=1e-6)
    assert slope(t, estimator(t)) == pytest.approx(gradient, abs=1e-6)


def test_the_unbiased_estimator_weighs_with_the_policy_ratio():
    # pi / pi_old = 0.4 / 0.1 = 4: value 4 k3, gradient -4 log x
    t = tokens([0.4], [0.2], old=[0.1])
    assert kl.unbiased(t).tolist() == pytest.approx([4 * (LN2 - 0.5)], abs=1e-6) and slope(t, kl.unbiased(t)) == pytest.approx([4 * LN2], abs=1e-5)


DISTRIBUTION = st.lists(st.floats(-3, 3), min_size=4, max_size=4).map(lambda x: torch.tensor(x, dtype=torch.float64))


@given(DISTRIBUTION, DISTRIBUTION, DISTRIBUTION)
def test_means_over_all_tokens_are_the_divergence_and_its_gradient(logits, reference, sampler):
    """The mean over what a sampler gives is taken exactly, over a vocabulary of four."""
    logits = logits.requires_grad_()
    p, q, s = (torch.log_softmax(x, 0) for x in (logits, reference, sampler))
    divergence = (p.exp() * (p - q)).sum()
    (exact,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    divergence = divergence.item()

    def mean(estimator, old):
        one = torch.ones(4, dtype=torch.float64)
        t = SampledTokens(p, 0 * one, old, old, one, one, torch.zeros(4, dtype=torch.int64), 1, reference=q)
        value = (old.exp() * estimator(t)).sum()
        return value.item(), torch.autograd.grad(value, logits, retain_graph=True)[0]

    for estimator, old, right in ((kl.k1, p.detach(), "value"), (kl.k2, p.detach(), "gradient"), (kl.k3, p.detach(), "value"),
                                  (kl.unbiased, p.detach(), "both"), (kl.unbiased, s, "both")):
        value, gradient = mean(estimator, old)
        if right in ("value", "both"):
            assert value == pytest.approx(divergence, abs=1e-9)
        if right in ("gradient", "both"):
            torch.testing.assert_close(gradient, exact, atol=1e-9, rtol=1e-6)


# -- in the loss -------------------------------------------------------------------------------------------------------------
def test_a_loss_term_by_hand():
    # two tokens of weight 1, A = 3 and -1, pi = pi_old: objective 2, k3 = (log 2 - 1/2) + (1 - log 2) = 1/2; loss = -2 + 0.1 / 2
    t = tokens([0.4, 0.1], [0.2, 0.2], advantages=[3.0, -1.0])
    loss = PolicyLoss(AlgorithmConfig(kl_coefficient=0.1))(t).value
    assert float(loss.detach()) == pytest.approx(-1.95, abs=1e-6)
    assert slope(t, loss) == pytest.approx([-3 + 0.1 * 0.5, 1 - 0.1], abs=1e-6)


def test_k1_is_taken_out_of_the_advantage_before_the_clip():
    # A = 1 - 2 log 2 < 0, ratio 1.5: with A = 1 the clip at 1.28 would cut it
    t = tokens([0.3], [0.15], old=[0.2], advantages=[1.0])
    loss, clipped, _ = PolicyLoss(AlgorithmConfig(kl="k1", kl_coefficient=2.0))(t)
    assert float(loss.detach()) == pytest.approx(-1.5 * (1 - 2 * LN2), abs=1e-6) and clipped.tolist() == [False]


def test_a_token_that_is_masked_for_its_importance_is_not_held_to_the_reference():
    t = tokens([0.4, 0.4], [0.2, 0.2], rollout=[0.01, 0.4])  # pi / rollout = 40: out of bounds
    loss = PolicyLoss(AlgorithmConfig(importance="mask", kl_coefficient=1.0))(t).value
    assert slope(t, loss) == pytest.approx([0.0, 0.5], abs=1e-6)


def test_the_entropy_bonus_by_hand_has_no_importance_weight():
    entropy = torch.tensor([1.0, 3.0], requires_grad=True)
    loss = PolicyLoss(AlgorithmConfig(entropy_coefficient=0.5, importance="mask"))(tokens([0.4, 0.4], [0.4, 0.4], rollout=[0.01, 0.4], entropy=entropy)).value
    loss.backward()
    assert float(loss.detach()) == pytest.approx(-2.0) and entropy.grad.tolist() == [-0.5, -0.5]


# -- the policy itself ---------------------------------------------------------------------------------------------------------
ROUTES = (2, 2, 8)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_policy_starts_at_its_reference_and_moves_away(world, models, precision):
    step = worlds.build(models["qwen3_moe"], {}, replay=True, precision=precision, algorithm={"kl_coefficient": 1e-3}, optimizer={"lr": 1e-2})
    batch = worlds.sequences(4, 40, routes=ROUTES)
    distance = [step.run(batch, number=i).reference_kl_mean for i in range(3)]
    assert distance[0] == 0.0 and distance[2] > distance[1] > 0.0


def test_the_penalty_holds_a_policy_near_its_reference(world, models):
    def distance(coefficient):
        step = worlds.build(models["llama"], {}, algorithm={"kl_coefficient": coefficient, "kl": "k2"}, optimizer={"lr": 3e-3})
        return [step.run(worlds.sequences(4, 41), number=i).reference_kl_mean for i in range(8)][-1]

    assert distance(30.0) < 0.3 * distance(1e-6)


def test_training_with_a_coefficient_of_almost_nothing_is_training_without_a_reference(world, models, tmp_path):
    """The weights come back bit for bit from each pass of the reference, also under an optimizer that streams its state."""
    def weights(**options):
        step = worlds.build(models["qwen3_moe"], {}, replay=True, **options)
        for number in range(2):
            step.run(worlds.sequences(4, 42, routes=ROUTES), number=number)
        return list(local_weights(step.model.chunks))

    plain = weights()
    for options in ({}, {"state_dir": str(tmp_path)}):
        held = weights(algorithm={"kl_coefficient": 1e-38}, **options)
        assert all(torch.equal(a, b) for a, b in zip(plain, held, strict=True))


def test_the_reference_is_another_folder_and_leaves_the_policy_as_it_was(world, models, tmp_path):
    import tiny_models
    from safetensors.torch import load_file, save_file

    other = tiny_models.make("llama", tmp_path / "other")
    moved = {name: t * 1.01 for name, t in load_file(other / "model.safetensors").items()}
    save_file(moved, other / "model.safetensors", metadata={"format": "pt"})
    step = worlds.build(models["llama"], {})
    before = [t.clone() for t in local_weights(step.model.chunks)]
    reference = ReferencePolicy(step.model, other)
    assert all(torch.equal(a, b) for a, b in zip(before, local_weights(step.model.chunks), strict=True))
    with reference.in_place():
        want = worlds.build(str(other), {})
        assert all(torch.equal(a, b) for a, b in zip(local_weights(want.model.chunks), local_weights(step.model.chunks), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, local_weights(step.model.chunks), strict=True))


def test_a_reference_of_another_architecture_is_refused(world, models):
    with pytest.raises(ConfigError, match="correct algorithm.reference"):
        ReferencePolicy(worlds.build(models["llama"], {}).model, models["qwen3"])


def test_without_a_reference_its_distance_is_not_a_number(world, models):
    got = worlds.build(models["llama"], {}).run(worlds.sequences(2, 43), number=0)
    assert math.isnan(got.reference_kl_mean) and 0 < got.entropy_mean < math.log(131)


def test_the_entropy_bonus_makes_the_distribution_wider(world, models):
    step = worlds.build(models["llama"], {}, algorithm={"entropy_coefficient": 1.0}, optimizer={"lr": 3e-3})
    batch = [worlds.replace(s, advantage=0.0) for s in worlds.sequences(4, 44)]
    entropies = [step.run(batch, number=i).entropy_mean for i in range(4)]
    assert entropies == sorted(entropies) and entropies[-1] > entropies[0] + 0.01
