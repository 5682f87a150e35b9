"""The commands of `miles-submit`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from miles.core import MilesError

CONFIG = click.argument("config", type=click.Path(path_type=Path))
RUN = click.argument("run", default="latest")
SET = click.option("--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Override one option of the config; may be repeated.")
SCALE = click.option("--scale", type=click.Choice(["dev"]), help="dev: rehearse a production CONFIG on the development cluster: its job script and schedule, "
                     "few nodes, parallel sizes of at most 2, a tiny model.")
JSON = click.option("--json", "as_json", is_flag=True, help="Print data for programs.")

console = Console(highlight=False)


class Commands(click.Group):
    """Errors that Miles raises on purpose end as their text on stderr and their exit code: 2 configuration, 3 environment, 1 other."""

    def invoke(self, ctx: click.Context):
        try:
            return super().invoke(ctx)
        except MilesError as e:
            click.echo(e, err=True)
            ctx.exit(e.exit_code)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # in the order of a run's life


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="miles")
def main() -> None:
    """Reinforcement-learning runs as Slurm jobs.

    \b
      miles-submit check configs/tiny_async.toml
      miles-submit submit configs/tiny_async.toml --follow
      miles-submit report latest

    RUN is a run directory, its name below runs/, or a Slurm job id; without it the newest run is meant.

    Exit codes: 0 done, 2 the configuration cannot work, 3 the environment does not deliver, 1 anything else.

    Completion of the shell: eval "$(_MILES_SUBMIT_COMPLETE=bash_source miles-submit)" (or zsh_source, fish_source).
    """


@main.command()
@CONFIG
@SET
def render(config: Path, overrides: tuple[str, ...]) -> None:
    """Print the sbatch script of CONFIG.

    \b
      miles-submit render configs/tiny_async.toml > jobs/tiny_async.sbatch
    """
    from miles.cluster.render import render_job
    from miles.config import load_config, load_site

    loaded = load_config(config, overrides)
    click.echo(render_job(loaded, config, load_site(loaded.cluster.site)), nl=False)


@main.command()
@CONFIG
@SET
@JSON
def check(config: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Check CONFIG, and this machine as far as it matters; prints the memory plan per GPU.

    What only the run's own machine can tell is a warning here and an error in `submit` and `local`.

    \b
      miles-submit check configs/glm52_async.toml --json
    """
    from miles.cluster.preflight import preflight, printable_plan
    from miles.config import load_config, load_site

    loaded = load_config(config, overrides)
    site = load_site(loaded.cluster.site)
    findings = preflight(loaded, site)
    plan = printable_plan(loaded, site)
    if as_json:
        click.echo(json.dumps({"config": str(config), "ok": all(f.status != "fail" for f in findings), "findings": [f.to_json() for f in findings],
                               "memory": plan and plan.to_json()}, indent=1))
    else:
        _print_findings(findings)
        if plan:
            click.echo(plan.table())
    sys.exit(max((f.exit_code for f in findings), default=0))


@main.command()
@CONFIG
@SET
@click.option("--tokens", type=click.IntRange(1), help="Mean length of a trajectory (default: rollout.max_session_tokens, the longest).")
@click.option("--density", type=click.FloatRange(0, 1, min_open=True), default=0.01, show_default=True,
              help="Share of the weights that a step changes, for patches on disk.")
@JSON
def plan(config: Path, overrides: tuple[str, ...], tokens: int | None, density: float, as_json: bool) -> None:
    """Print what CONFIG costs: memory per GPU, and the shortest time that a training step can take on the site's hardware, term by term.

    Nothing is checked on this machine. Exit code 2 when a GPU or a disk cannot hold its part.

    \b
      miles-submit plan configs/glm52_async.toml
      miles-submit plan configs/glm52_async.toml --tokens 20000 --set trainer.optimizer.state=resident
    """
    from miles.config import load_config, load_site
    from miles.config.floor import step_floor
    from miles.config.memory import draft_plan

    loaded = load_config(config, overrides)
    site = load_site(loaded.cluster.site)
    memory, floor = draft_plan(loaded, site), step_floor(loaded, site, tokens, density)
    if as_json:
        click.echo(json.dumps({"config": str(config), "memory": memory.to_json(), "step_floor": floor.to_json()}, indent=1))
    else:
        click.echo(f"{memory.table()}\n\n{floor.table()}")
    sys.exit(2 if memory.problems else 0)


