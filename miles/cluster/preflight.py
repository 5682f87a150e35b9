"""What can be known to fail before a job waits in a queue. Each check is a small function that returns a Finding.

Status: `ok`; `warn` = could not be known here, or matters only elsewhere; `fail` = the run would fail. What this machine lacks is a `warn`
for `miles-submit check` (a config for 64 GPUs is checked on a laptop) and a `fail` where the run is about to start.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from miles.cluster import launch, slurm
from miles.config import MilesConfig, SiteConfig
from miles.config.memory import Plan, draft_plan
from miles.config.precision import folder_problems, high_precision, is_quantized
from miles.config.shape import find_hf_config
from miles.core import ConfigError, EnvironmentFault, MilesError
from miles.core.functions import load_function
from miles.engine.params import read_parameters
from miles.rundir import publish_bytes

OLDEST_SLURM = (22, 5)
LEAST_FREE_GB = 2.0


@dataclass(frozen=True)
class Finding:
    name: str
    status: str  # ok | warn | fail
    text: str
    exit_code: int = 0  # of a `fail`: 2 configuration, 3 environment

    def to_json(self) -> dict:
        return asdict(self)


Check = Callable[[MilesConfig, SiteConfig], str]


def preflight(config: MilesConfig, site: SiteConfig, launcher: str | None = None, *, pool: bool = False, run: str = "") -> list[Finding]:
    """Run all checks. `launcher` None: the machine may be another one than the run's; `slurm` or `local`: it starts from here. `pool`: `config` is that of
    a pool, which has no trainer. `run`: name of the run directory that goes on."""
    away, cannot_see_nodes = launcher is None, launcher != "local"
    checks: list[tuple[str, Check, bool]] = [  # name, check, whether it may be wrong about the run's own machine
        ("memory", memory, False), ("functions", functions, away), ("tasks", tasks, False),
        ("model", model, away), ("precision", precision, away), ("template", template, False), ("run root", run_root, away), ("python", python, away),
        ("sandbox", sandbox, away)]
    if config.tasks.kind == "harness":
        checks.append(("harness", harness, away))
    if config.trainer.on_disk and not pool:
        checks.append(("state folder", partial(state_folder, run=run, nodes=config.cluster.trainer.nodes if launcher == "local" else 1), cannot_see_nodes))
    if launcher != "local":
        checks += [("slurm", slurm_version, away), ("slurm nodes", slurm_pool_nodes if pool else slurm_nodes, away), ("slurm mpi", slurm_mpi, away)]
    if launcher != "slurm":
        checks += [("mpi world", local_world, away)]
    findings: list[Finding] = []
    for name, check, lenient in checks:
        if name.startswith("slurm ") and any(f.name == "slurm" and f.status != "ok" for f in findings):
            continue  # no Slurm here: once is enough
        findings.append(_run(name, check, config, site, lenient))
    return findings


def refuse(findings: list[Finding]) -> None:
    """Raise the first failure's kind of error with every failure's text."""
    failed = [f for f in findings if f.status == "fail"]
    if failed:
        kind = ConfigError if any(f.exit_code == 2 for f in failed) else EnvironmentFault
        raise kind("preflight found what would fail:\n" + "\n".join(f"  {f.name}: {f.text}" for f in failed), "every check to pass", "mend the lines above")


def _run(name: str, check: Check, config: MilesConfig, site: SiteConfig, lenient: bool) -> Finding:
    try:
        text = check(config, site)
        return Finding(name, "ok", text)
    except Unknown as e:
        return Finding(name, "warn", str(e))
    except MilesError as e:
        return Finding(name, "warn", str(e)) if lenient else Finding(name, "fail", str(e), 2 if e.exit_code == 2 else 3)


class Unknown(Exception):
    """A check that cannot say anything here."""


def plan_of(config: MilesConfig, site: SiteConfig) -> Plan | None:
    """Memory plan, problems included; None while the model that a recipe makes is not there. Raises ConfigError for an impossible layout."""
    if config.model.recipe != "none" and not (Path(config.model.path) / "config.json").is_file():
        return None
    return draft_plan(config, site)


def printable_plan(config: MilesConfig, site: SiteConfig) -> Plan | None:
    """The plan to show, also one that does not fit: its table says where the memory goes. None where a layout has none; the finding `memory` says why."""
    try:
        return plan_of(config, site)
    except ConfigError:
        return None


# -- configuration -----------------------------------------------------------------------------------------------------------
def memory(config: MilesConfig, site: SiteConfig) -> str:
    plan = plan_of(config, site)
    if plan is None:
        raise Unknown(f"{config.model.path} is not made yet (recipe {config.model.recipe}): no memory plan")
    if plan.problems:
        raise ConfigError("\n".join(plan.problems), "a plan that fits every GPU", "change the keys named above")
    if not config.cluster.trainer.gpus_per_node:
        return "no GPUs asked for"
    worst = max(s.total_gb for s in plan.stages)
    return f"trainer rank at most {worst:.1f} GB, engine GPU {plan.engine.total_gb:.1f} GB, of {site.gpu_memory_gb:g} GB"


def functions(config: MilesConfig, site: SiteConfig) -> str:
    """A misspelt one would be noticed by the first group that is sealed, or the first step."""
    named = {"rollout.replay": config.rollout.replay, "buffer.filter": config.buffer.filter, "buffer.order": config.buffer.order, "algorithm.name": config.algorithm.name,
             "tasks.reward": config.tasks.reward, "algorithm.advantage": config.algorithm.advantage}
    users = {option: name for option, name in named.items() if "." in name}
    for option, name in users.items():
        load_function(option, name, ["its named values (docs/config.md)"], "a function")
    return ", ".join(f"{option} = {name}" for option, name in users.items()) or "none of your own"


def tasks(config: MilesConfig, site: SiteConfig) -> str:
    from miles.env.tasks import load_tasks  # asyncio and sandbox code, needed only here

    return f"{len(load_tasks(config.tasks.path))} tasks in {config.tasks.path}"


# -- machine -----------------------------------------------------------------------------------------------------------------
def model(config: MilesConfig, site: SiteConfig) -> str:
    path, a = Path(config.model.path), config.algorithm
    for option, other in (("algorithm.reference", a.reference), ("algorithm.critic.path", a.critic.path if a.critic else None)):
        if other is not None and not (Path(other) / "config.json").is_file():
            raise ConfigError(f"{option}: no model at {other}", "a Hugging Face folder with config.json", f"put it there, or correct {option}")
    if (path / "config.json").is_file():
        return f"{path} is there"
    if config.model.recipe == "none":
        raise ConfigError(f"no model at {path}", "a Hugging Face folder with config.json", "put it there, correct model.path, or set model.recipe")
    return f"{path} will be made by the recipe {config.model.recipe}"


def precision(config: MilesConfig, site: SiteConfig) -> str:
    """What the trainer will send is what the engines' folder has, tensor by tensor."""
    m = config.model
    if m.rollout_path is None:
        return f"trainer {m.trainer_precision}, rollout {m.rollout_precision}"
    patterns = high_precision(find_hf_config(config)["model_type"], m.high_precision)
    source = {name: p.shape for name, p in read_parameters(m.path).items()}
    found = folder_problems(source, read_parameters(m.rollout_path), m.rollout_precision, patterns)
    if found:
        raise ConfigError(f"{m.rollout_path} and {m.path}: " + "; ".join(found[:5]) + (f"; and {len(found) - 5} more" if found[5:] else ""),
                          f"the tensors of model.path in {m.rollout_precision}, but for {', '.join(patterns)}",
                          "make the folder with tools/quantize_model and the patterns of model.high_precision")
    quantized = sum(is_quantized(n, s, patterns) for n, s in source.items())
    return f"trainer {m.trainer_precision}, rollout {m.rollout_precision}: {quantized} tensors quantized, {len(source) - quantized} in high precision"


