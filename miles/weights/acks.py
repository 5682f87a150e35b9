"""What each engine serves: RUN/acks/rollout-<rank>.json, one small file per rank, replaced atomically; those of a pool in the pool's folder.

An acknowledgement is a lease too: miles.weights.retention.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from miles.rundir import RunDir, publish_bytes


class Ack(msgspec.Struct, frozen=True):
    """`version` is -1 while the engine has no weights of this run yet. `digest` is the engine's own memory, acknowledged."""

    rank: int
    epoch: int  # rollout epoch
    incarnation: int  # counts starts of this rank's engine within the epoch
    version: int
    digest: str
    error: str = ""
    released: int = -1  # shared GPUs: newest version after whose batch the rank gave the engine's memory back (miles.weights.turns)
    refused: int = -1  # the version that it could not read or must not take, for `error`; it waits for a newer one


def write_ack(run: RunDir, ack: Ack) -> None:
    publish_bytes(_path(run, ack.rank), msgspec.json.encode(ack))


def read_ack(run: RunDir, rank: int) -> Ack | None:
    """The rank's newest acknowledgement, of whatever epoch. None: there is none, or it cannot be read."""
    return _read(_path(run, rank))


def read_acks(run: RunDir, epoch: int | None = None) -> dict[int, Ack]:
    """Acknowledgements by rank: those of the given rollout epoch (others are ignored), or of whatever epoch. One that cannot be read is as if it were
    not there."""
    return {a.rank: a for a in _read_all(run.acks_dir) if epoch is None or a.epoch == epoch}


def serving(run: RunDir) -> list[int]:
    """Version of every rank that lives, as far as epochs say: the run's own, and those of its pools."""
    folders = {0: run.acks_dir} | {pool: run.pool_dir(pool) / "acks" for pool in run.pools()}
    return [a.version for pool, folder in folders.items() for a in _read_all(folder) if a.epoch == run.pool_epoch(pool)]


def _read_all(folder: Path) -> list[Ack]:
    return [ack for path in sorted(folder.glob("rollout-*.json")) if (ack := _read(path)) is not None]


def _read(path: Path) -> Ack | None:
    with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return msgspec.json.decode(path.read_bytes(), type=Ack)
    return None


def _path(run: RunDir, rank: int) -> Path:
    return run.acks_dir / f"rollout-{rank:04d}.json"
