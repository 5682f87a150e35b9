"""The job script and the command lines of its steps, as text."""

import re
import subprocess
from pathlib import Path

import pytest

from miles.cluster.launch import rank_environment, slurm_argv
from miles.cluster.render import render_job
from miles.config import SiteConfig, load_config, load_site
from miles.core import ConfigError, Role

TINY = "configs/tiny_async.toml"


@pytest.mark.parametrize("job", sorted(Path("jobs").glob("*.sbatch")), ids=lambda p: p.stem)
def test_job_files_are_what_render_prints(job):
    config = load_config(f"configs/{job.stem}.toml")
    assert job.read_text() == render_job(config, f"configs/{job.stem}.toml", load_site(config.cluster.site)), (
        f"miles-submit render configs/{job.stem}.toml > {job}")


def test_every_run_config_has_its_job_file():
    assert {p.stem for p in Path("configs").glob("*.toml")} == {p.stem for p in Path("jobs").glob("*.sbatch")}


def components(text: str) -> list[dict[str, str]]:
    return [dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", part, re.M)) for part in text.split("#SBATCH hetjob\n")]


def test_options_stand_in_both_components():
    site = SiteConfig(account="acc", partition="gpu", qos="high", sbatch=("--exclusive",))
    config = load_config(TINY, ("cluster.rollout.memory_gb=64", "cluster.signal_before_s=90"))
    trainer, rollout = components(render_job(config, TINY, site))
    common = {"account": "acc", "partition": "gpu", "qos": "high", "exclusive": "", "requeue": "", "time": "00:30:00", "signal": "B:USR2@90"}
    assert trainer == {**common, "job-name": "tiny_async", "output": "slurm-%j.out", "open-mode": "append", "nodes": "1", "ntasks-per-node": "2",
                       "cpus-per-task": "1", "gpus-per-node": "2"}
    assert rollout == {**common, "nodes": "2", "ntasks-per-node": "1", "cpus-per-task": "1", "gpus-per-node": "1", "mem": "61035M"}


def test_script_is_valid_bash_and_no_sbatch_line_comes_after_a_command(tmp_path):
    text = render_job(load_config(TINY), TINY, SiteConfig(setup=("module load mpi",), srun_prefix=("apptainer", "exec", "x.sif")))
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    lines = text.splitlines()
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert lines[first_command] == "module load mpi"
    assert not any(line.startswith("#SBATCH") for line in lines[first_command:])


def test_a_path_that_a_shell_would_read_is_refused():
    with pytest.raises(ConfigError, match="shell"):
        render_job(load_config(TINY), "configs/my run.toml", SiteConfig())


def test_srun_spells_out_the_sizes_of_its_own_component(tmp_path):
    config = load_config("configs/glm52_async.toml")
    argv = slurm_argv(config, SiteConfig(mpi="pmix", python="/env/bin/python", srun_prefix=("box", "run")), Role.ROLLOUT, Path("/runs/x"), "miles.rollout")
    assert argv == ["srun", "--het-group=1", "--mpi=pmix", "--kill-on-bad-exit=1", "--export=ALL", "--job-name=rollout", "--nodes=8", "--ntasks=8",
                    "--ntasks-per-node=1", "--cpus-per-task=64", "--gpus-per-node=4", "box", "run", "/env/bin/python", "-m", "miles.cluster.rank",
                    "/runs/x", "miles.rollout"]


def test_rank_environment_names_attempt_epoch_and_token():
    env = rank_environment(Path("/runs/x"), SiteConfig(env={"A": "b"}), "slurm", Role.TRAINER, 2, 7)
    assert env == {"A": "b", "MILES_ATTEMPT": "2", "MILES_EPOCH": "7", "MILES_ROLE": "trainer", "MILES_LAUNCHER": "slurm", "MILES_TOKEN_FILE": "/runs/x/token"}


def test_shared_gpus_are_one_job_with_room_for_both_steps():
    config = load_config("configs/tiny_colocated.toml", ("cluster.trainer.memory_gb=10", "cluster.rollout.memory_gb=20", "cluster.rollout.cpus_per_rank=3",
                                                         "cluster.trainer.nodes=3", "cluster.rollout.nodes=3"))
    (job,) = components(render_job(config, "configs/tiny_colocated.toml", SiteConfig(account="acc")))
    # 2 trainer ranks with 1 core, 2 rollout ranks with 3; 30 GB
    assert {k: job[k] for k in ("nodes", "ntasks-per-node", "cpus-per-task", "gpus-per-node", "mem", "account")} == {
        "nodes": "3", "ntasks-per-node": "1", "cpus-per-task": "8", "gpus-per-node": "2", "mem": "28610M", "account": "acc"}


def test_steps_on_shared_gpus_overlap():
    config = load_config("configs/tiny_colocated.toml")
    for role in Role:
        argv = slurm_argv(config, SiteConfig(python="/env/bin/python"), role, Path("/runs/x"), "m")
        assert argv[1] == "--overlap" and "--gpus-per-node=2" in argv and "--ntasks=2" in argv and not any(a.startswith("--het-group") for a in argv)
