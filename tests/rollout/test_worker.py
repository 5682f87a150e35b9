"""A rank that plays samples: with several leaves, from the option to the sealed group; what it logs; and one that was begun by a killed rank."""

import asyncio
import json
import math
import sys
from types import SimpleNamespace

import h5py
import numpy as np
import pytest

import miles.rollout.worker
from miles.buffer import BufferWriter
from miles.config import load_config
from miles.core import NO_VERSION, Drafts, EnvironmentFault, Trajectory
from miles.engine.process import EngineKilled
from miles.env import Episode
from miles.log import RunLog
from miles.rollout.weights import EnginePoisoned
from miles.rollout.worker import Worker, _NoStart, sample_figures
from miles.rundir import RunDir
from miles.session import Engine
from tests.buffer.parts import group_of
from tests.engine.tiny import make_tokenizer
from tests.session.conftest import SHAPE_CONFIG, user
from tests.session.fake import FakeEngine


async def forking_episode(task, chat, limits):
    """An agent that asks, goes on, and then goes back to its first reply with other words."""
    first = (await chat([user("q")])).message
    await chat([user("q"), first, user("left")])
    await chat([user("q"), first, user("right")])
    return Episode(reward=0.5, finish="done", turns=3, env_s=0.25)


@pytest.fixture
def play(tmp_path, monkeypatch):
    """Plays a sample of group 0 with the forking agent on a rank with a given `rollout.history`; (what it reported, the sealed trajectories, its log)."""
    monkeypatch.setattr(miles.rollout.worker, "run_episode", forking_episode)
    tokenizer = make_tokenizer(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", **SHAPE_CONFIG}))

    def played(history, *more):
        run = RunDir.create(load_config("configs/tiny_async.toml", (f"run.root={tmp_path}", f"model.path={tmp_path / 'model'}", f"rollout.history={history}", *more)))
        epoch, attempt, reports = run.new_epoch("rollout"), run.new_attempt(), []
        log = RunLog(tmp_path / "rank.h5")
        worker = Worker(run, 0, epoch, attempt, {"t": SimpleNamespace(name="t")}, log, reports.append)
        engine = FakeEngine([stop := tokenizer.eos_token_id])
        engine.outputs = [[50, stop], [51, stop], [52, 53, stop]]

        async def main():
            worker._engines.up(Engine(0, engine))
            worker.assign(0, 3, "t", None)
            await asyncio.gather(*worker._running)
            worker._service.store.close()

        asyncio.run(main())
        log.close()
        sealed = []
        if reports[0]["cause"] is None:
            writer = BufferWriter(run, epoch)
            writer.start(0, "t")
            writer.seal(0, [3])
            sealed = group_of(run, 0).trajectories
        with h5py.File(tmp_path / "rank.h5", "r", locking=False) as f:
            tables = {name: table[...] for name, table in f["tables"].items()}
        return SimpleNamespace(reports=reports, sealed=sealed, tables=tables, stop=stop, dropped=list((run.attempt_dir(attempt) / "dropped").glob("*")))

    return played


def test_with_a_branching_history_an_agent_that_forks_has_a_trajectory_for_each_conversation(play):
    got = play("branching")
    (report,) = got.reports
    assert report.pop("part").offset == 0 and report == {"kind": "finished", "group": 0, "sample": 3, "cause": None}
    assert [(t.sample, t.leaf, t.reward, t.turns, t.tokens[t.loss_mask == 1].tolist()) for t in got.sealed] == [
        (3, 0, 0.5, 2, [50, got.stop, 51, got.stop]), (3, 1, 0.5, 1, [52, 53, got.stop])]
    (row,) = got.tables["trajectories"]
    assert (row["leaves"], row["turns"], row["sampled_tokens"], row["status"]) == (2, 3, 7, b"ok")
    assert [(r["kind"], r["cause"], r["count"]) for r in got.tables["mismatches"]] == [(b"branched", b"content", 1)]


def test_with_a_linear_history_it_has_one_and_the_fork_is_a_retry(play):
    got = play("linear")
    assert [(t.leaf, t.turns, t.tokens[t.loss_mask == 1].tolist()) for t in got.sealed] == [(0, 2, [50, got.stop, 52, 53, got.stop])]
    assert got.sealed[0].meta["retried_turns"] == 1 and "mismatches" not in got.tables


def test_a_users_reward_is_given_the_task_its_conversations_and_what_the_tests_gave(play, monkeypatch):
    seen = []

    def shape(task, conversations, episode):
        seen.append((task.name, [[(m["role"], m["content"]) for m in c if m["role"] != "assistant"] for c in conversations], [len(c) for c in conversations]))
        return episode.reward - 0.25 * episode.turns

    monkeypatch.setitem(sys.modules, "my_rewards", SimpleNamespace(shape=shape))
    got = play("branching", "tasks.reward=my_rewards.shape")
    assert seen == [("t", [[("user", "q"), ("user", "left")], [("user", "q"), ("user", "right")]], [4, 4])]
    assert [t.reward for t in got.sealed] == [-0.25, -0.25] and got.tables["trajectories"]["reward"].tolist() == [-0.25]


def test_a_sample_whose_reward_fails_is_dropped_and_counted_by_its_cause(play, monkeypatch):
    monkeypatch.setitem(sys.modules, "my_rewards", SimpleNamespace(broken=lambda task, conversations, episode: 1 / 0))
    got = play("linear", "tasks.reward=my_rewards.broken")
    assert got.reports[0]["cause"] == "dropped:reward" and [p.name for p in got.dropped] == ["g00000000s003.reward.json"]
    assert got.tables["trajectories"]["status"].tolist() == [b"dropped:reward"]


def test_a_refusal_that_ended_a_sample_is_among_the_mismatches(play, monkeypatch):
    async def rewriting(task, chat, limits):
        await chat([user("q")])
        await chat([user("summary so far"), {"role": "assistant", "content": "x"}, user("go on")])

    monkeypatch.setattr(miles.rollout.worker, "run_episode", rewriting)
    got = play("linear")
    assert [(r["status"], r["leaves"]) for r in got.tables["trajectories"]] == [(b"dropped:history:content", 0)]
    assert [(r["kind"], r["cause"], r["count"]) for r in got.tables["mismatches"]] == [(b"refused", b"history:content", 1)]


def test_a_sample_of_a_killed_rank_goes_on_from_its_last_answered_turn(tmp_path, monkeypatch):
    """The first rank is gone while the second turn runs; the next one says what it holds, and plays the sample to its end with one request fewer."""
    async def two_turns(task, chat, limits):
        first = (await chat([user("q")])).message
        await chat([user("q"), first, user("output")])
        return Episode(reward=1.0, finish="done", turns=2, env_s=0.0)

    monkeypatch.setattr(miles.rollout.worker, "run_episode", two_turns)
    tokenizer = make_tokenizer(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", **SHAPE_CONFIG}))
    run = RunDir.create(load_config("configs/tiny_async.toml", (f"run.root={tmp_path}", f"model.path={tmp_path / 'model'}")))
    attempt, stop = run.new_attempt(), tokenizer.eos_token_id

    def life(outputs, killed):
        epoch, reports = run.new_epoch("rollout"), []
        log = RunLog(tmp_path / f"rank{epoch}.h5")
        worker, engine = Worker(run, 0, epoch, attempt, {"t": SimpleNamespace(name="t")}, log, reports.append), FakeEngine([stop])
        engine.outputs = outputs
        hang = asyncio.Event()

        async def generate(*args, **kw):
            if not engine.outputs:
                hang.set()
                await asyncio.Event().wait()
            return await FakeEngine.generate(engine, *args, **kw)

        engine.generate = generate

        async def main():
            worker._engines.up(Engine(0, engine))
            held = list(worker._service.held)
            worker.assign(0, 3, "t", 0)
            (job,) = worker._running
            if killed:
                await hang.wait()
                job.cancel()
            await asyncio.gather(job, return_exceptions=True)
            worker._service.store.close()
            return held

        held = asyncio.run(main())
        log.close()
        return held, reports, engine

    assert life([[50, stop]], killed=True)[:2] == ([], [])
    held, reports, engine = life([[60, stop]], killed=False)
    assert held == ["g00000000s003"] and [(r["sample"], r["cause"]) for r in reports] == [(3, None)] and len(engine.answered) == 1
    writer = BufferWriter(run, run.current_epoch("rollout"))
    writer.start(0, "t")
    writer.seal(0, [3])
    (t,) = group_of(run, 0).trajectories
    assert (t.tokens[t.loss_mask == 1].tolist(), t.meta["resumed_turns"]) == ([50, stop, 60, stop], 1)
    assert life([], killed=True)[0] == []  # the part is there, so the session is closed


def leaf(number, mask, versions, turns, prompt, cached, cacheable, reused):
    mask = np.array(mask, np.uint8)
    at = np.full(len(mask), NO_VERSION, np.int32)
    at[mask == 1] = versions
    return Trajectory(
        group_id=2, sample=1, leaf=number, task_id="t", tokens=np.zeros(len(mask), np.int32), loss_mask=mask, logprobs=np.zeros(len(mask), np.float32),
        versions=at, routes=None, reward=0.5, finish_reason="done", turns=turns, exact=False, cached_tokens=cached, cacheable_tokens=cacheable,
        prompt_tokens=prompt, meta={"reused_tokens": reused, "moves": 1, "resumed_turns": 2, "abandoned_turns": 5, "engine_s": 3.0, "env_s": 1.5})


def test_what_drafts_did_is_summed_over_leaves_for_the_sample_and_over_everything_for_the_engine():
    first, second = leaf(0, [0, 1], [3], 1, 1, 0, 0, 0), leaf(1, [0, 1], [3], 1, 1, 0, 0, 0)
    first.meta["drafts"], second.meta["drafts"] = [6, 6, 4], [1, 2, 0]
    assert {k: v for k, v in sample_figures([first, second]).items() if "draft" in k or "accepted" in k} == {"draft_passes": 7, "drafted_tokens": 8, "accepted_tokens": 4}
    rows, worker = [], Worker.__new__(Worker)
    worker._rank, worker._logged, worker._log = 4, float("-inf"), SimpleNamespace(row=lambda table, **values: rows.append((table, values)))
    worker._log_engine(SimpleNamespace(active=1, version=2, generated_tokens=30, drafts=Drafts(9, 18, 7)), 0)
    assert rows == [("engine", {"rank": 4, "active": 1, "version": 2, "generated_tokens": 30, "restarts": 0, "draft_passes": 9, "drafted_tokens": 18,
                                "accepted_tokens": 7})]


def logged(leaves, cause, session=None):
    rows = []
    worker = Worker.__new__(Worker)  # without its engine
    worker._rank, worker._log = 4, SimpleNamespace(row=lambda table, **values: rows.append((table, values)))
    worker._log_trajectory(2, 1, SimpleNamespace(name="t"), leaves, cause, 9.0, session)
    return rows


def test_a_sample_is_one_row_with_the_sums_of_its_leaves_and_a_row_for_each_cause():
    rows = logged([leaf(0, [0, 1, 1, 0, 1], [3, 3, 4], 2, 10, 4, 3, 3), leaf(1, [0, 0, 0, 1], [6], 1, 7, 2, 2, 1)], None,
                  SimpleNamespace(branched={"content": 2, "rewind": 1}, refused={"history:tools": 1}))
    assert rows[0] == ("trajectories", {
        "group_id": 2, "sample": 1, "task_id": "t", "rank": 4, "reward": 0.5, "leaves": 2, "turns": 3, "tokens": 9, "sampled_tokens": 4, "prompt_tokens": 17,
        "cached_tokens": 6, "cacheable_tokens": 5, "reused_tokens": 4, "moves": 1, "resumed_turns": 2, "abandoned_turns": 5, "engine_s": 3.0, "env_s": 1.5, "oldest_version": 3, "newest_version": 6,
        "finish": "done", "draft_passes": 0, "drafted_tokens": 0, "accepted_tokens": 0, "seconds": 9.0, "status": "ok"})
    assert [(table, r["kind"], r["cause"], r["count"]) for table, r in rows[1:]] == [
        ("mismatches", "branched", "content", 2), ("mismatches", "branched", "rewind", 1), ("mismatches", "refused", "history:tools", 1)]


def test_a_sample_that_did_not_finish_has_a_row_of_the_same_columns():
    (_, row), = logged([], "dropped:assembly:prefix")
    assert set(row) == set(logged([leaf(0, [0, 1], [3], 1, 1, 0, 0, 0)], None)[0][1])
    assert math.isnan(row["reward"]) and (row["leaves"], row["tokens"], row["oldest_version"], row["status"]) == (0, 0, -1, "dropped:assembly:prefix")


@pytest.fixture
def worker(tmp_path):
    make_tokenizer(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", **SHAPE_CONFIG}))
    run = RunDir.create(load_config("configs/tiny_async.toml", (f"run.root={tmp_path}", f"model.path={tmp_path / 'model'}")))
    log = RunLog(tmp_path / "rank.h5")
    yield Worker(run, 0, run.new_epoch("rollout"), run.new_attempt(), {"t": SimpleNamespace(name="t")}, log, lambda message: None)
    log.close()


def test_what_ends_a_trajectory_without_an_answer_ends_its_rank(worker, monkeypatch):
    # A rank that went on would leave the sample unanswered, its group open and the run waiting; started again, the rank plays it again.
    async def broken(task, chat, limits):
        raise ZeroDivisionError("a defect")

    async def no_engine():
        await asyncio.Event().wait()

    monkeypatch.setattr(miles.rollout.worker, "run_episode", broken)
    monkeypatch.setattr(worker._process, "start", no_engine)

    async def main():
        worker._engines.up(Engine(0, FakeEngine([2])))
        life = asyncio.create_task(worker.run())
        await asyncio.sleep(0.1)
        worker.assign(0, 3, "t", None)
        await life

    with pytest.raises(ZeroDivisionError, match="a defect"):
        asyncio.run(main())


@pytest.fixture
def live(worker, monkeypatch):
    """Plays the lives of a rank's engines: of each, whether it takes a version (or is poisoned by it) look by look. Returns the numbers of those that started."""
    started = []

    class Weights:
        version, released = 1, False

        def __init__(self, run, rank, epoch, incarnation, *_):
            started.append(incarnation)

        async def follow(self):
            if not self.looks:
                worker.stop()
                return False
            if (look := self.looks.pop(0)) is EnginePoisoned:
                raise EnginePoisoned("half of it", "a whole version", "nothing")
            return look

        def close(self):
            pass

    async def nothing():
        return "http://engine"

    def played(lives):
        Weights.looks = [look for life in lives for look in life]
        asyncio.run(worker.run())
        return started

    monkeypatch.setattr(miles.rollout.worker, "EngineWeights", Weights)
    monkeypatch.setattr(miles.rollout.worker, "LOOK_S", 0.001)
    monkeypatch.setattr(worker, "_process", SimpleNamespace(alive=True, returncode=0, start=nothing, stop=nothing, log_tail=lambda: "its log"))
    return played


def test_deaths_of_engines_whose_updates_work_between_them_never_end_the_rank(live):
    assert live([[True, False, True, EnginePoisoned]] * 9) == list(range(10))


@pytest.mark.parametrize("life", [[EnginePoisoned], [True, EnginePoisoned], [False, True, False, EnginePoisoned]])
def test_engines_none_of_which_takes_a_second_version_end_the_rank_when_engine_restarts_is_used_up(live, life):
    with pytest.raises(EnvironmentFault, match="half of it(?s:.*)that was death 4 in a row(?s:.*)its log"):
        live([[True, True, EnginePoisoned], *[life] * 3])


def test_a_sample_that_is_given_again_while_it_runs_was_overdue_its_first_trajectory_ends_without_an_answer(worker, monkeypatch):
    reports, events = [], []
    monkeypatch.setattr(worker, "_report", reports.append)

    async def hangs_once(task, chat, limits):
        events.append("begins")
        if len(events) == 1:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.05)  # its sandbox is taken down
                events.append("ends")
        raise EnvironmentFault("the second one")

    monkeypatch.setattr(miles.rollout.worker, "run_episode", hangs_once)

    async def main():
        worker._engines.up(Engine(0, FakeEngine([2])))
        for _ in range(2):
            worker.assign(0, 3, "t", None)
            await asyncio.sleep(0.02)
        await asyncio.gather(*worker._running, return_exceptions=True)
        await asyncio.sleep(0)
        worker._service.store.close()

    asyncio.run(main())
    assert events == ["begins", "ends", "begins"] and worker._playing == {} and not worker._failed.is_set()
    assert reports == [{"kind": "finished", "group": 0, "sample": 3, "cause": "retried:environment"}]


def test_an_engine_that_is_killed_while_it_starts_has_died_and_one_that_cannot_start_ends_the_run(worker, monkeypatch):
    answers = [EngineKilled("killed"), EnvironmentFault("a wrong flag"), "http://engine", EnvironmentFault("a full GPU")]

    async def start():
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(worker._process, "start", start)

    async def main():
        with pytest.raises(_NoStart, match="killed"):
            await worker._start()
        with pytest.raises(EnvironmentFault, match="a wrong flag"):
            await worker._start()
        assert await worker._start() == "http://engine"
        with pytest.raises(_NoStart, match="a full GPU"):  # what has served once is not configured wrongly
            await worker._start()
        worker._service.store.close()

    asyncio.run(main())
