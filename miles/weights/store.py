"""Weight versions on the shared file system.

    RUN/weights/v000012/MANIFEST.json    version, step, base, encoding, per tensor: shape, dtype, digest; of the file: size, digest
    RUN/weights/v000012/weights.safetensors | weights.patch

A keyframe holds every tensor and is an ordinary safetensors file with Hugging Face names. A delta is a patch file (miles.weights.patch)
against its base version. A version that was broadcast or sent point to point has a manifest and no file: its bytes went over the wire. A folder is renamed
into place whole, so a version either exists or does not; numbers are never reused, also not after a restart from an older checkpoint, so no version goes
backwards.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import save_file

from miles.core import Role, StructureError
from miles.rundir import RunDir, publish_dir, remove_tree, temp_path
from miles.rundir.publish import explain_os_errors
from miles.weights.digest import digest
from miles.weights.patch import Encoded, Patch, State, Tensors, encode_patch, write_patch
from miles.weights.retention import expired

_KEYFRAME, _DELTA, _NO_FILE = "weights.safetensors", "weights.patch", "no file"
FILES = ("keyframe", "delta")
"""Encodings that a reader finds in the folder; the others went over the wire."""
AT_ONCE = 128
"""Versions that are removed at a time: those that a run has left which never removed any are not in the way of what it publishes now."""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """MANIFEST.json. `extra` carries what a transport needs (the address of a broadcast group; which transfer, and what each
    receiver has got by it) and the engines' expected checksum. A tensor's digest is of its bytes (digest.digest), or of the digests of its pieces in order
    (p2p)."""

    version: int
    step: int
    base: int | None
    encoding: str  # keyframe | delta | broadcast | p2p
    epoch: int  # trainer epoch that published it
    published: float  # unix seconds
    tensors: dict[str, dict[str, Any]]
    file_size: int = 0
    file_digest: str = ""
    extra: dict[str, Any] = {}
    mark: str = ""  # xxh3-128 of this JSON with an empty mark

    @property
    def digest(self) -> str:
        """One digest over all tensors: what an engine acknowledges."""
        return combined_digest({k: v["digest"] for k, v in self.tensors.items()})


def combined_digest(digests: dict[str, str]) -> str:
    return xxhash.xxh3_128_hexdigest("\n".join(f"{k} {v}" for k, v in sorted(digests.items())).encode())


@dataclass(frozen=True)
class Step:
    """What reading one version gave."""

    state: State
    undo: Callable[[], None]


class WeightStore:
    """The folder RUN/weights. One publisher (the trainer leader), any number of readers."""

    def __init__(self, run: RunDir):
        self._run, self._dir = run, run.weights_dir
        self._decoded: tuple[tuple[int, ...], Manifest] | None = None  # what file was decoded last
        self._kinds: dict[int, str] = {}  # of versions that were looked at for it: its file, or `_NO_FILE`

    # -- reading -------------------------------------------------------------------------------------------------------------
    def versions(self) -> list[int]:
        """Published versions, oldest first. Lists the folder, which also refreshes a network file system's view of it."""
        return sorted(int(p.name[1:]) for p in self._dir.glob("v[0-9]*"))

    def newest(self) -> int | None:
        return max(self.versions(), default=None)

    def manifest(self, version: int) -> Manifest:
        """Raises FileNotFoundError for a version that does not exist (any more), StructureError for a manifest that cannot be read or is not what was
        published."""
        path = self._path(version) / "MANIFEST.json"
        try:
            file = version, *_file(path)
            if self._decoded is not None and self._decoded[0] == file:  # that of a large model takes half a second, and is asked for again and again
                return self._decoded[1]
            m = _decode(path.read_bytes())
        except FileNotFoundError:
            raise
        except OSError as e:
            if e.errno == errno.ESTALE:  # what a network file system says of a folder that was removed while it was looked at
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from e
            raise _damaged_manifest(path, str(e)) from e
        except (msgspec.MsgspecError, UnicodeDecodeError) as e:
            raise _damaged_manifest(path, str(e)) from e
        if m.version != version or m.mark != _mark(m):
            raise _damaged_manifest(path, f"it says v{m.version} and carries the mark of other content")
        self._decoded = file, m
        return m

    def chain(self, target: int, have: int | None) -> list[Manifest] | None:
        """Versions to read, in order, to get from `have` to `target`; None when no such path exists (a version without files lies between)."""
        out: list[Manifest] = []
        at: int | None = target
        while at is not None and at != have:
            try:
                m = self.manifest(at)
            except FileNotFoundError:
                return None
            if m.encoding not in FILES:
                return None
            out.append(m)
            if m.encoding == "keyframe":
                break
            at = m.base
        return out[::-1]

    def patch_file(self, manifest: Manifest) -> Path:
        return self._path(manifest.version) / _DELTA

    def read(self, manifest: Manifest, base: State, held: Manifest | None = None, memory: Callable[[int], Any] = bytearray) -> Step:
        """Go on to `manifest`'s version from its base's state (unused for a keyframe). Every digest is checked.

        A delta changes `base`'s tensors in place where it can, and `Step.undo` takes that back; `base` must own its memory.
        held: the manifest that `base` was verified by, if any: its digests must be those the delta was made against. memory: makes the bytes of a keyframe.
        Raises StructureError otherwise, with `base` as it was; FileNotFoundError when the version was removed meanwhile.
        """
        folder = self._path(manifest.version)
        if manifest.encoding == "keyframe":
            state = _load_keyframe(folder / _KEYFRAME, manifest, memory)
            step = Step(state, lambda: None)
        else:
            patch = Patch(self.patch_file(manifest), manifest.file_size, manifest.file_digest)
            state, _ = patch.apply(base, {n: i["digest"] for n, i in held.tensors.items()} if held is not None else None)
            step = Step(state, patch.undo)
        wrong = [n for n in state.keys() | manifest.tensors.keys() if n not in state or n not in manifest.tensors]
        if wrong:
            step.undo()
            raise StructureError(f"v{manifest.version}: file and manifest differ in the tensors they name: {sorted(wrong)[:5]}", "the same names in both",
                                 "the version is skipped; the next keyframe repairs it", cause="patch-file")
        return step

    # -- publishing ----------------------------------------------------------------------------------------------------------
    def publish(self, version: int, step: int, state: State, epoch: int, *, extra: Extra = dict) -> Manifest:
        """Publish a keyframe. Fenced by the trainer's epoch. `extra` is asked once the tensors are written."""
        return self._publish(version, step, None, "keyframe", epoch, lambda tmp: _save_keyframe(tmp / _KEYFRAME, state), extra)

    def encode_delta(self, base: int, tensors: Tensors, snapshot: State) -> Iterator[Encoded]:
        """The blocks of `tensors` as a delta to version `base`, whose state `snapshot` is: it becomes the new one meanwhile, so that there is never more than
        one in memory. When this raises, or is not exhausted, it is neither."""
        try:
            base_digests = {n: i["digest"] for n, i in self.manifest(base).tensors.items()}
        except (FileNotFoundError, StructureError):
            base_digests = None  # readers that have the base can use the delta all the same
        yield from encode_patch(tensors, snapshot, base_digests, advance=True)

    def publish_delta(self, version: int, step: int, encoded: Iterable[Encoded], epoch: int, *, base: int, extra: Extra = dict) -> Manifest:
        """Publish what `encode_delta` makes, which may be in another thread."""
        return self._publish(version, step, base, "delta", epoch, lambda tmp: _save_delta(tmp / _DELTA, encoded), extra)

    def publish_broadcast(self, version: int, step: int, state: State, epoch: int, *, base: int, extra: Extra) -> Manifest:
        """Announce a version whose bytes travel over a process group."""
        return self._publish(version, step, base, "broadcast", epoch, lambda _: (_describe(state), 0, ""), extra)

    def publish_filled(self, version: int, step: int, tensors: dict[str, dict[str, Any]], epoch: int, *, base: int, extra: Extra) -> Manifest:
        """Publish a version whose bytes every engine's rank has already. tensors: as in the manifest."""
        return self._publish(version, step, base, "p2p", epoch, lambda _: (tensors, 0, ""), extra)

    def _publish(self, version, step, base, encoding, epoch, save: Callable[[Path], _Saved], extra: Extra) -> Manifest:
        self._run.check_epoch(Role.TRAINER, epoch)
        final = self._path(version)
        tmp = temp_path(final)
        with explain_os_errors(final):
            tmp.mkdir()
            try:
                tensors, size, file_digest = save(tmp)
                m = Manifest(version, step, base, encoding, epoch, time.time(), tensors, size, file_digest, extra())
                m = msgspec.structs.replace(m, mark=_mark(m))
                (tmp / "MANIFEST.json").write_bytes(msgspec.json.encode(m))
                self._run.check_epoch(Role.TRAINER, epoch)  # again: writing may have taken long
            except BaseException:
                shutil.rmtree(tmp, ignore_errors=True)
                raise
        publish_dir(tmp, final)
        with contextlib.suppress(OSError):  # whoever needs it reads it
            self._decoded = (version, *_file(final / "MANIFEST.json")), m
        return m

    def retire(self, keep_keyframes: int, serving: Iterable[int] = ()) -> list[int]:
        """Remove the versions that nobody needs (miles.weights.retention), the oldest first, `AT_ONCE` at most. Returns those removed. Looks into the folders
        that are new to it, and decodes no manifest."""
        versions = self.versions()
        self._kinds = {v: kind for v in versions if (kind := self._kinds.get(v) or self._kind(v)) is not None}
        keyframes, wired = ([v for v, k in self._kinds.items() if k == kind] for kind in (_KEYFRAME, _NO_FILE))
        gone = expired(versions, keyframes, keep_keyframes, serving, wired)[:AT_ONCE]
        for v in gone:
            remove_tree(self._path(v))
        return gone

    def _kind(self, version: int) -> str | None:
        """The file of a version, which is there from the beginning or never (`_NO_FILE`); one that has lost it can be read no more than what never had one.
        None: the folder is gone, or cannot be read now."""
        try:
            names = os.listdir(self._path(version))
        except OSError:
            return None
        return next((name for name in (_KEYFRAME, _DELTA) if name in names), _NO_FILE)

    def _path(self, version: int) -> Path:
        return self._dir / f"v{version:06d}"


