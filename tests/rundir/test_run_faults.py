"""Faults of the file system, of clocks and of files: what the run directory's readers and writers do (docs/faults.md; the buffer's are in tests/buffer)."""

import asyncio
import contextlib
import errno
import json
import os
import subprocess
import time
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from miles.buffer import BufferWriter, TrainerQueue, write_part
from miles.cluster.progress import progress
from miles.config import load_config
from miles.core import ConfigError, EnvironmentFault, StaleEpochError
from miles.engine import client, handover
from miles.log import RunLog
from miles.rundir import RunDir, publish_bytes, remove_unfinished, temp_path
from miles.session import SessionStore
from miles.session.store import Opened
from miles.weights.acks import Ack, read_ack, read_acks, write_ack
from miles.weights.follow import Follower
from miles.weights.publish import Publisher
from miles.weights.store import WeightStore
from tests.buffer.test_buffer import trajectory


def make(root):
    return RunDir.create(load_config("configs/tiny_async.toml", (f"run.root={root}",)))


@pytest.fixture
def run(tmp_path):
    return make(tmp_path)


@pytest.fixture
def disk(tmp_path):
    """A file system of 4 MiB, which can really be full or read-only."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("only who may mount can make a small file system")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill(folder):
    with open(folder / "filler", "wb", buffering=0) as f, contextlib.suppress(OSError):
        while True:
            f.write(bytes(4096))


def state(seed=0):
    return {"a.weight": torch.randn(64, 64, generator=torch.Generator().manual_seed(seed))}


def log_rows(run):
    log = RunLog(run.log_path(1, "trainer", 0, 1))
    for i in range(200):
        log.row("steps", step=i)
    log.close()


async def open_session(run):
    store = SessionStore(run.sessions_dir, 0, 1)
    try:
        await store.append(Opened("s", "k", 1, 0.0))
    finally:
        store.close()


def patch(store):
    store.publish_delta(2, 1, store.encode_delta(1, state(1).items(), state(0)), 1, base=1)


def start_group(run):
    writer = BufferWriter(run, run.current_epoch("rollout"))
    try:
        writer.start(0, "t")
    finally:
        writer.close()


WRITERS = {
    "epoch": lambda run: run.new_epoch("trainer"),
    "ack": lambda run: write_ack(run, Ack(0, 1, 0, 3, "d")),
    "keyframe": lambda run: WeightStore(run).publish(2, 1, state(1), 1),
    "patch": lambda run: patch(WeightStore(run)),
    "log": log_rows,
    "session": lambda run: asyncio.run(open_session(run)),
    "journal": start_group,
    "segment": lambda run: write_part(run, 1, [trajectory()]),
    "finished": lambda run: run.finish("done"),
    "attempt": lambda run: publish_bytes(run.attempt_dir(run.new_attempt()) / "attempt.json", b"{}"),
}


def prepared(root):
    run = make(root)
    run.new_epoch("trainer"), run.new_epoch("rollout")
    WeightStore(run).publish(1, 0, state(0), 1)
    run.log_path(1, "trainer", 0, 1).parent.mkdir(parents=True)
    return run


def files(run):
    """What readers see: everything but temporary names."""
    return {p: p.read_bytes() for p in run.path.rglob("*") if p.is_file() and not any(part.startswith(".") for part in p.relative_to(run.path).parts)}


@pytest.mark.parametrize("writer", WRITERS)
def test_on_a_full_disk_each_writer_says_what_to_do_and_what_was_there_stays(disk, writer):
    run = prepared(disk)
    before = files(run)
    fill(disk)
    with pytest.raises(EnvironmentFault, match="free space"):
        WRITERS[writer](run)
    assert {p: files(run).get(p) for p in before} == before
    (disk / "filler").unlink()
    if writer == "journal":
        run.new_epoch("rollout")  # a journal that could not be written is not used again
    if writer == "log":
        run.log_path(1, "trainer", 0, 1).unlink()
    assert not list(run.weights_dir.glob(".*"))
    WRITERS[writer](run)


def test_weights_that_find_no_room_on_their_way_to_an_engine_say_so(disk, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "vocab_size": 8, "num_hidden_layers": 1}))
    save_file(state(), tmp_path / "model.safetensors")
    monkeypatch.setattr(handover, "HANDOVER", disk)
    fill(disk)
    with pytest.raises(EnvironmentFault, match="(?s)cannot hand them over.*enlarge"):
        asyncio.run(client.EngineClient("http://127.0.0.1:1", "token", tmp_path, max_context=8).update_tensors(state(1), 2))
    assert [p.name for p in disk.iterdir()] == ["filler"]


@pytest.mark.parametrize("writer", WRITERS)
def test_on_a_read_only_file_system_each_writer_says_what_to_do(disk, writer):
    run = prepared(disk)
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    with pytest.raises(EnvironmentFault, match="remount it"):
        WRITERS[writer](run)


# -- slow disk ---------------------------------------------------------------------------------------------------------------
def test_on_a_slow_disk_weights_sessions_and_logs_come_late_and_whole(run, monkeypatch):
    run.new_epoch("trainer"), run.new_epoch("rollout")
    real, writes = os.fsync, os.writev
    monkeypatch.setattr(os, "fsync", lambda fd: (time.sleep(0.02), real(fd)))
    monkeypatch.setattr(os, "writev", lambda fd, pieces: writes(fd, [pieces[0][: max(1, len(pieces[0]) // 3)]]))
    store = WeightStore(run)
    store.publish(1, 0, state(0), 1)
    patch(store)
    asyncio.run(open_session(run))
    write_ack(run, Ack(0, 1, 0, 2, "d"))
    follower = Follower(store)
    follower.advance(2)
    assert torch.equal(follower.state["a.weight"], state(1)["a.weight"])
    assert list(SessionStore(run.sessions_dir, 0, 2).restored) == ["s"] and read_acks(run, 1)[0].version == 2


# -- clocks ------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("jump", [-86400.0, 86400.0])
def test_a_clock_wrong_by_a_day_changes_no_version_no_epoch_and_no_acknowledgement(run, monkeypatch, jump):
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + jump)
    assert (run.new_attempt(), run.new_epoch("trainer"), run.new_epoch("rollout")) == (1, 1, 1)
    store = WeightStore(run)
    store.publish(1, 0, state(0), 1)
    monkeypatch.setattr(time, "time", real)
    store.publish(2, 1, state(1), 1)
    assert (run.new_attempt(), run.new_epoch("trainer"), store.versions(), store.newest()) == (2, 2, [1, 2], 2)
    assert Follower(store).advance(2).version == 2
    write_ack(run, Ack(0, 1, 0, 2, "d"))
    assert read_acks(run, 1)[0].version == 2


# -- torn, damaged, deleted --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("data", [b"", b'{"rank":0,"epoch":1', b"\xff\xfe"])
def test_an_acknowledgement_that_cannot_be_read_counts_as_missing(run, data):
    for rank in (0, 1):
        write_ack(run, Ack(rank, 1, 0, 4, "d"))
    (run.acks_dir / "rollout-0000.json").write_bytes(data)
    assert list(read_acks(run, 1)) == [1]
    (run.acks_dir / "rollout-0001.json").unlink()
    assert read_acks(run, 1) == {}


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO, errno.EACCES])
def test_an_acknowledgement_that_the_file_system_does_not_give_counts_as_missing(run, monkeypatch, code):
    for rank in (0, 1):
        write_ack(run, Ack(rank, 1, 0, 4, "d"))
    read = Path.read_bytes

    def refused(path):
        if path.name == "rollout-0000.json":
            raise OSError(code, "of the network", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refused)
    assert list(read_acks(run, 1)) == [1] and read_ack(run, 0) is None


def test_a_lost_epoch_file_gives_no_number_twice(run):
    for _ in range(3):
        epoch = run.new_epoch("rollout")
        BufferWriter(run, epoch).close()
    (run.path / "epochs" / "rollout").unlink()
    with pytest.raises(StaleEpochError):
        run.check_epoch("rollout", 3)  # who lives ends, and is started again
    assert run.new_epoch("rollout") == 4


def test_a_damaged_epoch_file_is_named_and_its_removal_mends_it(run):
    TrainerQueue(run, run.new_epoch("trainer"), 0).close()
    path = run.path / "epochs" / "trainer"
    path.write_bytes(b"\x00\x00")
    with pytest.raises(EnvironmentFault, match=r"epochs/trainer is damaged(?s:.*)remove it"):
        run.new_epoch("trainer")
    path.unlink()
    assert run.new_epoch("trainer") == 2


@pytest.mark.parametrize("data", [b"", b"[run]\nname = 'x", b"\xff", b"[run]\nname = 'x'\nsteps = 0\n"])
def test_a_damaged_configuration_is_refused_and_named(run, data):
    (run.path / "run.toml").write_bytes(data)
    with pytest.raises(ConfigError, match=r"run.toml is damaged, or of another version"):
        RunDir(run.path)


def test_a_lost_token_is_named_and_another_takes_its_place(run):
    run.token_file.unlink()
    with pytest.raises(EnvironmentFault, match="make another"):
        run.token  # noqa: B018
    publish_bytes(run.token_file, b"word\n", mode=0o600)
    assert run.token == "word"


@pytest.mark.parametrize("name", ["attempt.json", "exit.json"])
@pytest.mark.parametrize("data", [b"", b'{"attempt": 1', None])
def test_status_is_told_without_a_damaged_or_lost_record_of_an_attempt(run, name, data):
    folder = run.attempt_dir(run.new_attempt())
    publish_bytes(folder / "attempt.json", msgspec.json.encode({"launcher": "local", "host": "node"}))
    publish_bytes(folder / "exit.json", msgspec.json.encode({"outcome": "failed"}))
    (folder / name).unlink()
    if data is not None:
        (folder / name).write_bytes(data)
    (found,) = progress(run).attempts
    assert ("launcher" in found, "outcome" in found) == (name != "attempt.json", name != "exit.json")


def test_lost_sessions_are_unknown_to_the_next_server_and_nothing_else_is(run):
    asyncio.run(open_session(run))
    for path in run.sessions_dir.iterdir():
        path.unlink()
    assert SessionStore(run.sessions_dir, 0, 2).restored == {}


def test_when_every_version_is_lost_numbers_go_on_from_the_checkpoint(run):
    """Engines may serve any version up to that of the checkpoint: none of them comes again with other weights."""
    run.new_epoch("trainer")
    publisher = Publisher(run, 1, WeightStore(run), lambda: None, lambda state: "", after=7)
    assert publisher.publish(3, state().items()).version == 8


def test_what_a_killed_writer_left_is_removed_and_nothing_else(run):
    run.new_epoch("trainer")
    WeightStore(run).publish(1, 0, state(), 1)
    unfinished = temp_path(run.weights_dir / "v000002")
    unfinished.mkdir()
    (unfinished / "weights.safetensors").write_bytes(bytes(100))
    (run.weights_dir / ".note").touch()
    assert remove_unfinished(run.weights_dir) == [unfinished.name]
    assert sorted(p.name for p in run.weights_dir.iterdir()) == [".note", "v000001"]


def test_a_server_removes_the_unfinished_session_files_of_its_rank_alone(run):
    mine, other = (run.sessions_dir / f".r00{rank}.e0001.000001.log.node.7.tmp" for rank in (0, 1))
    mine.touch(), other.touch()
    SessionStore(run.sessions_dir, 0, 2).close()
    assert (mine.exists(), other.exists()) == (False, True)


def test_errors_without_advice_are_not_hidden(run, monkeypatch):
    def broken(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="Input/output error"):
        run.new_epoch("trainer")
