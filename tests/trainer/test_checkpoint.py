"""Checkpoints on one rank; two ranks and other layouts are in test_layouts."""

import errno
import os
import pickle
import resource
from types import SimpleNamespace

import msgspec
import pytest
import torch
import worlds

from miles.config import load_config
from miles.core import EnvironmentFault, StaleEpochError
from miles.core.at_work import signs
from miles.rundir import RunDir, patience
from miles.trainer import checkpoint, checkpoints
from miles.trainer.checkpoint import begin_checkpoint, describe_file, load_checkpoint
from miles.trainer.checkpoints import Checkpoints, Commit

ALONE = SimpleNamespace(leader=True, rank=0, size=1, broadcast_bytes=lambda data: data, gather_bytes=lambda data: [data])


@pytest.mark.parametrize(("precision", "steps_before"), [("fp32", 0), ("fp32", 2), ("bf16", 2)])
def test_a_resumed_run_goes_on_bit_for_bit(world, models, tmp_path, precision, steps_before):
    result = worlds.checkpoint_resume(models["qwen3_moe"], str(tmp_path / "c"), {}, [2, 2, 8], steps_before, precision)
    assert result["resumed"] == result["went_on"]
    assert result["different"] == []
    assert result["random"][0] == result["random"][1]


def test_tied_embeddings_are_resumed_too(world, models, tmp_path):
    result = worlds.checkpoint_resume(models["llama"], str(tmp_path / "c"), {}, None)
    assert result["resumed"] == result["went_on"]


def test_a_checkpoint_has_the_parameters_that_are_not_trained_too(world, models, tmp_path):
    step = worlds.build(models["glm_moe_dsa"], {})
    index = {name: p for name, p in step.model.chunks[0].named_parameters() if not p.requires_grad}
    before = {name: p.detach().clone() for name, p in index.items()}
    saving = begin_checkpoint(tmp_path, step.model, step.optimizer)
    saving.wait()
    saving.finish()
    for p in index.values():
        p.zero_()
    load_checkpoint(tmp_path, step.model, step.optimizer)
    assert len(index) == 15 and all(torch.equal(p, before[name]) for name, p in index.items())


def test_a_disk_that_takes_no_more_is_an_environment_fault(world, models, tmp_path):
    step = worlds.build(models["qwen3_moe"], {})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        saving = begin_checkpoint(tmp_path, step.model, step.optimizer)
        saving.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with pytest.raises(EnvironmentFault, match="could not be written"):
        saving.finish()


def test_the_thread_that_writes_says_so(world, models, tmp_path, monkeypatch):
    seen, step = [], worlds.build(models["llama"], {})
    monkeypatch.setattr(checkpoint, "describe_file", lambda path: seen.append([what for what, _ in signs().values()]) or describe_file(path))
    begin_checkpoint(tmp_path, step.model, step.optimizer).wait()
    assert set(map(tuple, seen)) == {(f"writing a checkpoint to {tmp_path}",)} and not signs()


def test_the_death_of_another_rank_is_no_fault_of_the_disk(world, models, tmp_path, monkeypatch):
    """An EnvironmentFault ends the run, because a restart mends no disk; this is what a restart is for."""
    step = worlds.build(models["llama"], {})
    saving = begin_checkpoint(tmp_path, step.model, step.optimizer)
    saving.wait()

    def lost():
        raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(saving, "_finalize", [lost])
    with pytest.raises(RuntimeError, match="reset by peer"):
        saving.finish()


def test_every_file_is_described_as_it_lies_on_disk(world, models, tmp_path):
    step = worlds.build(models["llama"], {})
    saving = begin_checkpoint(tmp_path, step.model, step.optimizer)
    saving.wait()
    saving.finish()
    assert saving.error == "" and saving.files == {p.name: describe_file(p) for p in tmp_path.iterdir()} and len(saving.files) >= 3


