"""HDF5 storage of trajectories.

    parts/g00000012s003.h5         one finished sample of a group that is still open: its leaves, /trajectories/000, /trajectories/001, ...
    groups/<2 hex>/g00000012.h5    sealed group: the same of all its samples, in the order of (sample, leaf)

Each trajectory is an HDF5 group with datasets tokens int32 [T], loss_mask uint8 [T], logprobs float32 [T], versions int32 [T] and, unless the
model is dense, routes uint8 [bytes]: the contiguous blob of `miles.buffer.routes`, whose layers can be read one by one. Scalars are in the
attribute `record` (JSON). `digest` is the xxh3-128 of record, arrays and the header of the routes, which holds a digest of each of their
layers: a reader of some layers has verified all that it returns. Tokens, masks and versions are zstd-compressed; log-probabilities do not
compress and are stored as they are. Sealing copies the stored bytes of the parts without decoding them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import h5py
import hdf5plugin
import msgspec
import numpy as np
import xxhash

from miles.core import Group, StructureError, Trajectory
from miles.rundir.publish import explain_os_errors, fsync_dir, publish_file, temp_path

_ARRAYS = ("tokens", "loss_mask", "logprobs", "versions")
_SCALARS = (
    "group_id", "sample", "leaf", "task_id", "reward", "finish_reason", "turns", "exact", "cached_tokens", "cacheable_tokens",
    "prompt_tokens", "seconds", "meta",
)


def part_path(buffer_dir: Path, group_id: int, sample: int) -> Path:
    return buffer_dir / "parts" / f"g{group_id:08d}s{sample:03d}.h5"


def group_path(buffer_dir: Path, group_id: int) -> Path:
    """Sealed file of a group; 256 hashed folders keep directories small."""
    name = f"g{group_id:08d}"
    return buffer_dir / "groups" / xxhash.xxh32_hexdigest(name.encode())[:2] / f"{name}.h5"


def write_part_file(buffer_dir: Path, leaves: Sequence[Trajectory]) -> Path:
    """Publish one sample, all its leaves at once. The same sample written twice replaces itself.

    Raises StructureError (cause `leaves`): these are not the leaves of one sample, 0, 1, ..., with one reward and one end.
    """
    first = leaves[0]
    shared = ("group_id", "sample", "task_id", "reward", "finish_reason")
    for n, t in enumerate(leaves):
        found, expected = ({k: getattr(x, k) for k in shared} for x in (t, first))
        if t.leaf != n or found != expected:
            raise StructureError(f"leaf {t.leaf} of {len(leaves)}, in place {n}: {found}", f"leaf {n} of {expected}", cause="leaves")
    final = part_path(buffer_dir, first.group_id, first.sample)
    tmp = temp_path(final)
    with explain_os_errors(final), h5py.File(tmp, "w", libver="earliest", locking=False) as f:
        node = f.create_group("trajectories")
        for n, t in enumerate(leaves):
            _write(node.create_group(_name(n)), t)
    publish_file(tmp, final)
    return final


def seal_parts(buffer_dir: Path, group_id: int, samples: list[int]) -> int:
    """Copy parts into the sealed group file and publish it exclusively. Returns its size in bytes.

    Raises FileExistsError when the group was sealed already (by a process of an older epoch that got there first).
    """
    final = group_path(buffer_dir, group_id)
    if not final.parent.is_dir():
        final.parent.mkdir(exist_ok=True)
        fsync_dir(final.parent.parent)
    tmp = temp_path(final)
    with explain_os_errors(final):
        with h5py.File(tmp, "w", libver="earliest", locking=False) as out:
            out.attrs["group_id"] = group_id
            node = out.create_group("trajectories")
            for sample in sorted(samples):
                with h5py.File(part_path(buffer_dir, group_id, sample), "r", locking=False) as part:
                    for leaf in _stored(part):
                        part.copy(leaf, node, name=_name(len(node)))
        with open(tmp, "rb") as f:
            os.fsync(f.fileno())
        try:
            os.link(tmp, final)  # unlike rename, never replaces: one creator per group
        finally:
            tmp.unlink()
        fsync_dir(final.parent)
    return final.stat().st_size


def remove_parts(buffer_dir: Path, group_id: int) -> None:
    for path in (buffer_dir / "parts").glob(f"g{group_id:08d}s*.h5"):
        path.unlink(missing_ok=True)


def finished_parts(buffer_dir: Path) -> dict[int, list[int]]:
    """Samples already on disk of groups still open: group id -> samples."""
    out: dict[int, list[int]] = {}
    for path in sorted((buffer_dir / "parts").glob("g*.h5")):
        out.setdefault(int(path.stem[1:9]), []).append(int(path.stem[10:]))
    return out


def read_group(buffer_dir: Path, group_id: int) -> Group:
    """A whole sealed group, digests verified. Raises StructureError (cause `digest`) when bytes do not match."""
    with h5py.File(group_path(buffer_dir, group_id), "r", locking=False) as f:
        items = tuple(_read(node) for node in _stored(f))
    return Group(group_id, items[0].task_id, items)


def read_trajectory(buffer_dir: Path, group_id: int, index: int, layers: slice | Sequence[int] | None = None) -> Trajectory:
    """The `index`-th trajectory of a sealed group (index counts stored trajectories, not sample numbers).

    `layers`: the MoE layers (0 .. L-1) whose routes are read and verified, all by default; `routes` then has these layers alone.
    """
    with h5py.File(group_path(buffer_dir, group_id), "r", locking=False) as f:
        return _read(f["trajectories"][_name(index)], layers)


def read_summaries(buffer_dir: Path, group_id: int) -> list[dict]:
    """Scalars of each trajectory plus `oldest_version`, `routes_shape` ([L, K] or None) and `length`, without reading arrays: what
    planning a step needs."""
    with h5py.File(group_path(buffer_dir, group_id), "r", locking=False) as f:
        return [{**msgspec.json.decode(node.attrs["record"]), "length": len(node["tokens"])} for node in _stored(f)]


def _name(index: int) -> str:
    return f"{index:03d}"


def _stored(file: h5py.File) -> Iterator[h5py.Group]:
    """The trajectories of a file by index. Not by name: the thousandth comes behind, not between 100 and 101."""
    node = file["trajectories"]
    return (node[_name(n)] for n in range(len(node)))


def _write(node: h5py.Group, t: Trajectory) -> None:
    shape = None if t.routes is None else t.routes.shape[1:]
    record = msgspec.json.encode({**{k: getattr(t, k) for k in _SCALARS}, "oldest_version": t.oldest_version, "routes_shape": shape})
    node.attrs["record"] = record.decode()
    routes = header = None
    if t.routes is not None:
        from miles.buffer.routes import RouteReader, encode_routes  # numba takes its time to import, and who reads journals needs none

        routes = encode_routes(t.routes)
        header = RouteReader(routes).header
    node.attrs["digest"] = _digest(record, [getattr(t, k) for k in _ARRAYS], header)
    for name in _ARRAYS:
        array = getattr(t, name)
        packed = {} if name == "logprobs" else dict(hdf5plugin.Zstd(clevel=1), shuffle=array.dtype.itemsize > 1)
        node.create_dataset(name, data=array, **packed, chunks=True if packed and array.size else None)
    if routes is not None:
        node.create_dataset("routes", data=routes)


def _read(node: h5py.Group, layers: slice | Sequence[int] | None = None) -> Trajectory:
    arrays = [node[k][...] for k in _ARRAYS]
    routes = None
    if "routes" in node:
        from miles.buffer.routes import RouteReader

        routes = RouteReader(node["routes"])
    record = node.attrs["record"].encode()
    if _digest(record, arrays, routes.header if routes else None) != node.attrs["digest"]:
        raise StructureError(f"{node.file.filename}{node.name}: stored bytes do not match their digest", "the digest written with them",
                             "the group is dropped; check the file system", cause="digest")
    scalars = msgspec.json.decode(record)
    for derived in ("oldest_version", "routes_shape"):
        scalars.pop(derived)
    return Trajectory(**scalars, **dict(zip(_ARRAYS, arrays, strict=True)), routes=None if routes is None else routes.read(layers))


def _digest(record: bytes, arrays: list[np.ndarray], routes_header: bytes | None) -> str:
    h = xxhash.xxh3_128(record)
    for a in arrays:
        h.update(f"{a.dtype.str}{a.shape}".encode())
        h.update(np.ascontiguousarray(a))
    if routes_header is not None:
        h.update(routes_header)
    return h.hexdigest()