def template(config: MilesConfig, site: SiteConfig) -> str:
    """The chat template is append-only under the boundary rule, proven on synthetic conversations."""
    if not (Path(config.model.path) / "config.json").is_file():
        raise Unknown(f"{config.model.path} is not there: its chat template cannot be tried")
    from miles.session import (  # transformers: seconds of imports
        ChatTokenizer,
        load_replay,
        verify,
    )

    load_replay(config.rollout.replay)
    chat = ChatTokenizer.from_folder(config.model.path, config.model.boundary)
    return f"append-only on {verify(chat)} conversations, boundary rule {chat.boundary.name}"


def run_root(config: MilesConfig, site: SiteConfig) -> str:
    """A canary on the shared file system: publish (write, fsync, rename), read back, free space."""
    root = Path(config.run.root).absolute()
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise EnvironmentFault(f"run.root {root} cannot be made: {e.strerror}", "a writable folder", "change run.root") from e
    canary = root / f".canary.{os.getpid()}"
    data = os.urandom(4096)
    try:
        publish_bytes(canary, b"old")
        publish_bytes(canary, data)  # rename over an existing file must replace it
        if canary.read_bytes() != data:
            raise EnvironmentFault(f"{root}: a renamed file did not replace the old one", "atomic rename", "use another file system for run.root")
    finally:
        canary.unlink(missing_ok=True)
    free = shutil.disk_usage(root).free / 1e9
    if free < LEAST_FREE_GB:
        raise EnvironmentFault(f"{root} has {free:.1f} GB free", f">= {LEAST_FREE_GB:g} GB", "free space or move run.root")
    return f"{root}: publish works, {free:.0f} GB free"


