import mmap
import os
import time

import miles.cluster.shm as shm


def test_only_old_segments_that_nobody_maps_are_removed(tmp_path):
    for name in ("mpich_shm_dead_0", "mpich_shm_alive_0", "mpich_shm_young_0", "sglang_loads_dead.shm", "other_dead"):
        (tmp_path / name).write_bytes(b"x" * 4096)
    old = time.time() - 60
    for name in ("mpich_shm_dead_0", "mpich_shm_alive_0", "sglang_loads_dead.shm", "other_dead"):
        os.utime(tmp_path / name, (old, old))
    with open(tmp_path / "mpich_shm_alive_0", "r+b") as f:
        mapped = mmap.mmap(f.fileno(), 4096)
    assert shm.remove_dead_segments(tmp_path) == ["mpich_shm_dead_0", "sglang_loads_dead.shm"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mpich_shm_alive_0", "mpich_shm_young_0", "other_dead"]
    mapped.close()