@main.command()
@CONFIG
@SET
def prepare(config: Path, overrides: tuple[str, ...]) -> None:
    """Make what CONFIG needs before its first start: the model folder, when it has a recipe.

    \b
      miles-submit prepare configs/tiny_async.toml
    """
    from miles.config import load_config
    from miles.models import prepare as prepare_model

    click.echo(f"model: {prepare_model(load_config(config, overrides))}")


@main.command()
@CONFIG
@SET
@SCALE
@click.option("--follow", "watch", is_flag=True, help="Show the run until it ends; its outcome is the exit code.")
@click.option("--wait", is_flag=True, help="Say nothing until the run ends; its outcome is the exit code.")
@JSON
def submit(config: Path, overrides: tuple[str, ...], scale: str | None, watch: bool, wait: bool, as_json: bool) -> None:
    """Check CONFIG, make its run directory and queue its job.

    \b
      miles-submit submit configs/tiny_async.toml --follow
      miles-submit submit configs/tiny_async.toml --set run.steps=5 --json
      miles-submit submit configs/glm52_async.toml --scale dev --follow
    """
    from miles.cluster.start import create_run

    run = create_run(_checked(config, overrides, scale, "slurm"))
    _queue(run, config, watch, wait, as_json)


@main.command()
@CONFIG
@SET
@SCALE
@click.option("--follow", "watch", is_flag=True, help="Show progress instead of the supervisor's messages.")
def local(config: Path, overrides: tuple[str, ...], scale: str | None, watch: bool) -> None:
    """Run CONFIG on this machine without Slurm, in the foreground; Ctrl-C stops it.

    \b
      miles-submit local configs/tiny_async.toml --follow
    """
    from miles.cluster.start import create_run

    run = create_run(_checked(config, overrides, scale, "local"))
    click.echo(f"run: {run.path}")
    _run_here(run, watch)


@main.command()
@RUN
@click.option("--nodes", type=int, required=True, help="Nodes of the pool, each set up like a rollout node of the run.")
@click.option("--in-flight", type=int, help="Trajectories at once in this pool (default: as many for each engine as in the run).")
@click.option("--time-limit", metavar="[D-]HH:MM:SS", help="Slurm time limit (default: cluster.time_limit of the run).")
@click.option("--local", "here", is_flag=True, help="Without Slurm, on this machine, in the foreground; Ctrl-C ends the pool.")
@click.option("--dry-run", is_flag=True, help="Print the job's script and submit nothing.")
@click.option("--follow", "watch", is_flag=True, help="Show the run until the pool ends; its outcome is the exit code.")
@JSON
def attach(run: str, nodes: int, in_flight: int | None, time_limit: str | None, here: bool, dry_run: bool, watch: bool, as_json: bool) -> None:
    """Add a pool of further rollout nodes to RUN, as a Slurm job of its own.

    The pool works through the run directory alone: it may start, be preempted and end at any time, and nothing is lost. It ends with the run.

    \b
      miles-submit attach latest --nodes 4
      miles-submit attach 4711 --nodes 2 --time-limit 04:00:00 --in-flight 64
      miles-submit attach latest --nodes 1 --local
      miles-submit attach latest --nodes 4 --dry-run
    """
    from miles.cluster.attach import pool_facts
    from miles.cluster.pool import started_pool, supervise_pool
    from miles.cluster.preflight import preflight, refuse
    from miles.cluster.progress import find_run
    from miles.cluster.render import render_pool
    from miles.cluster.submit import submit_pool
    from miles.config import load_site
    from miles.rundir import PoolDir

    found = find_run(run)
    facts = pool_facts(found.config, nodes, in_flight, time_limit, finished=found.finished)
    config, site = facts.config_of(found.config), load_site(found.config.cluster.site)
    if dry_run:
        click.echo(render_pool(found.path, found.next_pool(), config, site), nl=False)
        return
    refuse(preflight(config, site, "local" if here else "slurm", pool=True))
    pool = PoolDir.create(found, facts)
    job = None if here else submit_pool(pool)
    said = {"run": str(found.path), "pool": pool.pool, "job_id": job and job.job_id, "nodes": nodes, "in_flight": facts.in_flight}
    click.echo(json.dumps(said) if as_json else f"pool {pool.pool} of {found.path}: {f'job {job.job_id}' if job else 'on this machine'}, "
               f"{facts.in_flight} trajectories at once")
    if here and not watch:
        sys.exit(supervise_pool(pool, "local"))
    if here:
        with started_pool(pool) as process:
            _follow_pool(pool, lambda: process.poll() is None)
    elif watch:
        _follow_pool(pool, lambda: not job.done())


