"""The tool that shows what is stored, and writes it as HDF5."""

import subprocess
import sys

import h5py
import numpy as np

from tests.buffer.parts import sealed_file, state_of
from tests.buffer.test_buffer import put, run, trajectory, writer  # noqa: F401  (fixtures)


def tool(*args):
    return subprocess.run([sys.executable, "tools/dump_groups", *map(str, args)], capture_output=True, text=True, check=False)


def test_what_is_stored_is_listed_and_written_as_it_is(run, writer, tmp_path):  # noqa: F811
    put(run, writer, 3)
    put(run, writer, 12, version=2)
    lines = tool(run.path).stdout.splitlines()
    assert lines[1] == "3 0 0 t ready 0 6 1 done" and len(lines) == 5
    assert tool(run.path, tmp_path / "some.h5", 12).stdout == f"1 groups in {tmp_path / 'some.h5'}\n"
    with h5py.File(tmp_path / "some.h5") as f:
        assert list(f) == ["g00000012"] and list(f["g00000012"]) == ["s000l000", "s001l000"]
        node, expected = f["g00000012/s001l000"], trajectory(12, 1, 2)
        for name in ("tokens", "loss_mask", "logprobs", "versions"):
            assert np.array_equal(node[name], getattr(expected, name))
        assert np.array_equal(np.sort(node["routes"], -1), np.sort(expected.routes, -1)) and node.attrs["reward"] == 1.0


def test_a_damaged_group_is_named_and_the_others_are_written(run, writer, tmp_path):  # noqa: F811
    put(run, writer, 3)
    put(run, writer, 4)
    at, path = state_of(run).groups[3].sealed, sealed_file(run, 3)
    data = bytearray(path.read_bytes())
    data[at.offset + at.size // 2] ^= 1
    path.write_bytes(data)
    result = tool(run.path, tmp_path / "all.h5")
    assert result.returncode == 1 and "group 3 not read" in result.stderr and "1 groups in" in result.stdout
    listing = tool(run.path)
    assert listing.returncode == 1 and "group 3 not read" in listing.stderr and len(listing.stdout.splitlines()) == 3
    unknown = tool(run.path, tmp_path / "x.h5", 9)
    assert unknown.returncode == 2 and "no stored group 9" in unknown.stderr
