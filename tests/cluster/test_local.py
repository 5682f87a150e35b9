"""The supervisor with real MPI steps under mpiexec, stub roles."""

import os
import signal
import time


def test_finishes_and_leaves_nothing(make_run, supervise):
    run = make_run(10)
    assert supervise(run).wait(timeout=60) == 0
    assert run.step() == 10
    assert run.exit(1)["outcome"] == "finished"
    assert [r["code"] for r in run.records(1, "trainer", 1) + run.records(1, "rollout", 1)] == [0, 0, 0, 0]
    assert run.living() == []


def test_killed_rank_restarts_its_step_alone(make_run, supervise):
    run = make_run(200)
    process = supervise(run)
    run.kill(1, "rollout", 1, rank=1)
    run.kill(1, "rollout", 2, rank=0)
    assert process.wait(timeout=90) == 0
    assert run.step() == 200
    assert run.run.current_epoch("rollout") == 3
    assert run.run.current_epoch("trainer") == 1  # the trainer lived through both
    assert run.records(1, "rollout", 1)[1]["code"] == 128 + signal.SIGKILL


def test_a_rank_killed_before_the_ranks_of_its_step_have_met_restarts_the_step(make_run, supervise):
    """mpiexec does not notice, and the other rank would wait for it in MPI_Init for ever."""
    run = make_run(300)  # half a minute: the supervisor looks every 5 s, and the trainer must not be done before
    (run.path / "stub_slow").touch()
    process = supervise(run)
    run.wait_for(lambda: len(run.records(1, "rollout", 1)) == 2)
    os.kill(run.records(1, "rollout", 1)[0]["pid"], signal.SIGKILL)
    (run.path / "stub_slow").unlink()
    assert process.wait(timeout=90) == 0
    assert run.run.current_epoch("rollout") == 2 and run.run.current_epoch("trainer") == 1 and run.living() == []


def test_killed_trainer_goes_on_where_it_was(make_run, supervise):
    run = make_run(40)
    process = supervise(run)
    run.wait_for(lambda: run.step() >= 5)
    run.kill(1, "trainer", 1, rank=0)
    assert process.wait(timeout=90) == 0
    assert run.step() == 40
    assert run.run.current_epoch("trainer") == 2 and run.run.current_epoch("rollout") == 1
    assert " from 0" not in (run.run.attempt_dir(1) / "trainer-0.e0002.log").read_text()


def test_notice_makes_a_checkpoint_and_a_new_attempt(make_run, supervise):
    run = make_run(40)
    process = supervise(run)
    run.wait_for(lambda: run.step() >= 5)
    process.send_signal(signal.SIGUSR2)
    assert process.wait(timeout=90) == 0
    assert run.run.attempts() == [1, 2]
    assert run.exit(1)["outcome"] == "requeue" and run.exit(1)["step_exit_code"] == 75
    assert run.exit(2)["outcome"] == "finished" and run.step() == 40


def test_requeues_that_leave_no_newer_checkpoint_are_bounded_and_others_are_not(make_run, supervise):
    run = make_run(1000, "cluster.max_requeues=1")
    process = supervise(run)
    for attempt in (1, 2, 3):
        run.wait_for(lambda n=attempt: len(run.records(n, "trainer", n)) == 2)
        if attempt == 2:
            checkpoint = run.run.checkpoints_dir / "step_000005"
            checkpoint.mkdir()
            (checkpoint / "COMMIT").touch()
        process.send_signal(signal.SIGUSR2)
    assert process.wait(timeout=90) == 1
    assert [run.exit(n)["outcome"] for n in (1, 2, 3)] == ["requeue", "requeue", "failed"] and "max_requeues" in run.exit(3)["text"]


def test_environment_fault_is_not_restarted(make_run, supervise):
    run = make_run(1000)
    (run.path / "stub_exit").write_text("3")
    assert supervise(run).wait(timeout=60) == 3
    assert run.exit(1) == {**run.exit(1), "outcome": "failed", "step": "trainer", "step_exit_code": 3}
    assert run.run.current_epoch("trainer") == 1 and run.living() == []


def test_restarts_are_bounded(make_run, supervise):
    run = make_run(1000, "cluster.max_restarts=1")
    (run.path / "stub_exit").write_text("1")
    assert supervise(run).wait(timeout=60) == 1
    assert "cluster.max_restarts" in run.exit(1)["text"]
    assert run.run.current_epoch("trainer") == 2 and run.living() == []


def test_terminated_supervisor_takes_everything_with_it(make_run, supervise):
    run = make_run(1000)
    process = supervise(run)
    run.wait_for(lambda: run.step() >= 1)
    process.terminate()
    assert process.wait(timeout=60) == 128 + signal.SIGTERM
    assert run.exit(1)["outcome"] == "cancelled" and run.living() == []


def test_killed_supervisor_takes_everything_with_it(make_run, supervise):
    run = make_run(1000)
    process = supervise(run)
    run.wait_for(lambda: run.step() >= 1)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 20
    while run.living() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert run.living() == []
