"""Folders of an engine outside the run directory: gone with whoever made them, however that ended."""

import os
import subprocess
import sys

from miles.engine.handover import owned_folder


def test_the_folder_of_a_killed_process_is_removed_by_the_next_one_of_its_kind(tmp_path):
    program = "import os, sys, pathlib; from miles.engine.handover import owned_folder; owned_folder(pathlib.Path(sys.argv[1]), 'engine'); os.kill(os.getpid(), 9)"
    killed = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)])
    assert killed.wait() == -9
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(f"miles-engine-{killed.pid}-")
    other, first = owned_folder(tmp_path, "weights"), owned_folder(tmp_path, "engine")
    assert not left.exists()
    second = owned_folder(tmp_path, "engine")
    assert {*tmp_path.iterdir()} == {other, first, second}, "of the living nothing is removed"
    assert first.name.startswith(f"miles-engine-{os.getpid()}-")
