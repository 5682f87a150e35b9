"""What is kept of a step that was skipped makes it again."""

import math

import numpy as np
import pytest
import torch
import worlds
from launch import Job, launch

import miles.trainer.nonfinite as module
from miles.cluster.decide import Limits, RankReport, StepEnded, Stop, begin, decide, step_cause
from miles.core import ConfigError, Role
from miles.trainer.nonfinite import KEEP, NonFinite, read_sequences

ROUTES = (2, 2, 8)


@pytest.fixture
def step(world, models, tmp_path):
    out = worlds.build(models["qwen3_moe"], {}, replay=True, max_tokens_per_microbatch=64, algorithm={"kl_coefficient": 0.1})
    out.nonfinite = NonFinite(tmp_path / "nonfinite", 7)
    return out


def batch(advantage=math.inf):
    """Six sequences; the third has a reward that cannot be."""
    return [worlds.replace(s, advantage=advantage if i == 2 else s.advantage) for i, s in enumerate(worlds.sequences(6, 60, routes=ROUTES))]


def same(a, b):
    return all(np.array_equal(getattr(a, f), getattr(b, f)) for f in ("tokens", "loss_mask", "logprobs", "versions", "routes", "advantage", "exact"))


def test_the_micro_batch_that_was_not_finite_is_kept_and_makes_the_step_again(step, tmp_path, capsys):
    fed = batch()
    plan = step.plan([len(s.tokens) for s in fed])
    (guilty,) = [m for m, part in enumerate(plan.bins[0]) if 2 in part]
    assert plan.microbatches > 2
    assert step.run_planned(plan, [fed[i] for i in plan.of_rank(0)], number=11, version=9).skipped
    (path,) = (tmp_path / "nonfinite").iterdir()
    assert path.name == "step_000012.rank_00000.e000007.npz" and f"step 12: loss or gradients were not finite, nothing is changed; what was fed: {path}" in capsys.readouterr().out
    with np.load(path, allow_pickle=False) as f:
        assert (int(f["step"]), int(f["version"]), int(f["omitted"]), set(f["microbatch"].tolist())) == (12, 9, 0, {guilty})
        sampled = sum(int(fed[i].loss_mask[1:].sum()) for i in plan.bins[0][guilty])
        assert f[f"reference.{guilty}"].shape == (sampled,) and f["weight"].tolist() == [pytest.approx(1 / sum(int(s.loss_mask[1:].sum()) for s in fed))] * len(f["weight"])
    again = read_sequences(path)
    assert len(again) == len(plan.bins[0][guilty]) and all(same(a, fed[i]) for a, i in zip(again, plan.bins[0][guilty], strict=True))
    assert step.run(again, number=12).skipped


def test_where_the_loss_was_finite_and_a_gradient_was_not_everything_is_kept(step, tmp_path):
    fed = batch(1.0)
    weight = next(iter(step.model.chunks[0].module.parameters()))
    handle = weight.register_hook(lambda grad: grad * math.nan)
    got = step.run(fed, number=0)
    handle.remove()
    assert got.skipped and math.isfinite(got.loss)
    (path,) = (tmp_path / "nonfinite").iterdir()
    again = read_sequences(path)
    assert sorted(len(s.tokens) for s in again) == sorted(len(s.tokens) for s in fed) and sorted(s.rollout for s in again) == list(range(6))
    assert not step.run(again, number=1).skipped


def test_a_file_has_a_size_and_a_rank_a_number_of_them(step, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_BYTES", 600)  # 13 bytes a token and 4 a route: some of the sequences
    fed = [worlds.replace(s, advantage=math.nan) for s in batch()]
    for number in range(KEEP + 2):
        step.skipped_in_a_row = 0
        step.run(fed, number=number)
    files = sorted((tmp_path / "nonfinite").iterdir())
    assert [f.name[:11] for f in files] == [f"step_{n + 1:06d}" for n in range(KEEP)]
    with np.load(files[0], allow_pickle=False) as f:
        assert len(f["lengths"]) >= 1 and len(f["lengths"]) + int(f["omitted"]) == 6 and int(f["omitted"]) > 0


def test_the_third_in_a_row_says_where_to_look(step, tmp_path):
    for number in range(2):
        step.run(batch(), number=number)
    with pytest.raises(ConfigError, match=f"step 3: .* 3 times in a row(?s:.*)what was fed: {tmp_path / 'nonfinite'}"):
        step.run(batch(), number=2)


def test_the_third_in_a_row_ends_the_run_and_no_restart_repeats_it(step):
    step.skipped_in_a_row = 2
    with pytest.raises(ConfigError) as ended:
        step.run(batch(), number=2)
    first, other = RankReport(0, 100, "node0", ended.value.exit_code, 1.0), RankReport(1, 101, "node0", 143, 0.5)  # killed for it
    cause = step_cause(Role.TRAINER, [first, other], 2, 143)
    state, actions = decide(begin()[0], StepEnded(cause), 0.0, Limits(max_restarts=5, requeues_left=1, checkpoint_s=90.0))
    assert actions == [Stop(Role.ROLLOUT)] and (state.outcome.kind, state.outcome.exit_code) == ("failed", 2)


def test_a_critic_that_is_not_finite_is_the_cause_of_a_policy_that_is_not(world, models, tmp_path):
    step = worlds.build(models["llama"], {}, max_tokens_per_microbatch=64, algorithm={"advantage": "gae", "critic": {"lr": 1e-3}})
    step.nonfinite = NonFinite(tmp_path / "nonfinite", 1)
    fed = [worlds.replace(s, routes=None) for s in batch()]
    plan = step.plan([len(s.tokens) for s in fed])
    assert step.run(fed, number=0).skipped
    (path,) = (tmp_path / "nonfinite").iterdir()
    with np.load(path, allow_pickle=False) as f:
        (guilty,) = set(f["microbatch"].tolist())
        assert 2 in plan.bins[0][guilty] and not np.isfinite(f[f"advantages.{guilty}"]).any() and "routes" not in f
    assert torch.isfinite(torch.cat([p.flatten() for p in step.critic.model.chunks[0].parameters()])).all()


def test_sequences_whose_rows_lie_on_two_ranks_are_kept_whole_by_the_first(models, tmp_path):
    (kept,) = launch([Job(worlds.routes_kept, {"cp": 2}, (models["qwen3_moe"], {"cp": 2}, str(tmp_path / "nonfinite")))], ranks=2)
    assert kept == [[True] * 4] * 2
