"""What must be true of a run after any number of kills, from its files alone."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path

from miles.buffer import BufferState, BufferView, Status
from miles.cluster.progress import log_files
from miles.core import LOST_PEER
from miles.report import report
from miles.rundir import RunDir, read_journal
from miles.weights.store import WeightStore


@dataclass(frozen=True)
class Outcome:
    """What a run has made: the place and the task of each group that a step trained, and the digest of all tensors of the last version."""

    steps: dict[int, list[tuple[int, str]]]
    weights: str


def outcome(run: RunDir) -> Outcome:
    view, store = BufferView(run), WeightStore(run)
    view.poll()
    steps: dict[int, list[tuple[int, str]]] = {}
    for g in view.state.with_status(Status.TRAINED):
        steps.setdefault(g.step, []).append((g.index, g.task_id))
    last = store.manifest(store.newest())
    assert last.step == run.config.run.steps
    return Outcome({step: sorted(steps[step]) for step in sorted(steps)}, last.digest)


def check(run: RunDir) -> None:
    assert run.finished
    check_ends(run)
    check_lineage(run)
    check_versions(run)
    check_engines(run)
    view = BufferView(run)
    view.poll()
    assert all(g.samples == run.config.rollout.group_size for g in view.state.with_status(Status.TRAINED)), "no kill costs a sample"
    check_journals(run)
    assert max(json.loads(p.read_text())["step"] for p in run.checkpoints_dir.glob("step_*/COMMIT")) == run.config.run.steps
    left = [str(p) for folder in (run.weights_dir, run.checkpoints_dir) for p in folder.glob(".*")]
    assert left == [], "what a killed trainer was writing is removed by the next"


def check_ends(run: RunDir) -> None:
    """No rank has ended but by a signal or at the end: what is killed takes nothing else with it. 143, 75: told to stop, as its step was a rank short. 76: it noticed
    by itself that a rank of its step was gone, which was killed."""
    records = {str(p.relative_to(run.path)): json.loads(p.read_text()) for p in sorted(run.path.glob("attempts/*/ranks/*.json"))}
    others = {name: r for name, r in records.items() if r["code"] not in (None, 0, 75, LOST_PEER, 137, 143)}
    if others:
        print(*(f"== {p.name}\n{p.read_text(errors='replace')[-6000:]}" for n in run.attempts() for p in log_files(run, n)), sep="\n")
    assert others == {}
    steps = {code: {re.sub(r"-\d+\.", ".", name) for name, r in records.items() if r["code"] == code} for code in (LOST_PEER, 137, None)}  # attempt, role and epoch
    assert steps[LOST_PEER] <= steps[137] | steps[None]  # None: its wrapper was killed with its step before it had looked


def check_lineage(run: RunDir) -> None:
    """Every step trained whole groups, none twice, and every token of them."""
    c, figures = run.config, report(run.path)
    assert (figures["steps"], figures["groups_trained"], figures["groups_trained_twice"]) == (c.run.steps, c.run.steps * c.trainer.groups_per_step, 0)
    assert figures["tokens"]["unaccounted"] == 0


def check_versions(run: RunDir) -> None:
    """Numbers and epochs go up; within an epoch every version is one step further, and a new epoch begins with a checkpoint of what was there."""
    store = WeightStore(run)
    manifests = [store.manifest(v) for v in store.versions()]
    assert [m.version for m in manifests] == list(range(1, len(manifests) + 1))
    for before, after in zip(manifests[:-1], manifests[1:], strict=True):
        if before.epoch == after.epoch:
            assert after.step == before.step + 1
        else:
            assert after.epoch > before.epoch and after.encoding == "keyframe" and after.step <= before.step
    by_step: dict[int, set[str]] = {}
    for m in manifests:
        by_step.setdefault(m.step, set()).add(m.digest)
    assert run.config.buffer.order != "index" or all(len(digests) == 1 for digests in by_step.values()), "trained again, a step gives the same weights"


def check_engines(run: RunDir) -> None:
    """No engine goes back to an older version, and none answers before it has the newest that there was when it was started."""
    published = [(m.published, m.version) for m in map(WeightStore(run).manifest, WeightStore(run).versions())]
    incarnations = 0
    for log in sorted(run.path.glob("attempts/*/engine-*.log")):
        for life in lives(log):
            versions = [e["version"] for e in life if e["event"] == "weights"]
            assert versions == sorted(set(versions)), f"{log}: {versions}"
            answers = [e["version"] for e in life if e["event"] == "generate"]
            newest = max((v for when, v in published if when < life[0]["time"]), default=1)
            assert answers == sorted(answers) and (not answers or answers[0] >= newest), f"{log}: {answers[:3]}, v{newest} was there"
            incarnations += 1
    assert incarnations


def lives(log: Path) -> list[list[dict]]:
    """Events of each incarnation of an engine. A killed one may have left half a line."""
    events = [json.loads(line) for line in log.read_text().splitlines() if re.fullmatch(r"\{.*\}", line)]
    starts = [i for i, e in enumerate(events) if e["event"] == "start"]
    return [events[a:b] for a, b in zip(starts, [*starts, len(events)][1:], strict=True)]


def check_journals(run: RunDir, times: int = 5) -> None:
    """They fold to one state, in whichever order the two roles' records come."""
    roles = [[r for path in sorted((run.buffer_dir / "journal").glob(f"{role}.e*.log")) for r in read_journal(path)] for role in ("rollout", "trainer")]

    def fold(records) -> dict:
        state = BufferState()
        for r in records:
            state.apply(r)
        return state.groups

    expected, rng = fold(roles[0] + roles[1]), random.Random(0)
    view = BufferView(run)
    view.poll()
    assert view.state.groups == expected == fold(roles[1] + roles[0])
    for _ in range(times):
        a, b = iter(roles[0]), iter(roles[1])
        turns = [a] * len(roles[0]) + [b] * len(roles[1])
        rng.shuffle(turns)
        assert fold(next(which) for which in turns) == expected
