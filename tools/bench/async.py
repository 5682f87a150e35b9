#!/usr/bin/env -S sh -c 'exec "$(dirname "$0")/../../.venv/bin/python" "$0" "$@"'
"""Asynchronous against synchronous schedule: simulated at 64 and 1,024 engines, and measured on a real engine. [--quick] [--json]

Simulated. The scheduler, the buffer's state and the choice of groups are those of a run (miles/rollout/simulator.py); what takes time is a model: 16 trajectories
an engine, log-uniform between 30 s and 300 s of work, which n that run together get at 1 / (1 + n / 32) of full speed each; one group of 8 per two engines
and step, training 40 s, publishing 5 s, 2 s of pause. Baseline: the synchronous schedule on the same engines, lengths and steps.
  trained per minute   limit: trajectories in flight / their mean time at that concurrency
  in flight            time average over the cap, until the last group of the run was opened; limit: 1

Measured (not with --quick: a quarter of an hour). Two real runs, every part real (SGLang, trainer, sandboxes), one asynchronous and one synchronous: the same engine,
tasks in the same order and trained batches. The tests of a task sleep for its seeded time, log-uniform between 5 s and 50 s, as builds and test suites of real
tasks take time away from the engine; the engine's part of a trajectory and the training step are small beside it. So this compares schedules, not engines: on
a CPU an engine slows down with every trajectory, and overlap of computing would show what two cores can do and nothing else.
  trained per minute   between the ends of the first and of the last step but one, since engines start empty and run dry at the end
  in flight            time average over the cap, from when the cap was first reached until the last trajectory was started; limit: 1
  simulator            a run's schedule simulated with the times of that run (each trajectory's seconds in the order of their start; the means of
                       training and publishing), against what was measured; limit: what was measured, target: within 15 %
  at equal times       both schedules simulated with the times of the asynchronous run: what the machine did beside the two runs is out of this

Exit 1 where a target is missed.
"""

import argparse
import itertools
import math
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from miles.rollout.scheduler import Rules
from miles.rollout.simulator import Cluster, Outcome, Simulation
from tools.bench.table import figure, tell

SHORT, LONG, PER_ENGINE, GROUP = 30.0, 300.0, 16, 8
REAL_SHORT, REAL_LONG, REAL_STEPS, REAL_GROUPS, REAL_GROUP = 5.0, 50.0, 8, 8, 2
AGREE = 0.15
RUN_LIMIT_S = 1800.0


def speed(n: int) -> float:
    return 1 / (1 + n / 32)


def simulate(engines: int, steps: int, sync: bool):
    groups_per_step = engines * PER_ENGINE // GROUP  # one batch is what the engines hold at once: the best a synchronous schedule can do
    cluster = Cluster(engines, speed, lambda rng: SHORT * (LONG / SHORT) ** rng.random(), train_s=40.0, publish_s=5.0, pause_s=2.0,
                      groups_per_step=groups_per_step)
    rules = Rules(in_flight=engines * PER_ENGINE, group_size=GROUP, capacity_groups=4 * groups_per_step, total_groups=steps * groups_per_step,
                  groups_per_version=groups_per_step if sync else None, max_staleness=4)
    return rules, Simulation(rules, cluster).run()


def simulated(quick: bool) -> list[dict]:
    figures = []
    mean = (LONG - SHORT) / math.log(LONG / SHORT)
    for engines, steps in ((64, 12), (1024, 4 if quick else 12)):
        rules, ours = simulate(engines, steps, sync=False)
        _, theirs = simulate(engines, steps, sync=True)
        value, baseline = ours.per_minute(skip=1), theirs.per_minute(skip=1)
        limit = 60 * rules.in_flight / (mean / speed(PER_ENGINE))
        figures.append(figure(f"{engines} engines: trained", "trajectories/min", value, baseline, limit, least=2, of_ratio=True))
        share, base = (o.mean_in_flight(0.0, o.last_start) / rules.in_flight for o in (ours, theirs))
        figures.append(figure(f"{engines} engines: in flight over the cap", "", share, base, 1.0, least=0.95))
    return figures


# -- real runs ---------------------------------------------------------------------------------------------------------------
def make_tasks(folder: Path) -> None:
    """One task a group of the run. How long a task's tests take is stratified over the whole range, so that any few of them hold short and long ones."""
    count = REAL_STEPS * REAL_GROUPS
    seconds = [REAL_SHORT * (REAL_LONG / REAL_SHORT) ** ((i + 0.5) / count) for i in range(count)]
    random.Random(1).shuffle(seconds)
    for i, s in enumerate(seconds):
        task = folder / f"sleep-{i:03d}"
        for part in ("environment", "tests", "solution"):
            (task / part).mkdir(parents=True)
        (task / "task.toml").write_text(f'version = "1.0"\n[verifier]\ntimeout_sec = {4 * REAL_LONG:.0f}.0\n')
        (task / "instruction.md").write_text("List the files.\n")
        (task / "environment" / "a.txt").write_text("red\n")
        (task / "solution" / "solve.sh").write_text("ls\n")
        (task / "tests" / "test.sh").write_text(f"sleep {s:.2f}\n[ $((RANDOM % 2)) = 0 ] || exit 1\n")  # a reward that groups differ in


