"""Advantages from a critic, by hand and against the plain recursion; the critic itself: what it learns, and what stays of it."""

import math

import numpy as np
import pytest
import torch
import worlds
from hypothesis import given
from hypothesis import strategies as st

from miles.config import load_config
from miles.config.schema import AlgorithmConfig
from miles.core import ConfigError
from miles.trainer.algorithms import SampledTokens, gae_of_sequences
from miles.trainer.algorithms.gae import gae
from miles.trainer.checkpoint import begin_checkpoint, load_checkpoint
from miles.trainer.critic import Critic
from miles.weights.mapping import local_weights

GAE = {"advantage": "gae", "critic": {"lr": 1e-2}}


# -- advantages --------------------------------------------------------------------------------------------------------------
def test_gae_by_hand():
    # gamma 1/2, lambda 1/2; values 4, 2, 1; reward 8 at the end: delta = 1/2 * 2 - 4 = -3; 1/2 * 1 - 2 = -3/2; 8 - 1 = 7
    # A = 7; -3/2 + 7/4 = 1/4; -3 + 1/16 = -47/16
    found = gae(np.array([0.0, 0.0, 8.0]), np.array([4.0, 2.0, 1.0]), gamma=0.5, lam=0.5)
    assert found.tolist() == pytest.approx([-47 / 16, 1 / 4, 7])


@pytest.mark.parametrize(("lam", "expected"), [(0.0, [1.0, 2.0, 2.0]), (1.0, [5.0, 4.0, 2.0])])
def test_lambda_0_is_the_one_step_error_and_lambda_1_the_reward_to_come_minus_the_value(lam, expected):
    # values 0, 1, 3, reward 5: errors 1 - 0, 3 - 1, 5 - 3; to come minus value: 5 - 0, 5 - 1, 5 - 3
    assert gae(np.array([0.0, 0.0, 5.0]), np.array([0.0, 1.0, 3.0]), gamma=1.0, lam=lam).tolist() == expected


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=1, max_size=40), st.floats(0.01, 1), st.floats(0, 1), st.integers(1, 50))
def test_in_chunks_it_is_the_recursion(items, gamma, lam, chunk):
    rewards, values = np.array(items).T
    want, after, following = np.zeros(len(items)), 0.0, 0.0
    for t in reversed(range(len(items))):
        after = rewards[t] + gamma * following - values[t] + gamma * lam * after
        want[t], following = after, values[t]
    np.testing.assert_allclose(gae(rewards, values, gamma=gamma, lam=lam, chunk=chunk), want, atol=1e-9)


def test_each_sequence_earns_its_reward_with_its_last_sampled_token():
    assert len(gae_of_sequences(*[np.zeros(0)] * 4, gamma=1.0, lam=1.0)) == 0  # the micro-batch of a rank without sequences
    # sequences of 2 and 1 sampled tokens, values 0: with gamma = lambda = 1 every token has all that is still to come
    found = gae_of_sequences(np.array([3.0, 3.0, -1.0]), np.array([-0.5, -0.25, -0.125]), np.zeros(3), np.array([0, 0, 2]), gamma=1.0, lam=1.0)
    assert found.tolist() == [2.25, 2.75, -1.125]


# -- the critic --------------------------------------------------------------------------------------------------------------
def of_turns(advantage, rollout, mask=(0, 0, 1, 1, 0, 0, 1)):
    """A sequence of two turns with an observation between them."""
    base, mask = worlds.sequences(rollout + 1, 50)[rollout], np.array(mask, np.uint8)
    n = len(mask)
    return worlds.replace(base, tokens=np.resize(base.tokens, n), loss_mask=mask, logprobs=np.where(mask, -4.0, 0.0).astype(np.float32),
                          versions=np.where(mask, 0, -1).astype(np.int32), routes=None, advantage=advantage, rollout=rollout)


def judged(step, batch):
    plan = step.plan([len(s.tokens) for s in batch])
    mine = [batch[i] for i in plan.of_rank(0)]
    return step.critic.judge(plan, mine, [0.25] * len(mine), step._known(plan, mine, [0.25] * len(mine)))


def test_a_new_critic_knows_nothing_so_that_advantages_are_normalised_rewards_of_sampled_tokens_alone(world, models):
    # values 0, lambda 1: three tokens of reward 1 and one of reward -1: mean 1/2, std sqrt(3) / 2
    step = worlds.build(models["llama"], {}, algorithm={**GAE, "critic": {"lr": 1e-2, "lam": 1.0}})
    found = judged(step, [of_turns(1.0, 0), of_turns(-1.0, 1, (0, 0, 1))])
    (known,) = found.known
    assert known["advantages"].tolist() == pytest.approx([0.5 / math.sqrt(0.75)] * 3 + [-1.5 / math.sqrt(0.75)], abs=1e-4)
    assert found.loss == pytest.approx(4 * 0.25 / 2) and found.explained_variance == pytest.approx(0.0, abs=1e-9)