def state_folder(config: MilesConfig, site: SiteConfig, run: str = "", nodes: int = 1) -> str:
    """The trainer's state on disk can lie where the config says: what a trainer rank asks of its own node when it starts (miles.optim), for all ranks of `nodes`
    nodes at once, which are this machine. What the run `run` left there is given back then."""
    from miles.optim import check_folder, folder_of, left_by  # torch: seconds

    plan, base = printable_plan(config, site), Path(config.trainer.optimizer.state_dir or site.scratch)
    need = plan.disk_per_node_gb * nodes if plan else 0.0
    left = left_by(folder_of(base, run)) if run else 0
    found = check_folder(base, need * 1e9 - left, network=config.trainer.optimizer.state_on_network)
    if plan is None:
        raise Unknown(f"{found}; how much a node needs is not known, because there is no memory plan")
    return f"{found}, {need:.3g} GB needed"


def python(config: MilesConfig, site: SiteConfig) -> str:
    """The interpreter of the ranks finds what they import (found, not imported: seconds instead of a minute)."""
    path = launch.interpreter(site)
    if not os.access(path, os.X_OK):
        raise EnvironmentFault(f"site.python {path} is no executable", "the Python of the project's environment", "run tools/env, or correct site.python")
    code = "import importlib.util as u; print(' '.join(m for m in ('miles','mpi4py','torch','sglang','megatron.core','h5py') if not u.find_spec(m)))"
    done = subprocess.run([path, "-c", code], capture_output=True, text=True, timeout=60)
    if done.returncode or done.stdout.strip():
        raise EnvironmentFault(f"{path} lacks {done.stdout.strip() or done.stderr.strip()[-300:]}", "every package of the environment", "run tools/env")
    return f"{path} has every package"


def sandbox(config: MilesConfig, site: SiteConfig) -> str:
    from miles.env.sandbox import Sandbox

    sandbox = Sandbox(site.sandbox if config.tasks.sandbox == "confined" else config.tasks.sandbox, site.sandbox_image, Path(site.scratch))
    asyncio.run(sandbox.check())
    return f"{sandbox.kind} runs a command" + "".join(f"; not bounded: {gap}" for gap in sandbox.backend.gaps)


def harness(config: MilesConfig, site: SiteConfig) -> str:
    from miles.env.harness import Harness

    program = asyncio.run(Harness.from_config(config, site).check())
    return f"the sandbox has {program} and what is mounted"


