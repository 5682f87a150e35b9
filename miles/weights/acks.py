"""What each engine serves: RUN/acks/rollout-<rank>.json, one small file per rank, replaced atomically."""

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


def write_ack(run: RunDir, ack: Ack) -> None:
    publish_bytes(_path(run, ack.rank), msgspec.json.encode(ack))


def read_ack(run: RunDir, rank: int) -> Ack | None:
    """The rank's newest acknowledgement, of whatever epoch. None: there is none, or it cannot be read."""
    with contextlib.suppress(FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
        return msgspec.json.decode(_path(run, rank).read_bytes(), type=Ack)
    return None


def read_acks(run: RunDir, epoch: int | None = None) -> dict[int, Ack]:
    """Acknowledgements by rank: those of the given rollout epoch (others are ignored), or of whatever epoch. One that cannot be read is as if it were
    not there."""
    ranks = [int(p.stem.rpartition("-")[2]) for p in sorted(run.acks_dir.glob("rollout-*.json"))]
    acks = [ack for rank in ranks if (ack := read_ack(run, rank)) is not None]
    return {a.rank: a for a in acks if epoch is None or a.epoch == epoch}


def _path(run: RunDir, rank: int) -> Path:
    return run.acks_dir / f"rollout-{rank:04d}.json"