def test_a_file_is_described_by_its_size_and_xxh3(tmp_path):
    (tmp_path / "f").write_bytes(b"")
    assert describe_file(tmp_path / "f") == (0, "99aa06d3014798d86001c324468d497f")  # the published value of XXH3-128 for nothing


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_metadata_that_names_foreign_code_is_refused_and_not_run(world, models, tmp_path):
    step = worlds.build(models["llama"], {})
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Malicious(str(tmp_path / "ran"))))
    with pytest.raises(EnvironmentFault, match=r"names what a checkpoint never holds: (_?io)\.open"):
        load_checkpoint(tmp_path, step.model, step.optimizer)
    assert not (tmp_path / "ran").exists()


def test_a_folder_without_a_checkpoint_is_refused(world, models, tmp_path):
    step = worlds.build(models["llama"], {})
    with pytest.raises(EnvironmentFault, match="no checkpoint metadata"):
        load_checkpoint(tmp_path, step.model, step.optimizer)


@pytest.fixture
def two_checkpoints(tmp_path):
    """`newest()` of a run with checkpoints of steps 20 and 40, and their folder."""
    run = RunDir.create(load_config("configs/tiny_async.toml", (f"run.root={tmp_path}",)))
    epoch = run.new_epoch("trainer")
    for step in (20, 40):
        folder = run.checkpoints_dir / f"step_{step:06d}"
        folder.mkdir()
        (folder / "x.distcp").write_bytes(b"abc")
        (folder / "COMMIT").write_bytes(msgspec.json.encode(Commit(step, epoch, 0.0, {"x.distcp": describe_file(folder / "x.distcp")})))
    return Checkpoints(run, ALONE, epoch).newest, run.checkpoints_dir


def fails(monkeypatch, times, error):
    """Reads of the newer checkpoint fail so many times."""
    left = iter(range(times))

    def describe(path):
        if "000040" in str(path) and next(left, None) is not None:
            raise OSError(error, os.strerror(error), str(path))
        return describe_file(path)

    monkeypatch.setattr(checkpoints, "describe_file", describe)
    monkeypatch.setattr(patience.time, "sleep", lambda s: None)


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE, errno.EMFILE])
def test_a_checkpoint_that_cannot_be_read_for_a_moment_is_read_again_and_not_set_aside(two_checkpoints, monkeypatch, error):
    newest, folder = two_checkpoints
    with monkeypatch.context() as m:
        fails(m, 3, error)
        assert newest() == 40
    with monkeypatch.context() as m:
        fails(m, 4, error)
        with pytest.raises(patience.UnreadableNow, match=os.strerror(error)) as e:
            newest()
        assert e.value.exit_code == 1, "the step starts again"
    assert newest() == 40 and sorted(p.name for p in folder.iterdir()) == ["step_000020", "step_000040"]


def test_a_checkpoint_of_which_a_file_is_gone_is_set_aside(two_checkpoints):
    newest, folder = two_checkpoints
    (folder / "step_000040" / "x.distcp").unlink()
    assert newest() == 20 and sorted(p.name for p in folder.iterdir()) == ["damaged_step_000040", "step_000020"]


def test_a_fenced_trainer_removes_and_publishes_no_checkpoint(tmp_path):
    run = RunDir.create(load_config("configs/tiny_async.toml", (f"run.root={tmp_path}",)))
    old, new = (Checkpoints(run, ALONE, run.new_epoch("trainer")) for _ in range(2))
    begun = run.checkpoints_dir / ".step_000004.e000002.tmp"  # by the new one
    begun.mkdir()
    with pytest.raises(StaleEpochError):
        old.newest()
    late = run.checkpoints_dir / ".step_000003.e000001.tmp"
    late.mkdir()
    (late / "frontier.json").write_text("{}")
    old._saving, old._step = SimpleNamespace(folder=late, done=True, error="", files={}, write_s=0.0, wait=lambda: None, finish=lambda: None), 3
    with pytest.raises(StaleEpochError):
        old.poll(wait=True)
    assert new.steps() == [] and begun.is_dir()
    assert new.newest() is None and list(run.checkpoints_dir.iterdir()) == []
