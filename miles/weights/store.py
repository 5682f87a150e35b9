"""Weight versions on the shared file system.

    RUN/weights/v000012/MANIFEST.json    version, step, base, encoding, per tensor: shape, dtype, digest, kind; per file: size, digest
    RUN/weights/v000012/weights.safetensors

A keyframe holds every tensor and is an ordinary safetensors file with Hugging Face names. A delta holds, per changed tensor, either the
whole tensor under its name or `NAME::positions` (int32) and `NAME::values` (bit patterns) against its base version. A broadcast version
has a manifest and no file: its bytes went over the wire. A folder is renamed into place whole, so a version either exists or does not;
numbers are never reused, also not after a restart from an older checkpoint, so no version goes backwards.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import save_file

from miles.core import Role, StructureError, WeightVersion
from miles.rundir import RunDir, publish_dir, remove_tree, temp_path
from miles.rundir.publish import explain_os_errors
from miles.weights.patch import apply_sparse, diff, digest

State = dict[str, torch.Tensor]
"""Hugging Face name -> CPU tensor."""

_FILE = "weights.safetensors"


class Manifest(msgspec.Struct, frozen=True):
    """MANIFEST.json. `extra` carries what a transport needs (the address of a broadcast group) and the engines' expected checksum."""

    version: int
    step: int
    base: int | None
    encoding: str  # keyframe | delta | broadcast
    epoch: int  # trainer epoch that published it
    published: float  # unix seconds
    tensors: dict[str, dict[str, Any]]
    file_size: int = 0
    file_digest: str = ""
    extra: dict[str, Any] = {}

    def as_version(self) -> WeightVersion:
        t = self.tensors
        return WeightVersion(self.version, self.step, self.base, self.encoding, {k: v["digest"] for k, v in t.items()},
                             {k: tuple(v["shape"]) for k, v in t.items()}, {k: v["dtype"] for k, v in t.items()})

    @property
    def digest(self) -> str:
        """One digest over all tensors: what an engine acknowledges."""
        return combined_digest({k: v["digest"] for k, v in self.tensors.items()})


def combined_digest(digests: dict[str, str]) -> str:
    return xxhash.xxh3_128_hexdigest("\n".join(f"{k} {v}" for k, v in sorted(digests.items())).encode())