def _file(path: Path) -> tuple[int, int, int]:
    """What is another when the file is."""
    info = path.stat()
    return info.st_ino, info.st_size, info.st_mtime_ns


def _decode(data: bytes) -> Manifest:
    """Tensor by tensor: whoever does this in a thread lets others run in between, while one call for the manifest of a large model (17 MB) would hold Python's
    lock for half a second. Raises MsgspecError."""
    parts = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    tensors = msgspec.json.decode(parts.get("tensors", b"{}"), type=dict[str, msgspec.Raw])
    head = msgspec.json.decode(msgspec.json.encode(parts | {"tensors": {}}), type=Manifest)
    return msgspec.structs.replace(head, tensors={name: _TENSOR.decode(described) for name, described in tensors.items()})


_TENSOR = msgspec.json.Decoder(dict[str, Any])


def _mark(m: Manifest) -> str:
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(msgspec.structs.replace(m, mark="")))


def _damaged_manifest(path: Path, why: str) -> StructureError:
    return StructureError(f"{path} is not the manifest that was published: {why}", "the file as it was published",
                          "the version is skipped; the next keyframe repairs it", cause="manifest")


Extra = Callable[[], dict[str, Any]]
_Saved = tuple[dict[str, dict[str, Any]], int, str]  # the manifest's tensors, size and digest of the file


