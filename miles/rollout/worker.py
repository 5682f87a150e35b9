"""One rollout rank: its engine, and the trajectories it is given.

    open the session server
    for each incarnation of the engine:
        (GPUs shared with the trainer: wait for the engines' turn)
        start it  ->  bring it to the newest weights  ->  tell the leader "up"
        while it lives: follow new weight versions (shared: release its memory when the batch of one is complete)
        tell the leader "down"; running trajectories go on with the engine of another rank

A sample is one episode of the environment played through a session: every token of it comes from the engine's replies, its trajectories (one,
or one for each kept leaf of a branching history) are published as a part file, and only then is the leader told. Its session is on disk turn by turn: a
sample whose rank was killed is played again in a fresh sandbox, and as long as its requests are the same, its replies are those of the first time.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from miles.buffer import write_part
from miles.config import MilesConfig, load_site
from miles.core import Drafts, EnvironmentFault, Role, StructureError, Trajectory
from miles.core.at_work import at_work
from miles.engine import EngineClient, EngineProcess, PortLease, lease_port
from miles.engine.ports import first_port
from miles.engine.process import EngineKilled
from miles.env import EpisodeLimits, Harness, Task, load_reward, run_episode, run_harness
from miles.log import RunLog
from miles.rollout.endpoint import Endpoint
from miles.rollout.weights import EnginePoisoned, EngineWeights
from miles.rundir import RunDir, publish_bytes
from miles.session import (
    ChatTokenizer,
    Engine,
    Engines,
    Session,
    SessionLimits,
    SessionServer,
    SessionService,
    SessionStore,
    load_replay,
    reproducer,
    stored_sessions,
)
from miles.weights.turns import EngineTurns

if TYPE_CHECKING:
    from miles.weights.p2p.receive import Receiver

Report = Callable[[dict[str, Any]], None]
LOOK_S = 1.0
KEEP_DROPPED = 20  # reproducers of dropped trajectories that one rank writes
SESSION_PORTS = 1000  # session servers take ports from engine.port_base + this


def sample_name(group: int, sample: int) -> str:
    """Session id and routing key of a sample's trajectory."""
    return f"g{group:08d}s{sample:03d}"


def sample_of(name: str) -> tuple[int, int]:
    group, _, sample = name[1:].partition("s")
    return int(group), int(sample)


def engine_host(config: MilesConfig) -> str:
    """The address that this rank's engine binds: loopback while all ranks share a node, else the node's own, so that sessions of other ranks can move
    to it."""
    return "127.0.0.1" if config.cluster.rollout.nodes == 1 else socket.gethostbyname(socket.gethostname())


class _NoStart(Exception):
    """The engine did not start, and may the next time."""


