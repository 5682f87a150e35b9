"""Objectives, importance weights and the loss, by hand. A token here has a probability, so that ratios are plain fractions."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles.config.schema import AlgorithmConfig
from miles.core import ConfigError, StructureError
from miles.trainer.algorithms import PolicyLoss, SampledTokens
from miles.trainer.algorithms.importance import importance_weights
from miles.trainer.algorithms.surrogate import cispo, clipped, load_surrogate, sequence_clipped


def log(values):
    return torch.tensor(values, dtype=torch.float32).log()


def tokens(new, old, rollout=None, advantages=None, weights=None, sequence=None):
    """Tokens of these probabilities; by default sampled by the old policy, advantage 1, weight 1, all of one sequence."""
    n = len(new)
    logprobs = log(new).requires_grad_()
    sequence = torch.tensor(sequence or [0] * n, dtype=torch.int64)
    return SampledTokens(logprobs, torch.zeros(n), logprobs.detach() if old is None else log(old), log(rollout or old or new), torch.tensor(advantages or [1.0] * n),
                         torch.tensor(weights or [1.0] * n), sequence, int(sequence.max()) + 1 if n else 1)


def gradient(t, objective):
    (grad,) = torch.autograd.grad(objective.sum(), t.logprobs)
    return grad.tolist()


# -- PPO's clip --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("ratio", "advantage", "value", "slope"), [
    (1.5, 1.0, 1.28, 0.0),  # above 1 + high with a positive advantage: clipped, no gradient
    (1.2, 1.0, 1.2, 1.2),  # above 1 + low but below 1 + high: clip-higher leaves it free
    (1.5, -1.0, -1.5, -1.5),  # min takes the free branch: a bad token that became likelier is pushed back
    (0.5, -1.0, -0.8, 0.0),  # below 1 - low with a negative advantage: clipped
    (0.5, 1.0, 0.5, 0.5),
])
def test_clipped_surrogate(ratio, advantage, value, slope):
    t = tokens([0.2 * ratio], [0.2], advantages=[advantage])
    objective, cut = clipped(t, 0.2, 0.28)
    assert objective.tolist() == pytest.approx([value], abs=1e-6) and gradient(t, objective) == pytest.approx([slope], abs=1e-6)
    assert cut.tolist() == [slope == 0.0]


@pytest.mark.parametrize(("ratio", "advantage", "value", "slope"), [
    (5.0, -2.0, -6.0, 0.0),  # r A = -10 is lifted to c A = 3 * -2
    (2.0, -2.0, -4.0, -4.0),  # -4 > -6: as without
    (0.5, -2.0, -1.6, 0.0),  # the lower clip as without
    (5.0, 2.0, 2.56, 0.0),  # only negative advantages
])
def test_dual_clip_bounds_what_a_bad_token_can_cost(ratio, advantage, value, slope):
    t = tokens([0.1 * ratio], [0.1], advantages=[advantage])
    objective, cut = clipped(t, 0.2, 0.28, dual=3.0)
    assert objective.tolist() == pytest.approx([value], abs=1e-6) and gradient(t, objective) == pytest.approx([slope], abs=1e-5)
    assert cut.tolist() == [slope == 0.0]


# -- GSPO --------------------------------------------------------------------------------------------------------------------
def test_gspo_has_one_ratio_for_a_sequence_the_geometric_mean_of_its_tokens():
    # sequence 0: ratios 4 and 1, s = 2 -> clipped to 1.5, no gradient; sequence 1: ratio 1.2, free
    t = tokens([0.4, 0.3, 0.6], [0.1, 0.3, 0.5], sequence=[0, 0, 1])
    objective, cut = sequence_clipped(t, 0.5, 0.5)
    assert objective.tolist() == pytest.approx([1.5, 1.5, 1.2], abs=1e-6) and cut.tolist() == [True, True, False]
    assert gradient(t, objective) == pytest.approx([0.0, 0.0, 1.2], abs=1e-6)


def test_gspo_summed_with_weights_of_one_over_the_length_is_the_sequences_objective_and_gradient():
    # ratios 2 and 1/2 and 1.728: s = 1.728^(1/3) = 1.2; d s / d logp_t = s / 3, times A = 2
    t = tokens([0.4, 0.1, 0.1728], [0.2, 0.2, 0.1], advantages=[2.0] * 3, weights=[1 / 3] * 3)
    objective, _ = sequence_clipped(t, 0.5, 0.5)
    assert float((t.weights * objective).sum()) == pytest.approx(2.4, abs=1e-5)
    assert gradient(t, t.weights * objective) == pytest.approx([0.8, 0.8, 0.8], abs=1e-5)


# -- CISPO -------------------------------------------------------------------------------------------------------------------
def test_cispo_clips_the_weight_of_a_token_and_never_its_gradient():
    # ratios 3, 1 and 1/4 with bounds 0.5 .. 1.5: weights 1.5, 1, 0.5; d / d log pi = weight * A
    t = tokens([0.3, 0.2, 0.05], [0.1, 0.2, 0.2], advantages=[1.0, -2.0, 4.0])
    objective, cut = cispo(t, 0.5, 0.5)
    assert gradient(t, objective) == pytest.approx([1.5, -2.0, 2.0], abs=1e-5) and cut.tolist() == [False] * 3


@given(st.lists(st.tuples(st.floats(-12, -0.01), st.floats(-3, 3)), min_size=1, max_size=8), st.sampled_from(["grpo", "gspo", "cispo"]))
def test_with_one_update_per_batch_every_surrogate_is_the_policy_gradient(items, name):
    """pi = pi_old: the gradient of each token's log-probability is its advantage."""
    logprobs = torch.tensor([lp for lp, _ in items]).requires_grad_()
    advantages = torch.tensor([a for _, a in items])
    t = SampledTokens(logprobs, torch.zeros(len(items)), logprobs.detach(), logprobs.detach(), advantages, torch.ones(len(items)), torch.zeros(len(items), dtype=torch.int64), 1)
    objective, _ = load_surrogate(AlgorithmConfig(name=name))(t)
    assert gradient(t, objective) == pytest.approx(advantages.tolist(), abs=1e-5)