def _describe(state: State) -> dict[str, dict[str, Any]]:
    return {n: _description(t, digest(t)) for n, t in state.items()}


def _description(tensor: torch.Tensor, digest: str) -> dict[str, Any]:
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch."), "digest": digest}


def _save_delta(path: Path, encoded: Iterable[Encoded]) -> _Saved:
    with open(path, "wb") as f:
        written = write_patch(f, encoded)
    return written.tensors, written.size, written.digest


def _save_keyframe(path: Path, state: State) -> _Saved:
    try:
        save_file({n: t.contiguous() for n, t in state.items()}, path, metadata={"format": "pt"})
    except SafetensorError as e:  # its way to say what the operating system said
        if (code := re.search(r"os error (\d+)", str(e))) is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from e
    with open(path, "rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _describe(state), len(data), xxhash.xxh3_128_hexdigest(data)


def _load_keyframe(path: Path, manifest: Manifest, memory: Callable[[int], Any]) -> State:
    """The tensors in memory of their own, not in a mapping of the file: the file may be retired, and patches change them in place."""
    data = memory(manifest.file_size)
    try:
        with open(path, "rb") as f:
            complete = f.readinto(data) == len(data) and not f.read(1)
    except FileNotFoundError:
        raise
    except OSError as e:  # as where a network file system has lost the file in the middle
        raise StructureError(f"{path} cannot be read: {e}", "the file as it was published", "the version is skipped; the next keyframe repairs it",
                             cause="patch-file") from e
    if not complete or xxhash.xxh3_128_hexdigest(data) != manifest.file_digest:
        raise StructureError(f"{path} does not match its manifest", f"{manifest.file_size} bytes with digest {manifest.file_digest}",
                             "the version is skipped; the next keyframe repairs it", cause="patch-file")
    state = keyframe_tensors(data, manifest)
    for name, tensor in state.items():
        if digest(tensor) != (stated := manifest.tensors[name]["digest"]):
            raise StructureError(f"v{manifest.version}: {name} has another digest than the trainer's", stated,
                                 "the version is skipped; the next keyframe repairs it", cause="patch-digest")
    return state


def keyframe_tensors(data: Any, manifest: Manifest) -> State:
    """The tensors as they lie in the bytes of a keyframe's file: views. manifest: of a version with the same names, shapes and dtypes."""
    view = memoryview(data)
    start = 8 + int.from_bytes(view[:8], "little")
    header = msgspec.json.decode(view[8:start])
    state: State = {}
    for name in header.keys() - {"__metadata__"}:
        info, (begin, end) = manifest.tensors[name], header[name]["data_offsets"]
        dtype = getattr(torch, info["dtype"])
        flat = torch.frombuffer(data, dtype=dtype, offset=start + begin, count=(end - begin) // dtype.itemsize) if end > begin else torch.empty(0, dtype=dtype)
        state[name] = flat.view(info["shape"])
    return state
