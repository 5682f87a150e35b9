"""What the supervisor decides, as a table of events: no process, no clock."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from miles.cluster.decide import (
    NUDGE_S,
    Cancel,
    Cause,
    Limits,
    Notice,
    Nudge,
    Phase,
    RankReport,
    Reached,
    Start,
    StepEnded,
    Stop,
    Tick,
    begin,
    decide,
    step_cause,
    wasted,
)
from miles.core import Role

T, R = Role.TRAINER, Role.ROLLOUT
LIMITS = Limits(max_restarts=2, requeues_left=1, checkpoint_s=90.0)


def ended(role: Role, code: int, finished: bool = False, step: int = 0, checkpoint: int = 0) -> StepEnded:
    return StepEnded(Cause(role, code, f"{role} {code}"), finished, Reached(step, checkpoint))


def play(*events, limits=LIMITS):
    """Final state and the actions of the last event. An event may be (time, event)."""
    state, actions = begin()
    for event in events:
        now, event = event if isinstance(event, tuple) else (0.0, event)
        state, actions = decide(state, event, now, limits)
    return state, actions


def test_both_roles_start():
    assert begin()[1] == [Start(T, 0), Start(R, 0)]


def test_a_dead_step_is_started_again_and_the_other_lives():
    state, actions = play(ended(R, 137))
    assert actions == [Start(R, 1)] and state.phase is Phase.RUNNING and state.running == {T, R}


def test_restarts_are_counted_per_role_and_bounded():
    assert play(ended(R, 137), ended(T, 1), ended(R, 137))[1] == [Start(R, 2)]
    state, actions = play(ended(R, 137), ended(R, 137), ended(R, 137))
    assert actions == [Stop(T)] and state.outcome.kind == "failed" and state.outcome.exit_code == 1
    assert "max_restarts" in state.outcome.text


def test_restarts_count_since_training_last_got_further():
    events = [ended(R, 137, step=step) for step in (3, 3, 7, 7)]
    assert play(*events)[1] == [Start(R, 2)] and play(*events, ended(R, 137, step=7))[0].outcome.kind == "failed"
    assert play(*events, ended(R, 137, step=8))[1] == [Start(R, 1)]
    unrelated = [ended(role, 137, step=step) for step, role in enumerate([R, T] * 50, start=1)]
    assert play(*unrelated)[0].phase is Phase.RUNNING


def test_a_trainer_that_dies_again_and_again_before_it_gets_beyond_where_it_was_ends_the_run():
    """Each goes on from the checkpoint of step 20, and dies at 38 or before; what an attempt before had reached counts likewise."""
    dies = [ended(T, 137, step=step, checkpoint=20) for step in (38, 30, 38)]
    assert play(*dies[:2])[1] == [Start(T, 2)]
    state, _ = play(*dies)
    assert state.outcome.kind == "failed" and "since step 38, beyond which training did not get" in state.outcome.text
    state, _ = begin(Reached(step=40, checkpoint=20))
    for event in dies:
        state, _ = decide(state, event, 0.0, LIMITS)
    assert state.outcome.kind == "failed"


def test_configuration_and_environment_faults_stop_the_run():
    for code in (2, 3):
        state, actions = play(ended(R, code))
        assert actions == [Stop(T)] and state.phase is Phase.STOPPING and state.outcome.exit_code == code
        assert decide(state, ended(T, 143), 1.0, LIMITS)[0].phase is Phase.OVER


def test_a_finished_trainer_waits_for_the_rollout_then_ends_it():
    state, actions = play(ended(T, 0))
    assert actions == [] and state.phase is Phase.DRAINING
    assert decide(state, ended(R, 0, True), 1.0, LIMITS)[0].phase is Phase.OVER
    state, actions = decide(state, Tick(), 60.0, LIMITS)
    assert actions == [Stop(R)] and state.phase is Phase.STOPPING and state.outcome.kind == "finished"


def test_a_rollout_that_dies_while_draining_does_not_spoil_the_run():
    assert play(ended(T, 0), ended(R, 137))[0].outcome.kind == "finished"


def test_a_rollout_that_saw_the_end_first_is_not_restarted():
    state, actions = play(ended(R, 0, finished=True))
    assert actions == [] and state.phase is Phase.RUNNING
    assert decide(state, ended(T, 0, True), 1.0, LIMITS)[0].phase is Phase.OVER


def test_a_rollout_that_ends_early_without_the_run_being_finished_is_restarted():
    assert play(ended(R, 0))[1] == [Start(R, 1)]


def test_notice_nudges_both_and_repeats():
    state, actions = play(Notice())
    assert actions == [Nudge(T), Nudge(R)] and state.phase is Phase.CHECKPOINTING
    assert decide(state, Tick(), NUDGE_S - 1, LIMITS)[1] == []
    assert decide(state, Tick(), NUDGE_S, LIMITS)[1] == [Nudge(T), Nudge(R)]
    assert decide(state, Notice(), 1.0, LIMITS)[1] == []


def test_a_checkpointed_trainer_ends_in_a_requeue():
    state, actions = play(Notice(), ended(T, 75))
    assert actions == [Stop(R)] and state.outcome.kind == "requeue" and state.outcome.exit_code == 75


def test_a_trainer_that_dies_or_hangs_at_its_checkpoint_is_requeued_all_the_same():
    assert play(Notice(), ended(T, 137))[0].outcome.kind == "requeue"
    state, actions = play(Notice(), (90.0, Tick()))
    assert actions == [Stop(T), Stop(R)] and state.outcome.kind == "requeue"


def test_a_dead_rollout_is_not_restarted_while_checkpointing():
    assert play(Notice(), ended(R, 137))[1] == []


def test_requeues_are_bounded():
    state, _ = play(ended(T, 75), limits=replace(LIMITS, requeues_left=0))
    assert state.outcome.kind == "failed" and "max_requeues" in state.outcome.text


def test_a_requeue_with_a_newer_checkpoint_than_the_attempt_began_with_is_not_counted():
    none_left = replace(LIMITS, requeues_left=0)
    assert play(Notice(), ended(T, 75, checkpoint=5), limits=none_left)[0].outcome.kind == "requeue"
    assert play(Notice(Reached(5, 5)), (90.0, Tick()), limits=none_left)[0].outcome.kind == "requeue", "saved before the notice"
    assert play(Notice(), (90.0, Tick()), limits=none_left)[0].outcome.kind == "failed"
    state, _ = decide(begin(Reached(5, 5))[0], ended(T, 75, step=5, checkpoint=5), 0.0, none_left)
    assert state.outcome.kind == "failed" and "no newer checkpoint" in state.outcome.text


def test_of_a_job_s_attempts_those_are_counted_that_left_no_newer_checkpoint():
    assert wasted([0]) == 0 and wasted([0, 20, 40]) == 0 and wasted([0, 0, 20, 20, 20]) == 3
    assert wasted([40, 20]) == 1  # the newest was damaged


def test_cancel_stops_softly_then_hard():
    state, actions = play(Cancel("scancel"))
    assert actions == [Stop(T), Stop(R)] and state.outcome.kind == "cancelled" and state.outcome.exit_code == 143
    assert decide(state, Tick(), 14.9, LIMITS)[1] == []
    state, actions = decide(state, Tick(), 15.0, LIMITS)
    assert actions == [Stop(T, hard=True), Stop(R, hard=True)]
    assert decide(state, Tick(), 30.0, LIMITS)[1] == [Stop(T, hard=True), Stop(R, hard=True)]


EVENTS = st.one_of(
    st.builds(ended, st.sampled_from([T, R]), st.sampled_from([0, 1, 2, 3, 75, 137, 143]), st.booleans()),
    st.just(Notice()), st.just(Cancel("x")), st.just(Tick()))


@given(st.lists(st.tuples(st.floats(0, 20), EVENTS), max_size=30))
def test_whatever_happens_over_means_nothing_runs_and_an_outcome_is_known(history):
    state, now = begin()[0], 0.0
    for seconds, event in history:
        if isinstance(event, StepEnded) and event.role not in state.running:
            continue  # only a running step can end
        now += seconds
        state, actions = decide(state, event, now, LIMITS)
        assert all(a.role in state.running for a in actions)
        assert (state.phase is Phase.OVER) == (not state.running and state.phase is not Phase.RUNNING and state.phase is not Phase.CHECKPOINTING)
        if state.phase in (Phase.DRAINING, Phase.STOPPING, Phase.OVER):
            assert state.outcome is not None
        if state.phase is Phase.OVER:
            return
    for _ in range(4):  # deadlines pass: everything still running has been told to stop
        now += 100
        state, actions = decide(state, Tick(), now, LIMITS)
    if state.phase is Phase.STOPPING:
        assert {a.role for a in actions} == state.running


def report(rank: int, code: int | None, ended_at: float = 1.0) -> RankReport:
    return RankReport(rank, 100 + rank, "node0", code, ended_at)


def test_cause_is_the_first_failure_not_the_peers_killed_for_it():
    cause = step_cause(T, [report(0, 143, 2.0), report(1, 137, 1.0)], 2, 143)
    assert (cause.rank, cause.code) == (1, 137) and "signal 9" in cause.text


def test_a_rank_that_lost_its_peer_is_the_cause_only_where_nothing_else_is_known():
    assert step_cause(T, [report(0, 137, 2.0), report(1, 76, 1.0), report(2, 143, 3.0)], 3, 143).rank == 0
    alone = step_cause(T, [report(0, None), report(1, 76, 1.0)], 2, 143)
    assert (alone.rank, alone.code) == (1, 76) and "found another rank gone" in alone.text and decide(begin()[0], StepEnded(alone), 0.0, LIMITS)[1] == [Start(T, 1)]


def test_a_rank_that_froze_is_the_cause_of_the_end_of_its_peers_and_is_restarted_as_one_that_died():
    """Its wrapper kills it first; what state it was in says where to look."""
    for state, hint in (("T (stopped)", "SIGSTOP"), ("D (disk sleep)", "look at the mounts"), ("S (sleeping)", "one call that did not return")):
        cause = step_cause(T, [report(0, 143, 2.0), replace(report(1, 137, 1.0), frozen=state)], 2, 143)
        assert (cause.rank, cause.code) == (1, 137)
        assert f"trainer rank 1 on node0 gave no sign of life for cluster.frozen_s and was killed; its state was {state}: " in cause.text and hint in cause.text
        assert decide(begin()[0], StepEnded(cause), 0.0, LIMITS)[1] == [Start(T, 1)]


def test_a_wrong_clock_may_name_another_rank_but_restarts_the_same():
    right, wrong = (step_cause(R, [report(0, 143, ended), report(1, 137, 1.0)], 2, 143) for ended in (2.0, 2.0 - 86400))
    assert (right.rank, wrong.rank) == (1, 0)
    assert decide(begin()[0], StepEnded(right), 0.0, LIMITS)[1] == decide(begin()[0], StepEnded(wrong), 0.0, LIMITS)[1] == [Start(R, 1)]
    assert step_cause(R, [report(0, 1, 2.0 - 86400), report(1, 3, 2.0)], 2, 143).code == 3


def test_cause_prefers_a_code_that_forbids_a_restart():
    assert step_cause(R, [report(0, 1, 1.0), report(1, 3, 2.0)], 2, 137).code == 3


def test_cause_of_a_clean_end_needs_every_rank():
    assert step_cause(T, [report(0, 0), report(1, 0)], 2, 0).code == 0
    assert step_cause(T, [report(0, 75), report(1, 75)], 2, 0).code == 75
    lost = step_cause(T, [report(0, 0)], 2, 0)
    assert lost.code == 1 and "[1]" in lost.text


def test_cause_without_records_is_the_launchers_code_but_never_a_verdict_on_the_configuration():
    assert step_cause(T, [], 2, -9).code == 137
    assert step_cause(T, [], 2, 2).code == 1  # srun's own 2 is not Miles's


def test_what_a_rank_said_last_is_found_in_its_log(tmp_path):
    from miles.cluster.supervise import last_error

    log = tmp_path / "rank.log"
    assert last_error(log) == ""
    log.write_text("Traceback ...\nmiles.core.errors.EnvironmentFault: first\n\nEnvironmentFault: the port is taken\n  expected: a free one\n  what to do: free it\n")
    assert last_error(log) == "EnvironmentFault: the port is taken\n  expected: a free one\n  what to do: free it"
    log.write_text("EnvironmentFault: it did not start\n" + "\n".join(f"line {i}" for i in range(50)))
    assert last_error(log, 4).splitlines() == ["EnvironmentFault: it did not start", "  ...", "line 48", "line 49"]