# -- Slurm -------------------------------------------------------------------------------------------------------------------
def slurm_version(config: MilesConfig, site: SiteConfig) -> str:
    found = slurm.version()
    if found < OLDEST_SLURM:
        raise EnvironmentFault(f"Slurm {found[0]}.{found[1]:02d}", f"{OLDEST_SLURM[0]}.{OLDEST_SLURM[1]:02d} or newer (het jobs with --signal and requeue)", "ask the site")
    slurm.command(["scontrol", "ping"])
    return f"Slurm {found[0]}.{found[1]:02d} answers"


def slurm_nodes(config: MilesConfig, site: SiteConfig) -> str:
    """The partition exists and has enough nodes with enough GPUs (whether they are free is the queue's business)."""
    c = config.cluster
    wanted = c.trainer.nodes if c.placement == "shared" else c.trainer.nodes + c.rollout.nodes
    return _fitting_nodes(site, wanted, max(c.trainer.gpus_per_node, c.rollout.gpus_per_node))


def slurm_pool_nodes(config: MilesConfig, site: SiteConfig) -> str:
    return _fitting_nodes(site, config.cluster.rollout.nodes, config.cluster.rollout.gpus_per_node)


def _fitting_nodes(site: SiteConfig, wanted: int, need: int) -> str:
    partition = [f"--partition={site.partition}"] if site.partition else []
    nodes = parse_nodes(slurm.command(["sinfo", "--noheader", "--Node", "--format=%N|%G|%P", *partition]).stdout, default=not partition)
    if not nodes:
        raise EnvironmentFault(f"partition {site.partition or '(default)'} has no nodes", "a partition with nodes", "correct site.partition (sinfo -s)")
    fit = sum(gpus >= need for gpus in nodes.values())
    if fit < wanted:
        raise EnvironmentFault(f"{fit} nodes with {need} GPUs in partition {site.partition or '(default)'}", f">= {wanted}",
                               "lower cluster.*.nodes or gpus_per_node, or choose another partition")
    return f"{fit} nodes with {need} or more GPUs, {wanted} asked for"


def parse_nodes(text: str, default: bool) -> dict[str, int]:
    """Node name -> GPUs, from sinfo's `%N|%G|%P`. With `default` only rows of the default partition (marked by `*`)."""
    nodes = {}
    for line in text.splitlines():
        name, gres, partition = line.split("|")
        if not default or partition.endswith("*"):
            nodes[name] = sum(int(n) for n in re.findall(r"gpu(?::[^:,()]+)?:(\d+)", gres))
    return nodes


def slurm_mpi(config: MilesConfig, site: SiteConfig) -> str:
    done = slurm.command(["srun", "--mpi=list"])
    plugins = re.findall(r"^\s+(\w+)\s*$", done.stdout + done.stderr, re.MULTILINE)
    if site.mpi not in plugins and not any(p.startswith(site.mpi) for p in plugins):
        raise EnvironmentFault(f"site.mpi = {site.mpi}, this Slurm has {', '.join(plugins)}", "one of these, fitting mpi4py's library", "correct site.mpi")
    return f"srun --mpi={site.mpi}"


def local_world(config: MilesConfig, site: SiteConfig) -> str:
    """Two ranks see each other: an mpiexec of another MPI than mpi4py's gives every rank a world of size 1."""
    argv = launch.local_argv(config, launch.Role.TRAINER, Path(), "")
    program = [*argv[:argv.index("-n")], "-n", "2", argv[argv.index("-n") + 2], "-c", "from mpi4py import MPI; print(f'<{MPI.COMM_WORLD.size}>')"]
    if not Path(program[0]).is_file():
        raise EnvironmentFault(f"no {program[0]}", "mpich in the environment", "run tools/env")
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, env=slurm.scrubbed(os.environ))
    sizes = re.findall(r"<(\d+)>", done.stdout)  # the two lines may be mixed
    if sizes != ["2", "2"]:
        raise EnvironmentFault(f"two ranks under {program[0]} see worlds of size {sizes or done.stderr.strip()[-300:]}", "2 and 2",
                               "install mpi4py and mpich as tools/requirements-cpu.txt pins them")
    return "two ranks see a world of size 2"
