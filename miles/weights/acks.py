"""What each engine says it serves: RUN/acks/rollout-<rank>.json, one small file per rank, replaced atomically."""

from __future__ import annotations

import contextlib

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


def write_ack(run: RunDir, ack: Ack) -> None:
    publish_bytes(run.acks_dir / f"rollout-{ack.rank:04d}.json", msgspec.json.encode(ack))


def read_acks(run: RunDir, epoch: int) -> dict[int, Ack]:
    """Acknowledgements of the given rollout epoch by rank; those of older epochs, or that cannot be read, are as if they were not there."""
    acks = []
    for path in sorted(run.acks_dir.glob("rollout-*.json")):
        with contextlib.suppress(FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
            acks.append(msgspec.json.decode(path.read_bytes(), type=Ack))
    return {a.rank: a for a in acks if a.epoch == epoch}