class WeightStore:
    """The folder RUN/weights. One publisher (the trainer leader), any number of readers."""

    def __init__(self, run: RunDir):
        self._run, self._dir = run, run.weights_dir

    # -- reading -------------------------------------------------------------------------------------------------------------
    def versions(self) -> list[int]:
        """Published versions, oldest first. Lists the folder, which also refreshes a network file system's view of it."""
        return sorted(int(p.name[1:]) for p in self._dir.glob("v[0-9]*"))

    def newest(self) -> int | None:
        return max(self.versions(), default=None)

    def manifest(self, version: int) -> Manifest:
        return msgspec.json.decode((self._path(version) / "MANIFEST.json").read_bytes(), type=Manifest)

    def chain(self, target: int, have: int | None) -> list[Manifest] | None:
        """Versions to read, in order, to get from `have` to `target`; None when no such path exists (a broadcast lies between)."""
        out: list[Manifest] = []
        at: int | None = target
        while at is not None and at != have:
            try:
                m = self.manifest(at)
            except FileNotFoundError:
                return None
            if m.encoding == "broadcast":
                return None
            out.append(m)
            if m.encoding == "keyframe":
                break
            at = m.base
        return out[::-1]

    def read(self, manifest: Manifest, base: State) -> State:
        """The full state of `manifest`'s version from its base's state. Every digest is checked; raises StructureError otherwise."""
        path = self._path(manifest.version) / _FILE
        data = path.read_bytes()
        if len(data) != manifest.file_size or xxhash.xxh3_128_hexdigest(data) != manifest.file_digest:
            raise StructureError(f"{path} does not match its manifest", f"{manifest.file_size} bytes with digest {manifest.file_digest}",
                                 "the version is skipped; the next keyframe repairs it", cause="patch-file")
        del data
        state: State = {}
        with safe_open(path, framework="pt") as f:
            for name, info in manifest.tensors.items():
                if info["kind"] == "dense":
                    tensor = f.get_tensor(name)
                elif name not in base:
                    raise StructureError(f"v{manifest.version}: {name} needs base v{manifest.base}, which the reader lacks",
                                         "the base state", "read from the last keyframe", cause="patch-base")
                elif info["kind"] == "same":
                    tensor = base[name]
                else:
                    tensor = apply_sparse(base[name], f.get_tensor(f"{name}::positions"), f.get_tensor(f"{name}::values"))
                if digest(tensor) != info["digest"]:
                    raise StructureError(f"v{manifest.version}: {name} has another digest than the trainer's", info["digest"],
                                         "the reader starts again from the last keyframe", cause="patch-digest")
                state[name] = tensor
        return state

    # -- publishing ----------------------------------------------------------------------------------------------------------
    def publish(self, version: int, step: int, state: State, epoch: int, *, previous: State | None = None, base: int | None = None,
                extra: dict[str, Any] | None = None) -> Manifest:
        """Publish a keyframe, or with `previous` (the state of version `base`) a delta. Fenced by the trainer's epoch."""
        payload: State = {}
        tensors: dict[str, dict[str, Any]] = {}
        for name, tensor in state.items():
            kind, positions, values = diff(tensor, previous[name]) if previous is not None else ("dense", None, tensor.contiguous())
            if kind == "dense":
                payload[name] = values
            elif kind == "sparse":
                payload[f"{name}::positions"], payload[f"{name}::values"] = positions, values
            tensors[name] = _describe(tensor, kind)
        encoding = "keyframe" if previous is None else "delta"
        return self._publish(version, step, base if previous is not None else None, encoding, epoch, tensors, payload, extra or {})

    def publish_broadcast(self, version: int, step: int, state: State, epoch: int, *, base: int, extra: dict[str, Any]) -> Manifest:
        """Announce a version whose bytes travel over a process group."""
        tensors = {name: _describe(t, "dense") for name, t in state.items()}
        return self._publish(version, step, base, "broadcast", epoch, tensors, None, extra)

    def _publish(self, version, step, base, encoding, epoch, tensors, payload, extra) -> Manifest:
        self._run.check_epoch(Role.TRAINER, epoch)
        final = self._path(version)
        tmp = temp_path(final)
        with explain_os_errors(final):
            tmp.mkdir()
            size, file_digest = 0, ""
            if payload is not None:
                save_file(payload, tmp / _FILE, metadata={"format": "pt"})
                h = xxhash.xxh3_128()
                with open(tmp / _FILE, "rb") as f:
                    while block := f.read(1 << 24):
                        h.update(block)
                        size += len(block)
                file_digest = h.hexdigest()
            m = Manifest(version, step, base, encoding, epoch, time.time(), tensors, size, file_digest, extra)
            (tmp / "MANIFEST.json").write_bytes(msgspec.json.encode(m))
        publish_dir(tmp, final)
        return m

    def retire(self, keep_keyframes: int) -> list[int]:
        """Remove versions older than the `keep_keyframes`-th newest keyframe. Returns those removed."""
        versions = self.versions()
        keyframes = [v for v in versions if self.manifest(v).encoding == "keyframe"]
        if len(keyframes) <= keep_keyframes:
            return []
        gone = [v for v in versions if v < keyframes[-keep_keyframes]]
        for v in gone:
            remove_tree(self._path(v))
        return gone

    def _path(self, version: int) -> Path:
        return self._dir / f"v{version:06d}"


def _describe(tensor: torch.Tensor, kind: str) -> dict[str, Any]:
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch."), "digest": digest(tensor), "kind": kind}