# -- importance --------------------------------------------------------------------------------------------------------------
def weights(t, **config):
    found, cut = importance_weights(t, AlgorithmConfig(**{"importance_low": 0.5, "importance_high": 2.0, **config}))
    return pytest.approx(found.tolist(), abs=1e-5), cut.tolist()


RATIOS = tokens([0.4, 0.1, 0.4, 0.3], None, rollout=[0.1, 0.4, 0.25, 0.3], sequence=[0, 0, 1, 1])  # 4, 1/4; 1.6, 1


@pytest.mark.parametrize(("config", "expected", "cut"), [
    ({}, [2.0, 0.5, 1.6, 1.0], [True, True, False, False]),  # TIS
    ({"importance": "mask"}, [0.0, 0.0, 1.6, 1.0], [True, True, False, False]),  # IcePop
    ({"importance": "none"}, [1.0] * 4, [False] * 4),
    ({"importance_level": "sequence"}, [1.0, 1.0, 1.6, 1.6], [False] * 4),  # 4 * 1/4, 1.6 * 1
    ({"importance_level": "sequence", "importance_high": 1.5}, [1.0, 1.0, 1.5, 1.5], [False, False, True, True]),
    ({"importance_level": "sequence", "importance_high": 1.5, "importance": "mask"}, [1.0, 1.0, 0.0, 0.0], [False, False, True, True]),
    ({"importance_level": "geometric"}, [1.0, 1.0, 1.6**0.5, 1.6**0.5], [False] * 4),
])
def test_importance_by_hand(config, expected, cut):
    assert weights(RATIOS, **config) == (expected, cut)


