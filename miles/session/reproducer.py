"""What is kept of a session that was dropped: a small file from which its history, and so its refusal, can be made again.

What does not fit together in the history itself (assembly:*) is made again by `assemble_leaves(read_history(file))`. Everything else was refused before it
came into the history, and is the file's `evidence`: the request (history:*, request:*, tokenization:*), also that of a reply which could not be taken; with it, that reply as the
engine gave it, without its routes (reply:*), or the ids that it sampled (stream:differs).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from miles.core import StructureError, Turn
from miles.session.history import ROOT, Checkpoint, History


def reproducer(history: History, error: StructureError, **more: Any) -> bytes:
    """JSON: the tree with its messages. Of each input only what differs from all tokens of the turn it goes on from is written, so the file grows
    with the conversations and not with their squares; of routes (too large) only where they begin and their shape. `error.evidence` is written as it is, where JSON can hold it. `more`: whatever helps to read it."""
    rows = []
    for node in history.nodes:
        turn, before = node.turn, _before(history.nodes, node.parent)
        n = min(len(before), len(turn.input_ids))
        different = np.flatnonzero(before[:n] != turn.input_ids[:n])
        kept = int(different[0]) if len(different) else n
        rows.append({"parent": node.parent, "appended": node.appended, "reply": node.reply, "kept": kept, "input_ids": turn.input_ids[kept:].tolist(),
                     "output_ids": turn.output_ids.tolist(), "logprobs": turn.logprobs.tolist(), "versions": turn.versions.tolist(),
                     "finish_reason": turn.finish_reason, "routes_start": turn.routes_start,
                     "routes": None if turn.routes is None else {"shape": turn.routes.shape, "dtype": str(turn.routes.dtype)}})
    return msgspec.json.encode({"cause": error.cause, "error": str(error), **more, "branching": history.branching, "head": history.head, "turns": rows,
                                "evidence": _encoded(error.evidence)})


def _encoded(evidence: dict[str, Any]) -> msgspec.Raw:
    try:
        return msgspec.Raw(msgspec.json.encode(evidence))
    except (ValueError, TypeError, OverflowError, RecursionError) as e:  # a request may hold anything
        return msgspec.Raw(msgspec.json.encode({"not written": repr(e)}))


def read_history(path: Path) -> History:
    """The history of a reproducer; routes are zeros of the right shape."""
    data = msgspec.json.decode(path.read_bytes())
    nodes: list[Checkpoint] = []
    for row in data["turns"]:
        inputs = np.concatenate([_before(nodes, row["parent"])[: row["kept"]], np.array(row["input_ids"], np.int32)])
        routes = np.zeros(row["routes"]["shape"], row["routes"]["dtype"]) if row["routes"] else None
        turn = Turn(inputs, np.array(row["output_ids"], np.int32), np.array(row["logprobs"], np.float32), np.array(row["versions"], np.int32),
                    row["finish_reason"], routes=routes, routes_start=row["routes_start"])
        nodes.append(Checkpoint(tuple(row["appended"]), row["reply"], turn, parent=row["parent"]))
    return History(tuple(nodes), data["head"], data["branching"])


def _before(nodes: Sequence[Checkpoint], parent: int) -> np.ndarray:
    return np.zeros(0, np.int32) if parent == ROOT else nodes[parent].tokens
