"""One step on one rank: reductions, learning rate, skipping, and that it learns."""

import math

import numpy as np
import pytest
import torch
import worlds

from miles.config.schema import OptimizerConfig
from miles.core import ConfigError, StructureError
from miles.trainer.batching import Sequence
from miles.trainer.step import learning_rate


def changed(s, **new):
    return Sequence(**{**vars(s), **new})


def test_learning_rate_rises_linearly_and_stays():
    config = OptimizerConfig(lr=1.0, warmup_steps=4)
    assert [learning_rate(config, n) for n in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert learning_rate(OptimizerConfig(lr=0.5), 0) == 0.5


@pytest.mark.parametrize("reduction", ["token", "sequence"])
def test_loss_is_the_mean_over_the_whole_step_however_it_is_cut(world, models, reduction):
    batch = worlds.sequences(6, 20)
    pieces = [worlds.build(models["llama"], {}, algorithm={"reduction": reduction}, max_tokens_per_microbatch=n).run(batch, number=0)
              for n in (64, 1000)]
    assert pieces[0].microbatches > pieces[1].microbatches == 1
    assert pieces[0].loss == pytest.approx(pieces[1].loss, rel=1e-5)
    assert pieces[0].grad_norm == pytest.approx(pieces[1].grad_norm, rel=1e-5)
    # by hand: pi = pi_old, so the loss is -sum(weight * w * A); with TIS off the reach of [0, inf) w = exp(lp - rollout)
    step = worlds.build(models["llama"], {})
    ours = worlds.logprobs_of(step, batch)
    per_token = [-np.minimum(np.exp(np.array(lp) - s.logprobs[1:][s.loss_mask[1:] == 1]), 2.0) * s.advantage for lp, s in zip(ours, batch, strict=True)]
    want = np.concatenate(per_token).mean() if reduction == "token" else np.mean([t.mean() for t in per_token])
    assert pieces[0].loss == pytest.approx(want, rel=1e-4)


def test_two_leaves_of_a_rollout_train_what_one_sequence_with_the_same_tokens_trains(world, models):
    """A rollout of two turns; as two leaves, the first ends with the first turn, and the second holds it as given text."""
    for reduction in ("token", "sequence"):
        whole, split = worlds.whole_and_split(26)
        got = [worlds.build(models["llama"], {}, algorithm={"reduction": reduction}).run(batch, number=0) for batch in (whole, split)]
        assert [len(whole), len(split)] == [3, 4] and got[0].sampled_tokens == got[1].sampled_tokens
        for name in ("loss", "grad_norm", "logprob_diff_mean", "kl_mean", "ess", "advantage_abs_mean"):
            assert getattr(got[0], name) == pytest.approx(getattr(got[1], name), rel=1e-5), (reduction, name)
        # by leaves instead of rollouts, the sequence reduction would give another loss
        alone = worlds.build(models["llama"], {}, algorithm={"reduction": reduction}).run([changed(s, rollout=i) for i, s in enumerate(split)], number=0)
        assert (abs(alone.loss - got[0].loss) > 1e-3 * abs(got[0].loss)) == (reduction == "sequence")


def test_a_rollout_that_is_not_of_this_step_is_refused(world, models):
    batch = worlds.sequences(2, 24)
    with pytest.raises(StructureError, match="rollout 2 in a step of 2 sequences"):
        worlds.build(models["llama"], {}).run([batch[0], changed(batch[1], rollout=2)], number=0)


def test_exact_figures_count_exact_trajectories_only(world, models):
    batch = worlds.sequences(4, 21)
    ours = worlds.logprobs_of(worlds.build(models["llama"], {}), batch)
    # the rollout agrees to 0.001 on the exact trajectories and to 0.5 on the others
    batch = [changed(s, exact=i < 2, logprobs=_put(s, np.array(lp) + (0.001 if i < 2 else 0.5))) for i, (s, lp) in enumerate(zip(batch, ours, strict=True))]
    got = worlds.build(models["llama"], {}).run(batch, number=0)
    assert got.exact_tokens == sum(len(lp) for lp in ours[:2])
    assert got.exact_logprob_diff_mean == pytest.approx(0.001, abs=1e-5)
    assert got.exact_logprob_diff_max == pytest.approx(0.001, abs=1e-5)
    assert got.logprob_diff_max == pytest.approx(0.5, abs=1e-5)
    n, m = got.exact_tokens, got.sampled_tokens
    assert got.logprob_diff_mean == pytest.approx((0.001 * n + 0.5 * (m - n)) / m, abs=1e-5)
    assert got.importance_cut_fraction == 0.0


def test_figures_by_staleness_are_those_of_the_tokens_of_each_version(world, models):
    """Versions 7 (trained), 6 and 2 sampled a third of the tokens each; the rollout is off by 0.001, 0.1 and 0.5."""
    batch = worlds.sequences(6, 22)
    ours = worlds.logprobs_of(worlds.build(models["llama"], {}), batch)
    off, made = {0: 0.001, 1: 0.1, 3: 0.5}, []
    for i, (s, lp) in enumerate(zip(batch, ours, strict=True)):
        ages = np.array([(0, 1, 5)[(i + t) % 3] for t in range(len(lp))])
        versions = np.full(len(s.tokens), -1, np.int32)
        versions[1:][s.loss_mask[1:] == 1] = 7 - ages
        made.append(changed(s, versions=versions, logprobs=_put(s, np.array(lp) + np.array([off[min(a, 3)] for a in ages]))))
    got = worlds.build(models["llama"], {}).run(made, number=0, version=7)
    assert [k for k, _ in got.by_staleness] == [0, 1, 3] and sum(found.tokens for _, found in got.by_staleness) == got.sampled_tokens
    for k, found in got.by_staleness:
        assert found.logprob_diff_mean == pytest.approx(off[k], abs=1e-5) and found.logprob_diff_max == pytest.approx(off[k], abs=1e-4)
        assert found.kl_mean == pytest.approx(math.exp(-off[k]) - 1 + off[k], rel=1e-2, abs=1e-7) and found.ess == pytest.approx(1.0, abs=1e-6)
    assert got.logprob_diff_mean == pytest.approx(sum(f.tokens * f.logprob_diff_mean for _, f in got.by_staleness) / got.sampled_tokens)
    assert worlds.build(models["llama"], {}).run(made, number=0).by_staleness == ()  # which version is trained was not said


def _put(s, values):
    out = np.zeros(len(s.tokens), np.float32)
    out[1:][s.loss_mask[1:] == 1] = values
    return out


def test_repeated_steps_make_rewarded_tokens_likelier(world, models):
    step = worlds.build(models["qwen3_moe"], {}, optimizer={"lr": 3e-3})
    base = worlds.sequences(4, 22)
    seen = worlds.capture_logprobs(step)
    for number in range(6):
        seen.clear()
        step.run([changed(s, advantage=1.0 if i % 2 else -1.0) for i, s in enumerate(base)], number=number)
        if number == 0:
            first = list(seen)
    plan = step.plan([len(s.tokens) for s in base])
    order = np.array([i for b in plan.bins[0] for i in b for _ in range(int(base[i].loss_mask[1:].sum()))])
    gain = np.concatenate([np.array(x) for x in seen]) - np.concatenate([np.array(x) for x in first])
    assert gain[order % 2 == 1].mean() > 0 > gain[order % 2 == 0].mean()


def test_a_non_finite_step_changes_nothing_and_the_third_in_a_row_stops(world, models):
    step = worlds.build(models["llama"], {})
    batch = worlds.sequences(3, 23)
    bad = [changed(s, advantage=math.inf) for s in batch]
    weights = [p.detach().clone() for p in step.model.chunks[0].parameters()]
    first = step.run(bad, number=0)
    assert first.skipped
    assert math.isnan(first.grad_norm)
    assert all(torch.equal(a, b) for a, b in zip(weights, step.model.chunks[0].parameters(), strict=True))
    assert not step.run(batch, number=1).skipped  # a good one resets the count
    step.run(bad, number=2)
    step.run(bad, number=3)
    with pytest.raises(ConfigError, match="not finite 3 times in a row"):
        step.run(bad, number=4)
