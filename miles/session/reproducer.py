"""What is kept of a session that was dropped: a small file from which its turns, and so its refusal, can be made again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from miles.core import StructureError, Turn


def reproducer(turns: Sequence[Turn], error: StructureError, **more: Any) -> bytes:
    """JSON. Of each input only what differs from all tokens before it is written, so the file grows with the conversation and not with its square;
    of routes (too large) only where they begin and their shape. `more`: whatever helps to read it, e.g. messages."""
    before, rows = np.zeros(0, np.int32), []
    for turn in turns:
        n = min(len(before), len(turn.input_ids))
        different = np.flatnonzero(before[:n] != turn.input_ids[:n])
        kept = int(different[0]) if len(different) else n
        rows.append({"kept": kept, "input_ids": turn.input_ids[kept:].tolist(), "output_ids": turn.output_ids.tolist(), "logprobs": turn.logprobs.tolist(),
                     "versions": turn.versions.tolist(), "finish_reason": turn.finish_reason, "routes_start": turn.routes_start,
                     "routes": None if turn.routes is None else {"shape": turn.routes.shape, "dtype": str(turn.routes.dtype)}})
        before = np.concatenate([turn.input_ids, turn.output_ids])
    return msgspec.json.encode({"cause": error.cause, "error": str(error), **more, "turns": rows})


def read_turns(path: Path) -> list[Turn]:
    """The turns of a reproducer; routes are zeros of the right shape."""
    before, turns = np.zeros(0, np.int32), []
    for row in msgspec.json.decode(path.read_bytes())["turns"]:
        inputs = np.concatenate([before[: row["kept"]], np.array(row["input_ids"], np.int32)])
        routes = np.zeros(row["routes"]["shape"], row["routes"]["dtype"]) if row["routes"] else None
        turns.append(Turn(inputs, np.array(row["output_ids"], np.int32), np.array(row["logprobs"], np.float32), np.array(row["versions"], np.int32),
                          row["finish_reason"], routes=routes, routes_start=row["routes_start"]))
        before = np.concatenate([inputs, turns[-1].output_ids])
    return turns