def real_run(folder: Path, mode: str, site: Path):
    """A whole run in `folder`; its tables. Raises RuntimeError when it does not finish."""
    from miles.cluster.local import started_local
    from miles.config import load_config
    from miles.models import prepare
    from miles.report.read import read_run
    from miles.rundir import RunDir

    config = load_config("configs/tiny_async.toml", (
        f"run.mode={mode}", f"run.root={folder}", f"run.name=bench_{mode}", f"run.steps={REAL_STEPS}", f"tasks.path={folder / 'tasks'}", f"cluster.site={site}",
        f"rollout.in_flight={REAL_GROUPS * REAL_GROUP}", f"rollout.group_size={REAL_GROUP}", "rollout.max_turns=1", "rollout.max_turn_tokens=8",
        f"buffer.capacity_groups={4 * REAL_GROUPS}", f"trainer.groups_per_step={REAL_GROUPS}", "trainer.layout.ep=1", "cluster.trainer.ranks_per_node=1",
        "cluster.trainer.gpus_per_node=1", "cluster.rollout.nodes=1", "engine.start_timeout_s=900", f"checkpoint.every_steps={REAL_STEPS}"))
    prepare(config)
    run = RunDir.create(config)
    with started_local(run) as process:
        deadline = time.monotonic() + RUN_LIMIT_S
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(1.0)
    if not run.finished:
        raise RuntimeError(f"the {mode} run did not finish:\n{(run.path / 'local.out').read_text()[-3000:]}")
    return read_run(run.path)


def middle_per_minute(ends, trained) -> float:
    """Trained trajectories per minute between the end of the first step and that of the last but one."""
    return 60 * sum(trained[1:-1]) / (ends[-2] - ends[0])


def share_in_flight(data) -> float:
    """Time average of the trajectories in flight, over the cap, from when it was first reached until the last trajectory was started."""
    played, cap = data.tables["trajectories"], data.config.rollout.in_flight
    ends, starts = played["time"], played["time"] - played["seconds"]
    first, last = sorted(starts)[cap - 1], starts.max()
    inside = ends.clip(first, last) - starts.clip(first, last)
    return float(inside.sum() / (last - first) / cap)


def replay(data, sync: bool) -> Outcome:
    """The schedule simulated with the times that a run took."""
    steps, played, weights = data.tables["steps"], data.tables["trajectories"], data.tables["weights"]
    ok = played["status"] == "ok"
    order = (played["time"] - played["seconds"])[ok].argsort()
    work = itertools.cycle(played["seconds"][ok][order].tolist())
    after_first = weights["version"] > weights["version"].min()
    cluster = Cluster(1, lambda n: 1.0, lambda rng: next(work), train_s=float(sum(steps[k].mean() for k in ("fetch_s", "train_s", "publish_s"))),
                      publish_s=float((steps["published_s"] - steps["publish_s"]).clip(0).mean() + weights["total_s"][after_first].mean()),
                      groups_per_step=REAL_GROUPS)
    rules = Rules(in_flight=data.config.rollout.in_flight, group_size=REAL_GROUP, capacity_groups=data.config.buffer.capacity_groups,
                  total_groups=REAL_STEPS * REAL_GROUPS, groups_per_version=REAL_GROUPS if sync else None,
                  max_staleness=data.config.buffer.max_staleness, seed=data.config.run.seed)
    return Simulation(rules, cluster).run()


def measured(site: Path) -> list[dict]:
    rates, simulated, took = {}, {}, {}
    with tempfile.TemporaryDirectory(prefix="miles-bench-async-") as folder:
        make_tasks(Path(folder) / "tasks")
        runs = {mode: real_run(Path(folder), mode, site) for mode in ("async", "sync")}
    for mode, data in runs.items():
        steps, played = data.tables["steps"], data.tables["trajectories"]
        rates[mode] = middle_per_minute(steps["time"], steps["trajectories"])
        out = replay(data, sync=mode == "sync")
        simulated[mode] = middle_per_minute(out.step_ends, out.trained)
        ok = played["status"] == "ok"
        seconds = played["seconds"][ok]
        took[mode] = {"trajectory_min_mean_max_s": [float(seconds.min()), float(seconds.mean()), float(seconds.max())], "engine_s": float(played["engine_s"][ok].mean()),
                      "train_s": float(steps["train_s"].mean()), "step_ends_s": [round(float(t - steps["time"][0])) for t in steps["time"]]}
    mean = float(runs["async"].tables["trajectories"]["seconds"].mean())
    limit, unit = 60 * REAL_GROUPS * REAL_GROUP / mean, "trajectories/min"
    out = replay(runs["async"], sync=True)
    return [
        figure("real engine: trained", unit, rates["async"], rates["sync"], limit, least=2, of_ratio=True),
        figure("real engine: in flight over the cap", "", share_in_flight(runs["async"]), share_in_flight(runs["sync"]), 1.0, least=0.95),
        *(figure(f"real engine, {mode}: simulator", unit, simulated[mode], rates[mode], rates[mode], within=AGREE, **took[mode]) for mode in runs),
        figure("real engine, at equal times", unit, simulated["async"], middle_per_minute(out.step_ends, out.trained), limit, least=2, of_ratio=True),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="simulations alone, with fewer steps at 1,024 engines")
    parser.add_argument("--site", type=Path, default=Path("configs/sites/dev.toml"), help="site profile of the real runs")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    figures = simulated(args.quick) + ([] if args.quick else measured(args.site.absolute()))
    return tell("async", figures, args.json)


if __name__ == "__main__":
    sys.exit(main())
