"""What the supervisor does next: a pure function of its state and one event.

    RUNNING ----- a step dies ---------------> start it again with a new epoch (at most max_restarts times since training last got further)
       |--------- trainer exits 0 -----------> DRAINING: the rollout step may end by itself ----> OVER (finished)
       |--------- USR2 ----------------------> CHECKPOINTING: trainer saves and exits 75 -------> STOPPING -> OVER (requeue)
       |--------- exit 2 or 3, TERM, ... ----> STOPPING: both steps are ended ------------------> OVER (failed | cancelled)

Restarts count until training has got further than ever before, and a requeue only where its attempt left no newer checkpoint: so a run of weeks does
not end of what it has recovered from, and one that goes round in a circle does.

A role counts as running from the decision to start it until its end is reported, so a delayed start needs no state of its own.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from miles.core import LOST_PEER, Role

EX_TEMPFAIL = os.EX_TEMPFAIL
"""Exit code of a trainer that saved a checkpoint because it was asked to stop (sysexits.h: 75)."""

NOT_RESTARTED = (2, 3)
"""Exit codes for a configuration (2) or environment (3) that a restart cannot mend."""

FROZEN = {
    "T": "somebody or something stopped it (SIGSTOP, the scheduler)",
    "t": "a debugger stopped it",
    "D": "it waited in the kernel for a file system or a device: look at the mounts and the kernel's log of that node",
}
IN_A_CALL = "its main thread was in one call that did not return, or waited for a thread that was; the end of its log may tell in which"
"""What a state in /proc/PID/status says of a rank that has frozen; any other state says the last."""

NUDGE_S = 5.0
"""USR2 is repeated: a rank that was still starting ignores it (see miles.cluster.rank)."""


class Phase(enum.StrEnum):
    RUNNING = "running"
    CHECKPOINTING = "checkpointing"
    DRAINING = "draining"
    STOPPING = "stopping"
    OVER = "over"


@dataclass(frozen=True)
class Limits:
    max_restarts: int  # of a role since training last got further
    requeues_left: int  # that leave no newer checkpoint
    checkpoint_s: float  # seconds between USR2 and giving up on the checkpoint
    drain_s: float = 60.0  # seconds the rollout step may take to end by itself after the trainer
    stop_s: float = 15.0  # seconds between TERM and KILL


@dataclass(frozen=True)
class Cause:
    """Why a step ended: what exit.json records."""

    role: str
    code: int  # exit code; 128 + signal when killed
    text: str
    rank: int | None = None


@dataclass(frozen=True)
class Outcome:
    kind: str  # finished | requeue | failed | cancelled
    exit_code: int
    text: str
    cause: Cause | None = None


@dataclass(frozen=True)
class Reached:
    """How far training has got, by what is there for good: the step of the newest version of the weights, and that of the newest checkpoint."""

    step: int = 0
    checkpoint: int = 0


@dataclass(frozen=True)
class State:
    phase: Phase = Phase.RUNNING
    running: frozenset[Role] = frozenset(Role)
    restarts: dict[Role, int] = field(default_factory=lambda: dict.fromkeys(Role, 0))
    began: Reached = Reached()  # what was there when the attempt began
    reached: Reached = Reached()  # the furthest since
    outcome: Outcome | None = None
    deadline: float = float("inf")  # when the phase is cut short
    nudge_at: float = float("inf")


# -- events ------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class StepEnded:
    cause: Cause
    run_finished: bool = False  # RUN/FINISHED exists
    reached: Reached = Reached()

    @property
    def role(self) -> Role:
        return Role(self.cause.role)


@dataclass(frozen=True)
class Notice:
    """USR2: the time limit is near, or the job is to be preempted."""

    reached: Reached = Reached()


@dataclass(frozen=True)
class Cancel:
    text: str
    exit_code: int = 143


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


# -- actions -----------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Start:
    role: Role
    restart: int  # how often this role was started again so far


@dataclass(frozen=True)
class Nudge:
    """Send USR2 to all ranks of a role."""

    role: Role


@dataclass(frozen=True)
class Stop:
    role: Role
    hard: bool = False  # KILL instead of TERM


def begin(reached: Reached = Reached()) -> tuple[State, list[Start]]:
    """`reached`: by earlier attempts."""
    return State(began=reached, reached=reached), [Start(role, 0) for role in Role]


def wasted(checkpoints: Sequence[int]) -> int:
    """How many requeues of a job left no newer checkpoint. checkpoints: the newest when each of its attempts began, in order, and now."""
    return sum(after <= before for before, after in pairwise(checkpoints))


def decide(state: State, event, now: float, limits: Limits) -> tuple[State, list]:
    """Next state and the actions to take, in order. `state.phase == OVER` means: nothing runs, act on `state.outcome`."""
    if isinstance(event, StepEnded | Notice):
        state = _further(state, event.reached)
    if isinstance(event, StepEnded):
        return _ended(replace(state, running=state.running - {event.role}), event, now, limits)
    if isinstance(event, Notice) and state.phase is Phase.RUNNING:
        state = replace(state, phase=Phase.CHECKPOINTING, deadline=now + limits.checkpoint_s, nudge_at=now + NUDGE_S)
        return state, [Nudge(role) for role in Role if role in state.running]
    if isinstance(event, Cancel) and state.phase is not Phase.STOPPING:
        outcome = state.outcome or Outcome("cancelled", event.exit_code, event.text)
        return _stop(state, outcome, now, limits)
    if isinstance(event, Tick):
        return _tick(state, now, limits)
    return state, []


def _further(state: State, found: Reached) -> State:
    """A trainer that goes on from its checkpoint has to get beyond where it was before."""
    restarts = dict.fromkeys(Role, 0) if found.step > state.reached.step else state.restarts
    reached = Reached(max(found.step, state.reached.step), max(found.checkpoint, state.reached.checkpoint))
    return replace(state, restarts=restarts, reached=reached)


def _ended(state: State, event: StepEnded, now: float, limits: Limits) -> tuple[State, list]:
    cause, role = event.cause, event.role
    if state.phase in (Phase.STOPPING, Phase.DRAINING):
        return (state, []) if state.running else (replace(state, phase=Phase.OVER), [])
    if cause.code in NOT_RESTARTED:
        return _stop(state, Outcome("failed", cause.code, f"a restart cannot mend this: {cause.text}", cause), now, limits)
    if role is Role.TRAINER and cause.code == 0:
        state = replace(state, phase=Phase.DRAINING, deadline=now + limits.drain_s, outcome=Outcome("finished", 0, "all steps are trained"))
        return (state, []) if state.running else (replace(state, phase=Phase.OVER), [])
    if role is Role.TRAINER and (cause.code == EX_TEMPFAIL or state.phase is Phase.CHECKPOINTING):
        return _stop(state, _requeue(cause.text, cause, state, limits), now, limits)
    if state.phase is Phase.CHECKPOINTING or (cause.code == 0 and event.run_finished):
        return state, []  # the rollout step is not needed any more; the trainer's end decides
    restarts = state.restarts[role] + 1
    if restarts > limits.max_restarts:
        text = (f"{cause.text}; the {role} step was already started again {limits.max_restarts} times (cluster.max_restarts) since step {state.reached.step}, "
                "beyond which training did not get")
        return _stop(state, Outcome("failed", 1, text, cause), now, limits)
    return replace(state, running=state.running | {role}, restarts={**state.restarts, role: restarts}), [Start(role, restarts)]


def _tick(state: State, now: float, limits: Limits) -> tuple[State, list]:
    if now >= state.deadline:
        if state.phase is Phase.CHECKPOINTING:
            text = f"no checkpoint within {limits.checkpoint_s:.0f} s of the notice; the last one counts"
            return _stop(state, _requeue(text, None, state, limits), now, limits)
        if state.phase is Phase.DRAINING:
            return _stop(state, state.outcome, now, limits)
        if state.phase is Phase.STOPPING:
            return replace(state, deadline=now + limits.stop_s), [Stop(role, hard=True) for role in Role if role in state.running]
    if state.phase is Phase.CHECKPOINTING and now >= state.nudge_at:
        return replace(state, nudge_at=now + NUDGE_S), [Nudge(role) for role in Role if role in state.running]
    return state, []


def _stop(state: State, outcome: Outcome, now: float, limits: Limits) -> tuple[State, list]:
    state = replace(state, phase=Phase.STOPPING if state.running else Phase.OVER, outcome=outcome, deadline=now + limits.stop_s)
    return state, [Stop(role) for role in Role if role in state.running]


def _requeue(text: str, cause: Cause | None, state: State, limits: Limits) -> Outcome:
    if limits.requeues_left <= 0 and state.reached.checkpoint <= state.began.checkpoint:
        why = "it left no newer checkpoint, and neither did as many requeues as cluster.max_requeues allows"
        return Outcome("failed", 1, f"{text}; not requeued: {why}", cause)
    return Outcome("requeue", EX_TEMPFAIL, text, cause)


# -- how a step ended, from what its ranks recorded ----------------------------------------------------------------------------
@dataclass(frozen=True)
class RankReport:
    """One rank's record (miles.cluster.rank). `code` is None while it runs, or when its wrapper was killed too. `frozen`: the state of its main thread, where
    its wrapper killed it because it gave no sign of life."""

    rank: int
    pid: int
    host: str
    code: int | None = None
    ended: float = 0.0  # unix seconds, of the rank's node
    frozen: str = ""


def step_cause(role: Role, reports: list[RankReport], ranks: int, launcher_code: int) -> Cause:
    """The one cause of a step's end. srun and mpiexec report the code of whichever rank they killed last, so the ranks' records go first.

    Order: a code that forbids a restart; the earliest failure, one that lost its peer last, as it may notice before the peer's end is recorded; a clean 75 or 0 of every rank; the launcher's own code.
    """
    done = sorted((r for r in reports if r.code is not None), key=lambda r: r.ended)
    for r in done:
        if r.code in NOT_RESTARTED:
            return Cause(role, r.code, f"{role} rank {r.rank} on {r.host} ended with exit code {r.code}", r.rank)
    for r in sorted(done, key=lambda r: r.code == LOST_PEER):
        if r.code not in (0, EX_TEMPFAIL):
            return Cause(role, r.code, f"{role} rank {r.rank} on {r.host} {_died(r)}", r.rank)
    if len(done) == ranks:
        code = EX_TEMPFAIL if any(r.code == EX_TEMPFAIL for r in done) else 0
        return Cause(role, code, f"{role} step {'saved a checkpoint and stopped' if code else 'ended'}")
    code = launcher_code if launcher_code > 0 else 128 - launcher_code if launcher_code < 0 else 1
    missing = sorted(set(range(ranks)) - {r.rank for r in done})
    return Cause(role, 1 if code in NOT_RESTARTED else code, f"{role} step ended with code {launcher_code}; ranks {missing} left no exit record")


def _died(r: RankReport) -> str:
    if r.frozen:
        return f"gave no sign of life for cluster.frozen_s and was killed; its state was {r.frozen}: {FROZEN.get(r.frozen[0], IN_A_CALL)}"
    if r.code == LOST_PEER:
        return f"found another rank gone, which has left no record yet (exit code {r.code})"
    return f"was killed by signal {r.code - 128}" if r.code > 128 else f"ended with exit code {r.code}"
