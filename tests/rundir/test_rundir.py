import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.config import load_config
from miles.core import ConfigError, EnvironmentFault, StaleEpochError
from miles.rundir import JournalReader, JournalWriter, RunDir, publish_bytes, publish_dir, read_journal, temp_path
from miles.rundir.journal import decode, encode


@pytest.fixture
def run(tmp_path):
    return RunDir.create(load_config("configs/tiny_async.toml", (f"run.root={tmp_path}",)), now=0)


def test_create_names_the_run_by_utc_time_and_points_latest_at_it(run):
    assert run.path.name == "tiny_async-19700101T000000Z"
    assert (run.path.parent / "latest").resolve() == run.path
    assert RunDir(run.path).config == run.config
    assert os.stat(run.token_file).st_mode & 0o777 == 0o600 and len(run.token) == 64


def test_two_runs_in_one_second_get_two_directories(run):
    assert RunDir.create(run.config, now=0).path.name == "tiny_async-19700101T000000Z-2"


def test_a_folder_without_run_toml_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="not a run directory"):
        RunDir(tmp_path)


def test_an_older_epoch_can_publish_nothing(run):
    old = run.new_epoch("trainer")
    assert (old, run.new_epoch("trainer"), run.current_epoch("rollout")) == (1, 2, 0)
    run.check_epoch("trainer", 2)
    with pytest.raises(StaleEpochError, match="epoch 1 tried to publish, the run is at epoch 2"):
        run.check_epoch("trainer", old)


def test_attempts_count_upward(run):
    assert [run.new_attempt(), run.new_attempt()] == [1, 2] == run.attempts()


def test_differences_names_each_changed_field(run):
    other = load_config("configs/tiny_async.toml", (f"run.root={run.path.parent}", "trainer.optimizer.lr=1e-5", "rollout.in_flight=9"))
    assert run.differences(other) == ["rollout.in_flight: 24 -> 9", "trainer.optimizer.lr: 0.0002 -> 1e-05"]


def test_publish_leaves_no_temporary_and_replaces_whole(tmp_path):
    f = tmp_path / "a"
    publish_bytes(f, b"one")
    publish_bytes(f, b"two")
    assert f.read_bytes() == b"two" and [p.name for p in tmp_path.iterdir()] == ["a"]


def test_publish_dir_appears_whole(tmp_path):
    final = tmp_path / "v1"
    tmp = temp_path(final)
    tmp.mkdir()
    (tmp / "x").write_bytes(b"1")
    publish_dir(tmp, final)
    assert (final / "x").read_bytes() == b"1" and not tmp.exists()


def test_a_full_disk_says_what_to_do():
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    w = JournalWriter.__new__(JournalWriter)
    w.path, w._fd = "/dev/full", os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(EnvironmentFault, match="free space"):
        w.append({"a": 1})
    w.close()


def test_a_journal_belongs_to_one_writer(tmp_path):
    JournalWriter(tmp_path / "j").close()
    with pytest.raises(EnvironmentFault, match="exists already"):
        JournalWriter(tmp_path / "j")


@given(st.lists(st.dictionaries(st.text(max_size=4), st.integers(-9, 9) | st.text(max_size=6), max_size=3), max_size=6), st.data())
def test_a_journal_cut_anywhere_gives_the_records_before_the_cut(tmp_path_factory, records, data):
    path = tmp_path_factory.mktemp("j") / "j"
    w = JournalWriter(path)
    w.append(*records)
    w.close()
    assert list(read_journal(path)) == records
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    expected, size = [], 0
    for r in records:
        size += len(encode(r))
        if size <= cut:
            expected.append(r)
    assert list(read_journal(path)) == expected


def test_a_flipped_bit_in_the_last_line_ends_the_journal_there_and_before_whole_lines_is_an_error(tmp_path):
    good, bad = encode({"i": 1}), bytearray(encode({"i": 2}))
    bad[12] ^= 1
    assert decode(bytes(bad)) is None
    (tmp_path / "j").write_bytes(good + bytes(bad))
    assert list(read_journal(tmp_path / "j")) == [{"i": 1}]
    (tmp_path / "j").write_bytes(good + bytes(bad) + good)
    with pytest.raises(EnvironmentFault, match=f"byte {len(good)} does not match"):
        list(read_journal(tmp_path / "j"))


def test_a_reader_follows_what_is_appended(tmp_path):
    w, r = JournalWriter(tmp_path / "j"), JournalReader(tmp_path / "j")
    assert r.poll() == []
    w.append({"i": 1})
    assert r.poll() == [{"i": 1}] and r.poll() == []
    w.append({"i": 2}, {"i": 3})
    assert r.poll() == [{"i": 2}, {"i": 3}]
    w.close()
