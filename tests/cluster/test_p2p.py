"""A run whose weights go straight from trainer ranks to rollout ranks: real roles, MPI and files, SGLang's stand-in as the engine."""

import os
import signal
import time

import h5py
import pytest

from miles.weights.store import WeightStore
from tests.cluster.crash import make_run, make_tasks, processes, steps_trained, supervise
from tests.engine.tiny import make_model

pytestmark = pytest.mark.timeout(900)
STEPS = 24  # more than what is ready or in flight when a rank is killed at the fifth


def wait_for(condition, process, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)


def rows(run, role, table):
    out = []
    for path in sorted((run.attempt_dir(1) / "logs").glob(f"{role}-*.h5")):
        with h5py.File(path, "r", locking=False) as f:
            if f"tables/{table}" in f:
                t = f[f"tables/{table}"]
                out += [dict(zip(t.dtype.names, row.tolist(), strict=True)) for row in t[:]]
    return out


def test_engines_serve_what_the_trainer_ranks_sent_also_after_an_engine_and_a_rollout_rank_were_killed(tmp_path):
    run = make_run(tmp_path, make_model(tmp_path / "model", "llama"), make_tasks(tmp_path / "tasks", 5), STEPS, "weights.transport=p2p", "trainer.layout.tp=2",
                   "weights.ack_timeout_s=60")
    process = supervise(run)
    try:
        wait_for(lambda: steps_trained(run) >= 3, process)
        os.kill(processes(run)["engine"][0], signal.SIGKILL)
        wait_for(lambda: steps_trained(run) >= 5, process)
        os.kill(processes(run)["rollout"][-1], signal.SIGKILL)
        assert process.wait(timeout=600) == 0 and run.finished
    finally:
        process.kill()
        process.wait()
    steps, store = rows(run, "trainer", "steps"), WeightStore(run)
    by_step = {r["step"]: (r["transport"], r["note"]) for r in steps}
    assert by_step[1] == (b"p2p", b"") and by_step[STEPS] == (b"p2p", b""), by_step
    assert {note for _, note in by_step.values()} <= {b"", b"an engine does not serve the version before", b"the rollout ranks were restarted"}
    assert {store.manifest(v).encoding for v in store.versions()} == {"keyframe", "p2p"}  # the first version, and those for engines that had none
    applied = rows(run, "rollout", "weights")
    assert all(r["ok"] for r in applied) and {r["transport"] for r in applied} == {b"disk", b"p2p"}
    epochs = {p.name.partition(".e")[2] for p in (run.attempt_dir(1) / "logs").glob("rollout-*.h5")}
    assert len(epochs) == 2 and run.current_epoch("trainer") == 1  # the trainer lived through it all