def test_a_divergence_of_kind_k1_is_a_cost_of_each_token_and_is_not_taken_out_twice(world, models):
    algorithm = {"advantage": "gae", "critic": {"lr": 1e-2, "lam": 1.0}, "kl": "k1", "kl_coefficient": 0.5}
    step = worlds.build(models["llama"], {}, algorithm=algorithm)
    batch = [of_turns(1.0, 0)]
    plan = step.plan([7])
    reference = step._known(plan, batch, [1.0])[0]["reference"]
    costs = 0.5 * (-4.0 - reference.double())
    to_come = 1.0 - costs.flip(0).cumsum(0).flip(0)
    want = (to_come - to_come.mean()) / to_come.std(correction=0)
    assert judged(step, batch).known[0]["advantages"].tolist() == pytest.approx(want.tolist(), abs=1e-4)
    x = torch.tensor([-1.0, -2.0])
    tokens = SampledTokens(x, torch.zeros(2), x, x, torch.ones(2), torch.ones(2), torch.zeros(2, dtype=torch.int64), 1, reference=x - 1)
    assert float(step.policy_loss(tokens).value) == -2.0  # advantages as they are


def test_the_critic_learns_which_sequences_are_rewarded(world, models):
    step = worlds.build(models["llama"], {}, algorithm=GAE, optimizer={"lr": 1e-6})
    batch = [worlds.replace(s, advantage=float(i % 2)) for i, s in enumerate(worlds.sequences(6, 51))]
    figures = [step.run(batch, number=i) for i in range(12)]
    assert figures[-1].critic_loss < 0.3 * figures[0].critic_loss and figures[-1].critic_explained_variance > 0.5
    assert all(f.critic_grad_norm > 0 for f in figures)


def test_while_the_critic_is_trained_alone_the_policy_stays_as_it_is(world, models):
    step = worlds.build(models["llama"], {}, algorithm={"advantage": "gae", "critic": {"lr": 1e-2, "alone_steps": 2}})
    start = [t.clone() for t in local_weights(step.model.chunks)]

    def moved(of):
        return any(not torch.equal(a, b) for a, b in zip(start, local_weights(of.chunks), strict=True))

    for number, (policy, lr) in enumerate([(False, 0.0), (False, 0.0), (True, 1e-3)]):
        got = step.run(worlds.sequences(4, 52), number=number)
        assert (moved(step.model), got.lr, got.grad_norm > 0) == (policy, lr, policy)
        assert got.critic_grad_norm > 0


def test_a_reward_that_is_not_finite_changes_neither_policy_nor_critic(world, models):
    step = worlds.build(models["llama"], {}, algorithm=GAE)
    models_ = (step.model, step.critic.model)
    before = [[p.detach().clone() for p in m.chunks[0].parameters()] for m in models_]
    got = step.run([worlds.replace(s, advantage=math.inf) for s in worlds.sequences(3, 53)], number=0)
    assert got.skipped and math.isnan(got.critic_grad_norm)
    assert all(torch.equal(a, b) for m, kept in zip(models_, before, strict=True) for a, b in zip(kept, m.chunks[0].parameters(), strict=True))


@pytest.mark.parametrize("streamed", [False, True])
def test_a_checkpoint_holds_the_critic_with_its_optimizer(world, models, tmp_path, streamed):
    options = {"replay": True, "algorithm": GAE, "precision": "bf16", "state_dir": str(tmp_path) if streamed else ""}
    routes = (2, 2, 8)
    step = worlds.build(models["qwen3_moe"], {}, **options)
    step.run(worlds.sequences(4, 54, routes=routes), number=0)
    (tmp_path / "checkpoint").mkdir()
    saving = begin_checkpoint(tmp_path / "checkpoint", step.model, step.optimizer, step.critic)
    went_on = [vars(step.run(worlds.sequences(4, 55 + i, routes=routes), number=1 + i)) for i in range(2)]
    saving.wait()
    saving.finish()
    assert not saving.error
    again = worlds.build(models["qwen3_moe"], {}, **options)
    load_checkpoint(tmp_path / "checkpoint", again.model, again.optimizer, again.critic)
    resumed = [vars(again.run(worlds.sequences(4, 55 + i, routes=routes), number=1 + i)) for i in range(2)]
    assert resumed == went_on
    for one, other in ((step.model, again.model), (step.critic.model, again.critic.model)):
        assert all(torch.equal(a, b) for a, b in zip(one.chunks[0].parameters(), other.chunks[0].parameters(), strict=True))


def test_a_critic_of_another_architecture_is_refused(world, models):
    step = worlds.build(models["llama"], {})
    with pytest.raises(ConfigError, match="correct algorithm.critic.path"):
        Critic.build(step.model, models["llama"], step.trainer, AlgorithmConfig(advantage="gae", critic={"lr": 1.0, "path": models["qwen3"]}))


@pytest.mark.parametrize(("changes", "message"), [
    (("algorithm.advantage=gae",), "algorithm.advantage = 'gae' without a section .algorithm.critic.; expected .* together"),
    (("algorithm.critic.lr=1e-5",), "algorithm.advantage = 'grpo' with a section .algorithm.critic."),
    (("algorithm.advantage=gae", "algorithm.critic.lr=1e-5", "buffer.filter=equal_rewards"), "would learn from the others alone; expected 'none'"),
    (("algorithm.advantage=gae", "algorithm.critic.lr=1e-5", "algorithm.critic.alone_steps=9", "run.steps=9"), "alone_steps = 9 of run.steps = 9: the policy would never"),
])
def test_what_a_critic_cannot_go_with_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        load_config("configs/tiny_async.toml", changes)