@main.command()
@RUN
@JSON
def status(run: str, as_json: bool) -> None:
    """Where RUN stands: job state, steps, attempts and how they ended, and its pools.

    \b
      miles-submit status
      miles-submit status runs/tiny_async-20260101T120000Z --json
    """
    from miles.cli.follow import COLUMNS, cells, headline
    from miles.cluster.attach import pool_rows
    from miles.cluster.progress import find_run, progress

    found = find_run(run)
    now, pools = progress(found), pool_rows(found)
    if as_json:
        click.echo(json.dumps(now.to_json() | {"pools": pools}, indent=1))
        return
    click.echo(headline(now))
    click.echo(f"step {now.step} of {now.steps}, " + ("finished" if now.finished else "under way" if now.alive else "stopped"))
    for a in now.attempts:
        click.echo(f"  attempt {a['attempt']}: {a.get('outcome', 'under way' if now.alive else 'ended without a record')}" + (f", {a['text']}" if "text" in a else ""))
    for p in pools:
        click.echo(f"  pool {p['pool']}: {'job ' + p['job_id'] if p['job_id'] else 'local'} {p['state']}, {p['nodes']} node{'s' * (p['nodes'] > 1)}, "
                   f"{p['engines']} engines up, {p['running']} of {p['in_flight']} trajectories" + (f"; {p['text']}" if p["text"] else ""))
    if now.rows:
        click.echo("  ".join(f"{n} {v}" for n, v in zip(COLUMNS, cells(now.rows[-1]))))


@main.command()
@RUN
def follow(run: str) -> None:
    """Show RUN live until it ends. Ctrl-C ends the display, not the run.

    \b
      miles-submit follow
      miles-submit follow 4711
    """
    from miles.cli.follow import follow as show
    from miles.cluster.progress import find_run

    sys.exit(show(find_run(run), console))


@main.command()
@RUN
@click.argument("name", required=False)
@click.option("--attempt", type=int, help="Attempt number (default: the newest).")
@click.option("--lines", type=int, default=40, show_default=True, help="Lines from the end of each file.")
@JSON
def logs(run: str, name: str | None, attempt: int | None, lines: int, as_json: bool) -> None:
    """List the text logs of RUN, or print the end of those whose name contains NAME.

    \b
      miles-submit logs latest
      miles-submit logs latest trainer-0
    """
    from miles.cluster.progress import find_run, log_files, tail

    files = [f for f in log_files(find_run(run), attempt) if name is None or name in f.name]
    if as_json:
        click.echo(json.dumps([str(f) for f in files], indent=1))
        return
    for file in files:
        click.echo(str(file) if name is None else f"==> {file}\n{tail(file, lines)}")


@main.command()
@RUN
def cancel(run: str) -> None:
    """Stop what works on RUN (its job, or its local supervisor). Nothing published is lost; `resume` goes on.

    \b
      miles-submit cancel latest
    """
    from miles.cluster.progress import cancel as stop
    from miles.cluster.progress import find_run

    click.echo(stop(find_run(run)))


