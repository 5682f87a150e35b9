#!/usr/bin/env -S sh -c 'exec "$(dirname "$0")/../../.venv/bin/python" "$0" "$@"'
"""Asynchronous against synchronous schedule, simulated at 64 and 1,024 engines. [--quick] [--json]

The scheduler, the buffer's state and the choice of groups are those of a run (miles/rollout/simulator.py); what takes time is a model: 16 trajectories an
engine, log-uniform between 30 s and 300 s of work, which n that run together get at 1 / (1 + n / 32) of full speed each; one group of 8 per two engines
and step, training 40 s, publishing 5 s, 2 s of pause. Baseline: the synchronous schedule on the same engines, lengths and steps.
  trained per minute   limit: trajectories in flight / their mean time at that concurrency
  in flight            time average over the cap, until the last group of the run was opened; limit: 1
Exit 1 where a target is missed. Times on real engines are not part of this bench yet.
"""

import argparse
import json
import math
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from miles.rollout.scheduler import Rules
from miles.rollout.simulator import Cluster, Simulation

SHORT, LONG, PER_ENGINE, GROUP = 30.0, 300.0, 16, 8


def speed(n: int) -> float:
    return 1 / (1 + n / 32)


def simulate(engines: int, steps: int, sync: bool):
    groups_per_step = engines * PER_ENGINE // GROUP  # one batch is what the engines hold at once: the best a synchronous schedule can do
    cluster = Cluster(engines, speed, lambda rng: SHORT * (LONG / SHORT) ** rng.random(), train_s=40.0, publish_s=5.0, pause_s=2.0,
                      groups_per_step=groups_per_step, max_staleness=4)
    rules = Rules(in_flight=engines * PER_ENGINE, group_size=GROUP, capacity_groups=4 * groups_per_step, total_groups=steps * groups_per_step,
                  groups_per_version=groups_per_step if sync else None)
    return rules, Simulation(rules, cluster).run()


def figure(name, value, baseline, limit, target, ok) -> dict:
    return {"figure": name, "value": value, "baseline": baseline, "ratio": value / baseline if baseline else None, "limit": limit, "target": target, "ok": bool(ok)}


def measure(quick: bool) -> list[dict]:
    figures = []
    mean = (LONG - SHORT) / math.log(LONG / SHORT)
    for engines, steps in ((64, 12), (1024, 4 if quick else 12)):
        rules, ours = simulate(engines, steps, sync=False)
        _, theirs = simulate(engines, steps, sync=True)
        value, baseline = ours.per_minute(skip=1), theirs.per_minute(skip=1)
        limit = 60 * rules.in_flight / (mean / speed(PER_ENGINE))
        figures.append(figure(f"{engines} engines: trained trajectories/min", value, baseline, limit, 2 * baseline, value >= 2 * baseline))
        share, base = (o.mean_in_flight(0.0, o.last_start) / rules.in_flight for o in (ours, theirs))
        figures.append(figure(f"{engines} engines: in flight over the cap", share, base, 1.0, 0.95, share >= 0.95))
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps at 1,024 engines")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    figures = measure(args.quick)
    if args.json:
        print(json.dumps({"bench": "async", "cpus": os.cpu_count(), "figures": figures}))
    else:
        print(f"{'figure':44} {'async':>10} {'sync':>10} {'ratio':>6} {'limit':>10} {'target':>10}")
        for f in figures:
            print(f"{f['figure']:44} {f['value']:>10,.2f} {f['baseline']:>10,.2f} {f['ratio']:>6.2f} {f['limit']:>10,.2f} {f['target']:>10,.2f}"
                  + ("" if f["ok"] else "  MISSED"))
    return 0 if all(f["ok"] for f in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