# -- together ----------------------------------------------------------------------------------------------------------------
def test_loss_by_hand_with_truncated_weights():
    # pi = pi_old, weights 1/2. Token 1: pi 0.4, rollout 0.25, w = 1.6; token 2: pi 0.4, rollout 0.1, w = 4 cut to 2.
    # loss = -(0.5 * 1.6 * 1 * 3 + 0.5 * 2 * 1 * -1) = -1.4
    t = tokens([0.4, 0.4], None, rollout=[0.25, 0.1], advantages=[3.0, -1.0], weights=[0.5, 0.5])
    loss, cut, out = PolicyLoss(AlgorithmConfig(importance_low=0.5, importance_high=2.0))(t)
    assert float(loss.detach()) == pytest.approx(-1.4, abs=1e-6)
    assert (cut.tolist(), out.tolist()) == ([False, False], [False, True])
    loss.backward()  # d loss / d log pi = -weight * w * r * A
    assert t.logprobs.grad.tolist() == pytest.approx([-2.4, 1.0], abs=1e-5)


def test_small_weights_are_raised_to_the_lower_bound():
    # pi_old / rollout = 0.1 / 0.4 = 0.25 -> 0.5; loss = -(1 * 0.5 * 1 * 2)
    loss, _, out = PolicyLoss(AlgorithmConfig(importance_low=0.5))(tokens([0.1], None, rollout=[0.4], advantages=[2.0]))
    assert float(loss.detach()) == pytest.approx(-1.0, abs=1e-6) and out.tolist() == [True]


def test_a_masked_token_takes_no_part_whatever_its_objective_is():
    t = tokens([0.4, 0.2], None, rollout=[0.01, 0.2], advantages=[math.inf, 1.0], weights=[0.5, 0.5])
    loss, _, out = PolicyLoss(AlgorithmConfig(importance="mask"))(t)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(-0.5) and out.tolist() == [True, False] and t.logprobs.grad.tolist()[1] == pytest.approx(-0.5)


def test_the_proximal_policy_is_the_current_one_or_the_one_that_sampled():
    new, rollout = log([0.4]), log([0.1])
    assert PolicyLoss(AlgorithmConfig()).proximal(new, rollout).equal(new)
    loss = PolicyLoss(AlgorithmConfig(proximal="rollout"))
    assert loss.proximal(new, rollout).equal(rollout)
    t = tokens([0.4], [0.1], rollout=[0.1])  # ratio 4, clipped at 1.28; the importance weight is 1
    assert float(loss(t).value.detach()) == pytest.approx(-1.28)


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_extreme_differences_stay_finite(name, level):
    logprobs = torch.tensor([-1e4, -1e-3]).requires_grad_()
    old = torch.tensor([-1e-3, -1e4])
    t = SampledTokens(logprobs, torch.zeros(2), old, old.flip(0), torch.tensor([1.0, -1.0]), torch.tensor([0.5, 0.5]), torch.tensor([0, 1]), 2)
    loss, _, _ = PolicyLoss(AlgorithmConfig(name=name, importance_level=level))(t)
    loss.backward()
    assert math.isfinite(float(loss.detach())) and torch.isfinite(logprobs.grad).all()


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
def test_no_sampled_token_gives_zero_loss(name):
    loss, _, _ = PolicyLoss(AlgorithmConfig(name=name, importance_level="sequence"))(tokens([], None))
    loss.backward()
    assert float(loss.detach()) == 0.0


# -- a user's own ------------------------------------------------------------------------------------------------------------
def halved(t):
    return 0.5 * t.advantages * t.logprobs


def forgets_the_gradient(t):
    return t.advantages * t.logprobs.detach()


def test_a_users_surrogate():
    t = tokens([0.5], None, advantages=[3.0])
    loss, _, _ = PolicyLoss(AlgorithmConfig(name=f"{__name__}.halved"))(t)
    loss.backward()
    assert t.logprobs.grad.tolist() == pytest.approx([-1.5])


def test_a_users_surrogate_that_does_not_exist_or_has_no_gradient_is_refused():
    with pytest.raises(ConfigError, match=r"algorithm.name = 'nowhere.at.all'"):
        PolicyLoss(AlgorithmConfig(name="nowhere.at.all"))
    with pytest.raises(StructureError, match="with a gradient"):
        PolicyLoss(AlgorithmConfig(name=f"{__name__}.forgets_the_gradient"))(tokens([0.5], None))