class Worker:
    """Runs until `stop` is called or its engine has died too often."""

    def __init__(self, run: RunDir, rank: int, epoch: int, attempt: int, tasks: Mapping[str, Task], log: RunLog, report: Report,
                 receiver: Receiver | None = None):
        """receiver: of weights sent point to point, where they may be."""
        c: MilesConfig = run.config
        self._run, self._rank, self._epoch, self._tasks, self._log, self._report, self._receiver = run, rank, epoch, tasks, log, report, receiver
        self._limits = EpisodeLimits.from_config(c, load_site(c.cluster.site))
        self._harness = Harness.from_config(c, load_site(c.cluster.site)) if c.tasks.kind == "harness" else None
        self._reward = load_reward(c.tasks.reward)
        self._host = engine_host(c)
        self._process = EngineProcess(c, rank=rank, log_path=run.attempt_dir(attempt) / f"engine-{rank}.e{epoch:04d}.log", token_file=run.token_file,
                                      host=self._host)
        self._url_file = run.attempt_dir(attempt) / f"sessions-{rank}.url"
        self._dropped, self._kept_dropped = run.attempt_dir(attempt) / "dropped", 0
        self._turns = EngineTurns(run, rank, epoch)
        self._engines = Engines(self._hung)
        store = SessionStore(run.sessions_dir, rank, epoch, fence=lambda: run.check_epoch(Role.ROLLOUT, epoch))
        self._service = SessionService(self._engines, ChatTokenizer.from_folder(c.model.path, c.model.boundary), SessionLimits.from_config(c),
                                       replay=load_replay(c.rollout.replay), branching=c.rollout.history == "branching", store=store)
        self._server = SessionServer(self._service, run.token)
        self._others: dict[int, EngineClient] = {}  # of other ranks' living engines
        self._former: list[EngineClient] = []  # of dead ones: a session may still be waiting for its answer
        self._samples: dict[str, tuple[int, int]] = {}  # session -> (group, sample) of the trajectories that run here
        self._running: set[asyncio.Task] = set()
        self._playing: dict[tuple[int, int], asyncio.Task] = {}  # (group, sample) -> the newest trajectory of it
        self._look, self._stopping, self._failed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._fault: BaseException | None = None  # what ended a trajectory without an answer to the leader
        self._deaths = 0  # of its engine, in a row
        self._served = False  # an engine of this rank has started once
        self._logged = 0.0

    # -- what the message pump calls -----------------------------------------------------------------------------------------
    def assign(self, group: int, sample: int, task: str, held_by: int | None) -> None:
        """Start one trajectory, or go on with it: `held_by` is the rank whose session file has its first turns. One of the same sample that still runs here
        was overdue: it ends before, without an answer."""
        key = (group, sample)
        job = self._begin(self._trajectory(group, sample, self._tasks[task], held_by, self._playing.get(key)))
        self._playing[key] = job
        job.add_done_callback(lambda _: self._playing.pop(key) if self._playing[key] is job else None)

    def release(self, samples: Sequence[tuple[int, int]]) -> None:
        """Let go of held (group, sample) pairs: their parts are there, or their groups are closed."""
        self._begin(self._service.release([sample_name(*s) for s in samples]))

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task:
        job = asyncio.create_task(work)
        self._running.add(job)
        job.add_done_callback(self._ended)
        return job

    def _ended(self, job: asyncio.Task) -> None:
        self._running.discard(job)
        if not job.cancelled() and job.exception() is not None and self._fault is None:
            self._fault = job.exception()
            self._failed.set()

    def look(self, over: int) -> None:
        """There may be a newer weight version. `over`: the newest whose batch is complete (shared GPUs, otherwise -1)."""
        self._turns.over(over)
        self._look.set()

    def stop(self) -> None:
        self._stopping.set()
        self._look.set()

    def engines(self, table: dict[int, dict[str, Any]]) -> None:
        """What the leader knows of every rank's living engine: {rank: {"url", "version", "active"}}; `active`: trajectories on it."""
        mine = self._engines.loads()
        others = {rank: row for rank, row in table.items() if rank != self._rank}
        for rank in [r for r, client in self._others.items() if r not in others or client.url != others[r]["url"]]:
            self._former.append(self._others.pop(rank))
            self._engines.down(rank)
        for rank, row in others.items():
            if rank not in self._others:
                self._others[rank] = self._client(row["url"])
            self._others[rank].version = row["version"]
            self._offer(rank, self._others[rank])
        self._engines.report({rank: row["active"] - mine.get(rank, 0) for rank, row in table.items()})

    # -- the engine's life ---------------------------------------------------------------------------------------------------
    async def run(self) -> None:
        """Raises EnvironmentFault when the engine does not start, or dies more than engine.restarts times in a row; and what ended a trajectory so that its sample
        has no answer: a rank that went on would leave its group open for ever, and one that is started again plays it again."""
        life, failed = asyncio.create_task(self._live()), asyncio.create_task(self._failed.wait())
        try:
            await asyncio.wait({life, failed}, return_when=asyncio.FIRST_COMPLETED)
            if self._fault is not None:
                raise self._fault
            await life
        finally:
            for task in (life, failed):
                task.cancel()
            await asyncio.wait({life, failed})

    async def _live(self) -> None:
        lease = await self._serve()
        self._report({"kind": "held", "samples": [(*sample_of(name), len(turns)) for name, (_, turns) in self._service.held.items()]})
        incarnation = 0
        try:
            while not self._stopping.is_set():
                try:
                    await self._incarnation(incarnation)
                except (EnginePoisoned, _NoStart) as e:
                    cause = str(e)
                else:
                    cause = f"the engine ended with status {self._process.returncode}"
                self._engines.down(self._rank)
                self._report({"kind": "down"})
                await self._process.stop()
                if self._stopping.is_set():
                    return
                incarnation, self._deaths = incarnation + 1, self._deaths + 1
                if self._deaths > self._run.config.engine.restarts:
                    raise EnvironmentFault(f"rank {self._rank}: {cause}; that was death {self._deaths} in a row\n{self._process.log_tail()}",
                                           f"at most engine.restarts = {self._run.config.engine.restarts} restarts in a row", "read the engine's log")
                print(f"rank {self._rank}: {cause}; restarting it ({self._deaths} in a row)", flush=True)
        finally:
            await self._server.stop()
            self._service.store.close()
            lease.release()
            for other in (*self._others.values(), *self._former):
                await other.close()

    async def _serve(self) -> PortLease:
        """Open the session server. Its sessions wait while there is no engine, and outlive each."""
        lease = lease_port(first_port(self._run.config.engine.port_base + SESSION_PORTS, self._rank))
        publish_bytes(self._url_file, (await self._server.start(lease.port) + "\n").encode())
        return lease

    async def _incarnation(self, number: int) -> None:
        while not self._turns.may_take():
            if self._stopping.is_set():
                return
            await self._next_look()
        url = await self._start()
        client = self._client(url)
        try:
            with contextlib.closing(EngineWeights(self._run, self._rank, self._epoch, number, client, self._log, self._turns, self._receiver)) as weights:
                while not await weights.follow() and await self._wait_look():
                    pass  # no traffic before the engine has a version of this run
                while self._process.alive and not self._stopping.is_set():
                    self._offer(self._rank, client)
                    self._report({"kind": "up", "version": weights.version, "url": url, "moved": self._moved()})
                    await self._wait_look()
                    if self._turns.ended(weights.version):
                        await weights.release()
                    if (not weights.released or self._turns.may_take()) and await weights.follow():
                        self._deaths = 0  # not the first version of this engine: its updates work
                    self._log_engine(client, number)
        finally:
            self._engines.down(self._rank)
            await client.close()

    def _hung(self, engine: Engine) -> None:
        """It is killed, and then all goes as with one that died."""
        if engine.rank == self._rank:  # that of another rank is its own affair
            print(f"rank {self._rank}: a turn passed its deadline and the engine generates nothing; it is killed", flush=True)
            self._process.kill()

    async def _start(self) -> str:
        try:
            url = await self._process.start()
        except EnvironmentFault as e:
            if self._served or isinstance(e, EngineKilled):  # a death as any other; otherwise it would not start the next time either
                raise _NoStart(str(e)) from e
            raise
        self._served = True
        return url

    def _offer(self, rank: int, client: EngineClient) -> None:
        """Sessions may use this engine, which lives: again, when one of them had given it up for a broken connection and no answer."""
        if self._engines.living(rank) is None:
            self._engines.up(Engine(rank, client, self._run.config.engine.dp_attention))

    def _client(self, url: str) -> EngineClient:
        m = self._run.config.model
        return EngineClient(url, self._run.token, m.rollout_path or m.path, max_context=m.max_context)

    def _moved(self) -> list[tuple[int, int, int]]:
        """(group, sample, rank) of trajectories whose engine is that of another rank."""
        return [(*self._samples[s.id], s.place.engine.rank) for s in self._service.sessions.values()
                if s.id in self._samples and s.place.engine.rank not in (self._rank, -1)]

    async def _next_look(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._look.wait(), LOOK_S)
        self._look.clear()

    async def _wait_look(self) -> bool:
        """Sleep until there may be something new; False when the engine is dead or this rank is to stop."""
        await self._next_look()
        return self._process.alive and not self._stopping.is_set()

    # -- trajectories --------------------------------------------------------------------------------------------------------
    async def _trajectory(self, group: int, sample: int, task: Task, held_by: int | None, earlier: asyncio.Task | None) -> None:
        if earlier is not None:
            earlier.cancel()
            await asyncio.wait({earlier})
        start, session, cause, leaves, part = time.monotonic(), None, None, [], {}
        try:
            session = await self._open(group, sample, held_by)
            leaves = await self._play(session, group, sample, task)
            part = {"part": await asyncio.to_thread(at_work(f"writing a sample to {self._run.buffer_dir}")(write_part), self._run, self._epoch, leaves)}
        except StructureError as e:
            cause = f"dropped:{e.cause}"
            if session is not None:
                self._keep_dropped(session, task, e)
        except EnvironmentFault as e:
            cause = "retried:environment" if self._engines.living(self._rank) else "retried:engine"
            print(f"g{group}s{sample} {task.name}: {e}", flush=True)
        finally:
            if session is not None:
                self._samples.pop(session.id)
                self._service.close(session)  # on disk it is open until the part is there
        if cause and self._stopping.is_set():
            return  # the run is complete and the engine is gone: nobody waits for this one
        self._log_trajectory(group, sample, task, leaves, cause, time.monotonic() - start, session)
        self._report({"kind": "finished", "group": group, "sample": sample, "cause": cause, **part})
        if session is not None:
            await self._service.forget(session)

    async def _open(self, group: int, sample: int, held_by: int | None) -> Session:
        """The sample's session; when a rank has played a part of it, which is in that rank's file, it goes on from there."""
        name, held = sample_name(group, sample), None
        if held_by == self._rank:
            held = self._service.held.get(name)
        elif held_by is not None:
            held = (await asyncio.to_thread(at_work(f"reading {self._run.sessions_dir}")(stored_sessions), self._run.sessions_dir, held_by)).get(name)
        session = await self._service.open_trajectory(name, rank=self._rank, held=held)
        self._samples[session.id] = (group, sample)
        return session

    async def _play(self, session: Session, group: int, sample: int, task: Task) -> list[Trajectory]:
        if self._harness:
            episode = await run_harness(task, Endpoint(self._server, session, self._limits.max_turns), self._harness)
        else:
            episode = await run_episode(task, session.chat, self._limits)
        reward, conversations = episode.reward, session.history.conversations
        if conversations:  # otherwise there is nothing to train
            reward = await asyncio.to_thread(self._reward, task, conversations, episode)  # a user's may take its time
        return session.trajectories(group_id=group, sample=sample, task_id=task.name, reward=reward, finish_reason=episode.finish,
                                    meta={"rank": self._rank, "env_s": episode.env_s})

    def _keep_dropped(self, session: Session, task: Task, error: StructureError) -> None:
        """Write what makes this refusal again to RUN/attempts/NNNN/dropped/SAMPLE.CAUSE.json: the first few of each rank, since one cause repeats."""
        if self._kept_dropped < KEEP_DROPPED:
            self._kept_dropped += 1
            self._dropped.mkdir(exist_ok=True)
            data = reproducer(session.history, error, task=task.name, key=session.routing_key)
            publish_bytes(self._dropped / f"{session.routing_key}.{error.cause.replace(':', '-')}.json", data)

    # -- log -----------------------------------------------------------------------------------------------------------------
    def _log_trajectory(self, group: int, sample: int, task: Task, leaves: Sequence[Trajectory], cause: str | None, seconds: float,
                        session: Session | None) -> None:
        """One row a sample, sums over its leaves; and one for each cause for which requests of its session did not go on from the turn before."""
        self._log.row("trajectories", group_id=group, sample=sample, task_id=task.name, rank=self._rank, **sample_figures(leaves), seconds=seconds,
                      status=cause or "ok")
        for kind, causes in (("branched", session.branched), ("refused", session.refused)) if session else ():
            for why, count in causes.items():
                self._log.row("mismatches", group_id=group, sample=sample, kind=kind, cause=why, count=count)

    def _log_engine(self, client: EngineClient, restarts: int) -> None:
        if time.monotonic() - self._logged > 2.0:
            self._logged = time.monotonic()
            self._log.row("engine", rank=self._rank, active=client.active, version=client.version, generated_tokens=client.generated_tokens,
                          restarts=restarts, **draft_figures(client.drafts))


