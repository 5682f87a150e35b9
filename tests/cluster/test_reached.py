"""How far a run has got, as its supervisor sees it in the files."""

import json

from miles.cluster.progress import attempts_of, reached
from miles.config import load_config
from miles.rundir import RunDir


def make(tmp_path):
    return RunDir.create(load_config("configs/tiny_async.toml", (f"run.root={tmp_path}",)))


def version(run, number, text):
    folder = run.weights_dir / f"v{number:06d}"
    folder.mkdir()
    (folder / "MANIFEST.json").write_text(text)


def checkpoint(run, step, *files):
    folder = run.checkpoints_dir / f"step_{step:06d}"
    folder.mkdir()
    for name in files:
        (folder / name).touch()


def test_it_is_the_step_of_the_newest_version_that_can_be_read_and_that_of_the_newest_checkpoint(tmp_path):
    run = make(tmp_path)
    assert reached(run) == (0, 0)
    version(run, 9, json.dumps({"version": 9, "step": 38, "tensors": {}}))
    version(run, 10, json.dumps({"version": 10, "step": 20, "tensors": {}}))  # of a trainer that went on from step 20
    checkpoint(run, 20, "COMMIT"), checkpoint(run, 40)
    assert reached(run) == (20, 20)
    version(run, 11, "{")
    (run.weights_dir / "v000012").mkdir()
    assert reached(run) == (20, 20)


def test_attempts_of_a_job_are_those_with_its_number_and_of_a_local_supervisor_those_of_its_process(tmp_path):
    run = make(tmp_path)
    written = [{"launcher": "slurm", "job_id": "7"}, {"launcher": "slurm", "job_id": "8"}, {"launcher": "local", "job_id": None, "pid": 5, "host": "a"},
               {"launcher": "local", "job_id": None, "pid": 5, "host": "b"}, None, {"launcher": "slurm", "job_id": "8"}]
    for facts in written:
        folder = run.attempt_dir(run.new_attempt())
        if facts is not None:
            (folder / "attempt.json").write_text(json.dumps({**facts, "checkpoint": 20}))
    assert [[a["attempt"] for a in attempts_of(run, facts)] for facts in (written[1], written[2], {"launcher": "slurm", "job_id": "9"})] == [[2, 6], [3], []]
