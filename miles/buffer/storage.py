"""HDF5 storage of trajectories.

    parts/g00000012s003.h5         one finished sample of a group that is still open: its leaves, /trajectories/000, /trajectories/001, ...
    groups/<2 hex>/g00000012.h5    sealed group: the same of all its samples, in the order of (sample, leaf)

Each trajectory is an HDF5 group with datasets tokens int32 [T], loss_mask uint8 [T], logprobs float32 [T], versions int32 [T] and, unless the
model is dense, routes uint8 [bytes]: the contiguous blob of `miles.buffer.routes`, whose layers can be read one by one. Scalars are in the
attribute `record` (JSON). `digest` is the xxh3-128 of record, arrays and the header of the routes, which holds a digest of each of their
layers: a reader of some layers has verified all that it returns. Tokens, masks and versions are zstd-compressed; log-probabilities do not
compress and are stored as they are. Sealing copies the stored bytes of the parts without decoding them.

A file is made in memory and written by one call: the file system sees one large write instead of many small ones, and says itself what it
refuses (a full disk inside HDF5 has no error number, and leaves an open file behind).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import h5py
import hdf5plugin
import msgspec
import numpy as np
import xxhash

from miles.core import Group, StructureError, Trajectory
from miles.rundir.publish import explain_os_errors, fsync_dir, publish_bytes

_ARRAYS = ("tokens", "loss_mask", "logprobs", "versions")
UNREADABLE = (StructureError, OSError, RuntimeError, KeyError, ValueError, msgspec.DecodeError)  # what a missing, torn or damaged file raises: HDF5 has no error of its own
_IMAGES = itertools.count()
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
    records = [_record(t) for t in leaves]  # the codec outside of HDF5, whose calls hold a lock of the whole process

    def fill(f: h5py.File) -> None:
        node = f.create_group("trajectories")
        for n, (t, record) in enumerate(zip(leaves, records, strict=True)):
            _write(node.create_group(_name(n)), t, *record)

    final = part_path(buffer_dir, first.group_id, first.sample)
    publish_bytes(final, _image(fill))
    return final


def read_part_summaries(buffer_dir: Path, group_id: int, samples: Sequence[int]) -> tuple[list[dict], list[int]]:
    """(summaries of the trajectories of these parts, as of `read_summaries`; the samples whose part cannot be read)."""
    items, damaged = [], []
    for sample in sorted(samples):
        try:
            items += _summaries(part_path(buffer_dir, group_id, sample))
        except UNREADABLE:
            damaged.append(sample)
    return items, damaged


def seal_parts(buffer_dir: Path, group_id: int, samples: Sequence[int]) -> int:
    """Copy parts into the sealed group file and publish it exclusively. Returns its size in bytes.

    Raises FileExistsError when the group was sealed already (by a process of an older epoch that got there first).
    """
    def fill(out: h5py.File) -> None:
        out.attrs["group_id"] = group_id
        node = out.create_group("trajectories")
        for sample in sorted(samples):
            with h5py.File(part_path(buffer_dir, group_id, sample), "r", locking=False) as part:
                for leaf in _stored(part):
                    part.copy(leaf, node, name=_name(len(node)))

    final, image = group_path(buffer_dir, group_id), _image(fill)
    if not final.parent.is_dir():
        with explain_os_errors(final):
            final.parent.mkdir(exist_ok=True)
            fsync_dir(final.parent.parent)
    publish_bytes(final, image, exclusive=True)
    return len(image)


def remove_parts(buffer_dir: Path, group_id: int, samples: Sequence[int] | None = None) -> None:
    """Remove the parts of `samples`. None: of all that are there, which lists the parts of every open group."""
    known = None if samples is None else [part_path(buffer_dir, group_id, s) for s in samples]
    for path in (buffer_dir / "parts").glob(f"g{group_id:08d}s*.h5") if known is None else known:
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
    return _summaries(group_path(buffer_dir, group_id))


def stored_groups(buffer_dir: Path) -> list[int]:
    """Every sealed group on disk. Lists all folders."""
    return [int(path.stem[1:]) for path in (buffer_dir / "groups").glob("*/g*.h5")]


def _image(fill: Callable[[h5py.File], None]) -> bytes:
    """The bytes of the HDF5 file that `fill` makes."""
    with h5py.File(f"image-{next(_IMAGES)}", "w", driver="core", backing_store=False, block_size=1 << 20, libver="earliest") as f:
        fill(f)
        f.flush()
        return f.id.get_file_image()


def _summaries(path: Path) -> list[dict]:
    with h5py.File(path, "r", locking=False) as f:
        return [{**msgspec.json.decode(node.attrs["record"]), "length": len(node["tokens"])} for node in _stored(f)]


def _name(index: int) -> str:
    return f"{index:03d}"


def _stored(file: h5py.File) -> Iterator[h5py.Group]:
    """The trajectories of a file by index. Not by name: the thousandth comes behind, not between 100 and 101."""
    node = file["trajectories"]
    return (node[_name(n)] for n in range(len(node)))


def _record(t: Trajectory) -> tuple[bytes, np.ndarray | None, str]:
    """(scalars as JSON, blob of the routes, digest)."""
    shape = None if t.routes is None else t.routes.shape[1:]
    record = msgspec.json.encode({**{k: getattr(t, k) for k in _SCALARS}, "oldest_version": t.oldest_version, "routes_shape": shape})
    routes = header = None
    if t.routes is not None:
        from miles.buffer.routes import RouteReader, encode_routes  # numba takes its time to import, and who reads journals needs none

        routes = encode_routes(t.routes)
        header = RouteReader(routes).header
    return record, routes, _digest(record, [getattr(t, k) for k in _ARRAYS], header)


def _write(node: h5py.Group, t: Trajectory, record: bytes, routes: np.ndarray | None, digest: str) -> None:
    node.attrs["record"] = record.decode()
    node.attrs["digest"] = digest
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
