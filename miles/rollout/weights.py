"""Keeps one engine at the newest published weights: pull while it generates, pause, apply, resume, acknowledge with a digest.

    behind?  ->  is it this model's? read and verify it (the engine goes on generating)  ->  otherwise refuse it, and go on with what is served
             ->  pause  ->  the engine patches its own memory and checks it, or loads the rank's copy, whose checksum its memory must have
             ->  resume, acknowledge  ->  otherwise the engine is poisoned, and stays paused until it is restarted

The ranks of a node share what is read, and the copy (miles.weights.shared). It lies in the file that the engine loads (miles.engine.handover), so that
nothing is copied while it stands still. With trainer.lora they share the adapters, and each makes its copy of them and the model folder (miles.weights.merged).

A poisoned engine serves nobody: the caller restarts it and it starts again from a keyframe.

A version that was sent point to point is in the rank's memory when it is published (miles.weights.p2p.receive); the engine loads it from there, also one that
has just started.

On GPUs shared with the trainer the engine gives its memory back when its turn is over (`release`), and takes it again to load the next version.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from miles.core import EnvironmentFault, MilesError, StructureError
from miles.core.at_work import at_work
from miles.engine import EngineClient
from miles.engine.digest import combined_checksum, expected_checksums
from miles.engine.handover import HANDOVER, Handover, told
from miles.log import RunLog
from miles.rundir import RunDir
from miles.weights.acks import Ack
from miles.weights.merged import MergedModel
from miles.weights.node import Memory, NodeFolder
from miles.weights.patch import State
from miles.weights.required import required_tensors
from miles.weights.shared import NodeCopy, NodePatches
from miles.weights.store import Manifest, WeightStore
from miles.weights.turns import EngineTurns

if TYPE_CHECKING:
    from miles.weights.p2p.receive import Receiver

Result = TypeVar("Result")
RELEASED = {"all": ("kv_cache", "weights", "cuda_graph"), "kv_cache": ("kv_cache",)}  # engine.release -> SGLang's tags


def in_place(chain: list[Manifest] | None) -> list[Manifest]:
    """The patches of a chain if an engine can apply them to its own memory: that is the bytes of each version, in its dtype. Otherwise none."""
    def fits(m: Manifest) -> bool:
        how = m.extra["checksum_of"]
        return m.encoding == "delta" and how is not None and "adapters" not in m.extra and all(t["dtype"] == how["dtype"] for t in m.tensors.values())

    return chain if chain and all(map(fits, chain)) else []


def _patch_name(manifest: Manifest) -> str:
    return f"v{manifest.version}.patch"


class EnginePoisoned(MilesError):
    """The engine's memory is not a published version (a partial apply, another digest): restart it."""


