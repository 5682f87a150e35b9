import os
import signal
import subprocess
import sys
import threading

import h5py
import pytest

from miles.core import EnvironmentFault
from miles.core.at_work import signs
from miles.log import RunLog, runlog


def test_rows_keep_their_types_and_order(tmp_path):
    log = RunLog(tmp_path / "a.h5", role="trainer", rank=0)
    for i in range(3):
        log.row("steps", step=i, loss=i / 2, name=f"s{i}", ok=True)
    with log.span("work", n=1):
        pass
    log.close()
    with h5py.File(tmp_path / "a.h5", "r", locking=False) as f:
        t = f["tables/steps"][:]
        assert t.dtype.names == ("time", "step", "loss", "name", "ok")
        assert t["step"].tolist() == [0, 1, 2] and t["loss"].tolist() == [0, 0.5, 1] and t["name"].tolist() == [b"s0", b"s1", b"s2"]
        assert f["tables/spans"]["name"][0] == b"work" and f.attrs["role"] == "trainer"


def test_a_row_with_other_columns_is_an_error_not_a_silent_loss(tmp_path):
    log = RunLog(tmp_path / "a.h5")
    log.row("steps", step=1)
    log.row("steps", stepp=1)
    with pytest.raises(ValueError, match="stepp"):
        log.close()


def test_a_full_disk_is_told_to_the_next_row(tmp_path):
    (tmp_path / "a.h5").symlink_to("/dev/full")
    log = RunLog(tmp_path / "a.h5")
    with pytest.raises(EnvironmentFault, match="free space"):
        log.row("steps", step=1)
        log.close()


def test_flushed_rows_survive_kill_9(tmp_path):
    code = "import sys,time; from pathlib import Path; from miles.log import RunLog\n" \
           "log = RunLog(Path(sys.argv[1]))\nfor i in range(5): log.row('steps', step=i)\ntime.sleep(1.6); print('flushed', flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "k.h5")], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "flushed\n"
    with h5py.File(tmp_path / "k.h5", "r", locking=False) as f:  # live
        assert f["tables/steps"]["step"].tolist() == [0, 1, 2, 3, 4]
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    with h5py.File(tmp_path / "k.h5", "r", locking=False) as f:
        assert f["tables/steps"]["step"].tolist() == [0, 1, 2, 3, 4]


def test_its_thread_says_that_it_is_at_work_while_it_writes_and_not_while_it_waits_for_rows(tmp_path, monkeypatch):
    real, seen = runlog._append, []

    def append(*args):
        seen.append((threading.get_ident(), [what for what, _ in signs().values()]))
        real(*args)

    monkeypatch.setattr(runlog, "_append", append)
    log = RunLog(tmp_path / "a.h5")
    assert log._thread.ident not in signs()
    log.row("steps", step=1)
    log.close()
    assert seen == [(log._thread.ident, [f"writing the log {log.path}"])]