def draft_figures(drafts: Drafts) -> dict[str, int]:
    """Columns of the tables `trajectories` and `engine`."""
    return {"draft_passes": drafts.passes, "drafted_tokens": drafts.proposed, "accepted_tokens": drafts.accepted}


def log_lost(log: RunLog, group: int, sample: int, task: str, rank: int, status: str) -> None:
    """The row of a sample whose rank does not write it itself."""
    log.row("trajectories", group_id=group, sample=sample, task_id=task, rank=rank, **sample_figures(()), seconds=float("nan"), status=status)


def sample_figures(leaves: Sequence[Trajectory]) -> dict[str, Any]:
    """Columns of the `trajectories` table for a finished sample; without leaves, those of one that did not finish."""
    first = leaves[0] if leaves else None
    versions = [v for t in leaves for v in (t.oldest_version, t.newest_version)]
    return {
        "reward": first.reward if first else float("nan"), "leaves": len(leaves), "turns": sum(t.turns for t in leaves),
        "tokens": sum(len(t.tokens) for t in leaves), "sampled_tokens": sum(t.sampled_tokens for t in leaves),
        "prompt_tokens": sum(t.prompt_tokens for t in leaves), "cached_tokens": sum(t.cached_tokens for t in leaves),
        "cacheable_tokens": sum(t.cacheable_tokens for t in leaves), "reused_tokens": sum(t.meta["reused_tokens"] for t in leaves),
        "moves": first.meta["moves"] if first else 0, "resumed_turns": first.meta["resumed_turns"] if first else 0,
        "abandoned_turns": first.meta["abandoned_turns"] if first else 0, "engine_s": first.meta["engine_s"] if first else 0.0, "env_s": first.meta["env_s"] if first else 0.0,
        "oldest_version": min(versions, default=-1), "newest_version": max(versions, default=-1), "finish": first.finish_reason if first else "",
        **draft_figures(sum((Drafts(*t.meta.get("drafts", ())) for t in leaves), Drafts())),
    }