@main.command()
@RUN
@click.option("--config", type=click.Path(path_type=Path), help="Refuse when this config differs from the run's own, field by field.")
@SET
@click.option("--local", "here", is_flag=True, help="Without Slurm, on this machine.")
@click.option("--follow", "watch", is_flag=True, help="Show the run until it ends; its outcome is the exit code.")
@click.option("--wait", is_flag=True, help="Say nothing until the run ends; its outcome is the exit code.")
@JSON
def resume(run: str, config: Path | None, overrides: tuple[str, ...], here: bool, watch: bool, wait: bool, as_json: bool) -> None:
    """Go on with RUN from its last checkpoint, with the config it was made with.

    \b
      miles-submit resume latest --follow
      miles-submit resume latest --config configs/tiny_async.toml
    """
    from miles.cluster.preflight import preflight, refuse
    from miles.cluster.progress import check_resume, find_run
    from miles.config import load_config, load_site

    found = find_run(run)
    check_resume(found, load_config(config or found.path / "run.toml", overrides))
    refuse(preflight(found.config, load_site(found.config.cluster.site), "local" if here else "slurm", run=found.path.name))
    if here:
        _run_here(found, watch)
    _queue(found, found.path / "run.toml", watch, wait, as_json)


@main.command()
@RUN
@JSON
@click.option("--html", type=click.Path(path_type=Path), help="Write a page for a browser.")
def report(run: str, as_json: bool, html: Path | None) -> None:
    """One page about RUN: learning, staleness, waits, weights, engines.

    \b
      miles-submit report
      miles-submit report latest --json
      miles-submit report latest --html report.html
    """
    from miles.cluster.progress import find_run
    from miles.report import render_html, render_text
    from miles.report import report as figures

    found = figures(find_run(run).path)
    if html:
        html.write_text(render_html(found))
    click.echo(json.dumps(found, indent=1) if as_json else str(html) if html else render_text(found))


# -- shared by the commands above -----------------------------------------------------------------------------------------------
def _checked(config: Path, overrides: tuple[str, ...], scale: str | None, launcher: str):
    from miles.cluster.preflight import preflight, refuse
    from miles.config import load_config, load_site
    from miles.config.scale import dev_scale

    loaded = load_config(config, overrides)
    if scale == "dev":
        loaded = dev_scale(loaded)
    refuse(preflight(loaded, load_site(loaded.cluster.site), launcher))
    return loaded


def _queue(run, config: Path, watch: bool, wait: bool, as_json: bool) -> None:
    from miles.cli.follow import follow as show
    from miles.cluster.progress import outcome
    from miles.cluster.submit import submit as queue

    job = queue(run, config)
    click.echo(json.dumps({"job_id": job.job_id, "run": str(run.path)}) if as_json else f"job {job.job_id}, run {run.path}")
    if watch:
        sys.exit(show(run, console, alive=lambda: not job.done()))
    if wait:
        job.wait()
        sys.exit(outcome(run))


def _run_here(run, watch: bool) -> None:
    from miles.cli.follow import follow as show
    from miles.cluster.local import run_local, started_local

    if not watch:
        sys.exit(run_local(run))
    with started_local(run) as process:
        sys.exit(show(run, console, alive=lambda: process.poll() is None))


def _follow_pool(pool, alive) -> None:
    from miles.cli.follow import show_while
    from miles.cluster.progress import pool_outcome

    show_while(pool, console, alive)
    text, code = pool_outcome(pool)
    console.print(f"pool {pool.pool} is over: {text}", soft_wrap=True)
    sys.exit(code)


def _print_findings(findings) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    color = {"ok": "green", "warn": "yellow", "fail": "red"}
    for f in findings:
        table.add_row(f"[{color[f.status]}]{f.status}[/]", f.name, f.text)
    console.print(table)