class EngineWeights:
    """Weights of one engine incarnation. `version` is -1 until it serves a version of this run."""

    def __init__(self, run: RunDir, rank: int, epoch: int, incarnation: int, client: EngineClient, log: RunLog, turns: EngineTurns,
                 receiver: Receiver | None):
        """receiver: of weights sent point to point, where they may be."""
        self._run, self._receiver = run, receiver
        self._rank, self._epoch, self._incarnation, self._turns = rank, epoch, incarnation, turns
        self._client, self._log, self._pause = client, log, run.config.weights.pause
        self._flush = self._pause == "retract"  # retracted requests must not find their old KV in the prefix cache
        self.store = WeightStore(run)
        self._handover, self._node = Handover(), NodeFolder(HANDOVER, run)
        self._copy, self._patches = NodeCopy(self.store, self._node.shared("copy")), NodePatches(self.store, self._node.shared("patches"))
        self._merged = MergedModel(run.config.model.path) if run.config.trainer.lora else None
        self._served: Manifest | None = None
        self._group = ""  # the broadcast group that the engine is in
        self._parts = RELEASED[run.config.engine.release]
        self._released: tuple[float, float] | None = None  # (seconds it took, when), while the engine is without memory
        self.version = self._refused = -1
        self._acknowledge(-1, "")

    def close(self) -> None:
        """Let go of the host copy."""
        self._forget()
        self._handover.close()
        self._node.close()

    async def follow(self) -> bool:
        """Bring the engine to the newest version if that can be done now. Returns whether its version changed.

        Raises EnginePoisoned when the engine may hold a mixture of versions.
        """
        newest = self.store.newest()
        if newest is None or newest <= max(self.version, self._refused):
            return False
        try:
            manifest = await self._in_thread(self._look, newest)
        except (StructureError, FileNotFoundError) as e:
            self._refuse(newest, str(e))
            return False
        if manifest.encoding == "broadcast":
            member = manifest.extra["group"]["members"].get(str(self._rank))
            if member is None or manifest.base != self.version:
                return False  # not for us; the trainer sees our acknowledgement and publishes a keyframe
            await self._apply_broadcast(manifest, member)
        elif manifest.encoding == "p2p":
            if self._receiver is None or not self._receiver.holds(manifest):
                return False  # likewise
            await self._apply_image(manifest)
        elif not await self._apply_files(newest):
            return False
        return True

    @property
    def released(self) -> bool:
        """Whether the engine is without memory now."""
        return self._released is not None

    async def release(self) -> None:
        """Shared GPUs: the batch of the version served is complete. Give the memory back, then acknowledge. Raises EnginePoisoned when that fails."""
        start = time.monotonic()
        try:
            await self._client.pause("retract")
            await self._client.release_memory(self._parts)
        except EnvironmentFault as e:
            raise EnginePoisoned(f"rank {self._rank}: its memory was not released: {e}", "an engine that gives its memory back",
                                 "nothing: the engine is stopped, which frees it") from e
        self._released = (time.monotonic() - start, time.monotonic())
        self._acknowledge(self.version, "", released=self.version)

    def _look(self, version: int) -> Manifest:
        """The manifest of a version that the engine can take. Raises FileNotFoundError or StructureError."""
        manifest = self.store.manifest(version)
        self._check(manifest)
        return manifest

    async def _take(self) -> None:
        """Memory again, after `release`."""
        if self._released is not None:
            release_s, at = self._released
            start = time.monotonic()
            await self._client.take_memory(self._parts)
            self._log.row("turns", rank=self._rank, version=self.version, release_s=release_s, away_s=start - at, resume_s=time.monotonic() - start)
            self._released = None

    def _check(self, manifest: Manifest) -> None:
        """Before the engine hears of a version. Raises StructureError for one that the engine would take in part, or die of: SGLang reports success for a
        tensor that it does not know, and keeps what it has of one that is missing, which no checksum shows on a GPU."""
        if self._merged is None:  # which fits the model because it is made from its folder
            self._client.check_tensors({n: (tuple(t["shape"]), t["dtype"]) for n, t in manifest.tensors.items()})
        if missing := self._required - manifest.tensors.keys():
            raise StructureError(f"v{manifest.version} lacks {len(missing)} of {len(self._required)} tensors: {sorted(missing)[:5]}",
                                 "every tensor that is trained in every version", "the version is skipped: check what the trainer exports", cause="weights:missing")

    @cached_property
    def _required(self) -> frozenset[str]:
        return required_tensors(self._run.config, () if self._merged is not None else self._client.parameters)

    async def _apply_files(self, newest: int) -> bool:
        start = time.monotonic()
        try:
            if self.version >= 0 and self._released is None and (patches := await self._in_thread(self._in_place, newest)):
                await self._apply_patches(patches, start)
                return True
            self._patches.forget()
            manifest = await self._in_thread(self._copy.advance, newest)
        except (StructureError, FileNotFoundError) as e:
            self._refuse(newest, str(e))
            return False
        if manifest is None:
            self._refuse(newest, f"v{newest}: a version that it goes on from is gone")
            return False
        try:
            if manifest.version > newest:
                return False  # another rank of this node has seen a newer one: so will the next look
            await self._apply_copy(manifest, start)
        except StructureError as e:  # adapters of another model
            self._refuse(newest, str(e))
            return False
        finally:
            self._copy.release()
        return True

    def _in_place(self, newest: int) -> list[Manifest]:
        return in_place(self.store.chain(newest, self.version))

    async def _apply_copy(self, manifest: Manifest, start: float) -> None:
        """Have the engine load the host copy, which nobody changes meanwhile."""
        state, memory = await self._in_thread(self._weights, manifest)
        expected = await self._expected(manifest, state)
        pulled = time.monotonic()
        # A fresh engine has the model folder's weights, one that has released them has none.
        unchanged = self._served is not None and self._served.digest == manifest.digest and not (self._released is not None and "weights" in self._parts)
        self._handover.show("model.safetensors", memory.path)
        async def apply():
            await self._take()
            if unchanged:
                await self._client.set_version(manifest.version)
            else:
                await self._client.update_from_folder(self._handover.folder, manifest.version, flush=self._flush)
        await self._while_paused(apply, manifest, start, pulled, manifest.file_size, "disk", expected, shared=not self._copy.pulled)

    async def _in_thread(self, function: Callable[..., Result], *args) -> Result:
        """What works on memory and locks of the node in a thread ends, even when this is cancelled, before anything else here lets go of them."""
        work = asyncio.ensure_future(asyncio.to_thread(at_work("reading a version of the weights")(function), *args))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            self._node.give_up()
            await asyncio.wait({work})
            work.exception()  # of what nobody waits for any more
            raise

    def _weights(self, manifest: Manifest) -> tuple[State, Memory]:
        """What the engine is to hold of the version that the copy is at, and the memory in which the file of it lies."""
        if self._merged is None:
            return self._copy.state, self._copy.memory
        return self._merged.make(manifest.extra["adapters"], self._copy.state), self._merged.memory

    async def _apply_patches(self, patches: list[Manifest], start: float) -> None:
        """Have the engine apply them to its own memory: where that is the version's bytes, it needs no host copy."""
        self._forget_copy()
        try:
            paths = await self._in_thread(self._fetch, patches)
            if len(paths) == 1:  # of several, each needs what the one before makes
                await self._rehearse(paths[0], patches[0])
            pulled = time.monotonic()
            async def apply():
                for path, m in zip(paths, patches, strict=True):
                    await self._client.apply_patch(path, m.version, flush=self._flush)
            await self._while_paused(apply, patches[-1], start, pulled, sum(m.file_size for m in patches), "disk", "", shared=not self._patches.pulled)
        finally:
            for m in patches:
                self._handover.hide(_patch_name(m))
                self._handover.hide(told(_patch_name(m)).name)

    async def _rehearse(self, path: Path, manifest: Manifest) -> None:
        try:
            await self._client.rehearse_patch(path)
        except EnvironmentFault as e:
            self._acknowledge(-1, "", error=str(e))
            raise EnginePoisoned(f"rank {self._rank}: its memory is not what v{manifest.version} goes on from: {e}", "an engine at exactly one version",
                                 "nothing: the engine is restarted from a keyframe") from e

    def _fetch(self, patches: list[Manifest]) -> list[Path]:
        """The patch files, verified, where the engine can read them. Raises StructureError or FileNotFoundError."""
        return [self._handover.show(_patch_name(m), memory.path) for m, memory in zip(patches, self._patches.fetch(patches), strict=True)]

    def _forget(self) -> None:
        """What was read is no longer what the engine goes on from (a broadcast went past it)."""
        self._forget_copy()
        self._patches.forget()
        if self._merged is not None:
            self._merged.forget()

    def _forget_copy(self) -> None:
        self._handover.hide("model.safetensors")
        self._copy.forget()

    @staticmethod
    async def _expected(manifest: Manifest, state: State) -> str:
        """The checksum of an engine that holds this state; empty where it cannot be foretold."""
        how = manifest.extra["checksum_of"]
        return "" if how is None else await asyncio.to_thread(lambda: combined_checksum(expected_checksums(state, **how)))

    async def _apply_broadcast(self, manifest: Manifest, member: int) -> None:
        start = time.monotonic()
        group = manifest.extra["group"]
        names = list(manifest.tensors)
        async def apply():
            if group["name"] != self._group:
                if self._group:  # another engine or the trainer has restarted: its group is of no more use
                    await self._client.destroy_broadcast(self._group)
                    self._group = ""
                await self._client.init_broadcast(group["address"], group["port"], rank=member, world_size=group["world"], group=group["name"],
                                                  backend="nccl" if torch.cuda.is_available() else "gloo")
                self._group = group["name"]
            await self._client.update_from_broadcast(names, [manifest.tensors[n]["dtype"] for n in names], [manifest.tensors[n]["shape"] for n in names],
                                                     manifest.version, group=group["name"], flush=self._flush)
        self._forget()
        size = sum(torch.Size(t["shape"]).numel() * getattr(torch, t["dtype"]).itemsize for t in manifest.tensors.values())
        await self._while_paused(apply, manifest, start, start, size, "broadcast", manifest.extra["checksum"])

    async def _apply_image(self, manifest: Manifest) -> None:
        start = time.monotonic()
        with self._receiver.reading() as image:
            expected = await self._expected(manifest, image.state())
            pulled = time.monotonic()
            async def apply():
                await self._client.update_from_folder(image.folder, manifest.version, flush=self._flush)
            self._forget()
            await self._while_paused(apply, manifest, start, pulled, image.size, "p2p", expected)

    async def _while_paused(self, apply, manifest: Manifest, start: float, pulled: float, size: int, transport: str, expected: str, *,
                            shared: bool = False) -> None:
        """expected: checksum of the engine's memory; empty where the engine has checked it itself, or where it cannot be foretold: then the digests of what
        was handed over vouch. shared: another rank of the node had read it."""
        try:
            await self._client.pause(self._pause)
            paused = time.monotonic()
            await apply()
            applied = time.monotonic()
            got = combined_checksum(await self._client.checksums()) if expected else manifest.digest
            verified = time.monotonic()
            ok = not expected or got == expected
            if ok:
                await self._client.resume()
        except (EnvironmentFault, StructureError) as e:
            self._acknowledge(-1, "", error=str(e))
            raise EnginePoisoned(f"rank {self._rank}: v{manifest.version} was not applied whole: {e}", "an engine at exactly one version",
                                 "nothing: the engine is restarted from a keyframe") from e
        self._log.row("weights", version=manifest.version, step=manifest.step, transport=transport, bytes=size, shared=shared,
                      wait_s=max(0.0, time.time() - manifest.published - (time.monotonic() - start)), pull_s=pulled - start,
                      pause_s=time.monotonic() - pulled, apply_s=applied - paused, verify_s=verified - applied, total_s=time.time() - manifest.published, ok=ok)
        if not ok:
            self._acknowledge(-1, got, error="digest")
            raise EnginePoisoned(f"rank {self._rank}: after v{manifest.version} the engine's memory has checksum {got}", expected,
                                 "nothing: the engine is restarted from a keyframe")
        self.version, self._served = manifest.version, manifest
        self._acknowledge(self.version, got)

    def _refuse(self, version: int, why: str) -> None:
        """Go on with what is served, and do not look at `version` again: the trainer publishes a newer one, whole, when it hears of this."""
        self._refused = version
        print(f"rank {self._rank}: v{version} is refused: {why}", flush=True)
        self._acknowledge(self.version, "", error=why, refused=version)

    def _acknowledge(self, version: int, digest: str, error: str = "", released: int | None = None, refused: int = -1) -> None:
        self._turns.acknowledge(Ack(self._rank, self._epoch, self._incarnation, version, digest, error, refused=refused), released)
