"""`python -m miles.cluster.start CONFIG [--set KEY=VALUE ...] [--run RUN]`: print the run directory of this job.

First start: checks what can be checked at once, makes the model when a recipe can, creates the run directory. After a requeue (or
with --run): the one it had. A job is known by cluster and id, ROOT/jobs/<cluster>-<id>, because ids begin again on a new cluster.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from miles.config import MilesConfig, load_config
from miles.core import ConfigError, MilesError, Role
from miles.rundir import RunDir, publish_bytes


def find_or_create(config_path: str, overrides: tuple[str, ...], run: str | None, env: Mapping[str, str]) -> RunDir:
    """The run directory that this job works in. Raises ConfigError, also when the job has other sizes than the config."""
    if run:
        found = RunDir(run)
    else:
        config = load_config(config_path, overrides)
        note = Path(config.run.root) / "jobs" / f"{env.get('SLURM_CLUSTER_NAME', 'local')}-{env.get('SLURM_JOB_ID', os.getpid())}"
        if int(env.get("SLURM_RESTART_COUNT", "0")) and note.is_file():
            found = RunDir(note.read_text())
        else:
            check_sizes(config, env)
            found = create_run(config)
            note.parent.mkdir(exist_ok=True)
            publish_bytes(note, str(found.path).encode())
    check_sizes(found.config, env)
    if "SLURM_JOB_ID" in env:
        note_job(found.path, env["SLURM_JOB_ID"])
    return found


def create_run(config: MilesConfig) -> RunDir:
    """Everything a first start needs: model made or present, run directory."""
    from miles.models import prepare  # slow imports, needed only here

    prepare(config)
    return RunDir.create(config)


def note_job(folder: Path, job_id: str) -> None:
    """Which Slurm job works on the run, or is the pool, whose folder this is: for status, cancel and logs."""
    publish_bytes(folder / "job.json", json.dumps({"job_id": job_id}).encode())


def check_sizes(config: MilesConfig, env: Mapping[str, str]) -> None:
    """A config edited after its job file was rendered would wait for ranks that never come."""
    if "SLURM_HET_SIZE" not in env:
        return
    for group, (role, c) in enumerate(((Role.TRAINER, config.cluster.trainer), (Role.ROLLOUT, config.cluster.rollout))):
        for what, want, name in (("tasks", c.ranks, "NTASKS"), ("nodes", c.nodes, "JOB_NUM_NODES")):
            have = env.get(f"SLURM_{name}_HET_GROUP_{group}")
            if have is not None and int(have) != want:
                raise ConfigError(f"the job has {have} {what} for the {role}, the config asks for {want}", "a job file rendered from this config",
                                  "render it again: miles-submit render CONFIG > jobs/NAME.sbatch (or use `miles-submit submit`)")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m miles.cluster.start", description=__doc__.split("\n")[0])
    parser.add_argument("config")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override one option of the config")
    parser.add_argument("--run", help="go on with this run directory")
    args = parser.parse_args()
    out = os.dup(1)
    os.dup2(2, 1)  # the run directory is the only thing on stdout, whatever libraries print
    try:
        run = find_or_create(args.config, tuple(args.set), args.run, os.environ)
    except MilesError as e:
        print(e, file=sys.stderr)
        return e.exit_code
    os.write(out, f"{run.path}\n".encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
