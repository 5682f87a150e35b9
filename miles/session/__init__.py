"""Token in, token out: tokenization, checkpoints per turn, linear and branching history, assembly into trajectories, and the server that offers it.

Must not talk to the trainer.
"""

from miles.session.affinity import Engine, Engines
from miles.session.assemble import (
    Assembled,
    Leaf,
    assemble,
    assemble_leaves,
    is_exact,
    to_trajectories,
)
from miles.session.history import Checkpoint, History
from miles.session.replay import load_replay
from miles.session.reproducer import read_history, reproducer
from miles.session.server import SessionServer, settle_collector
from miles.session.service import (
    ChatReply,
    Session,
    SessionBusy,
    SessionLimits,
    SessionService,
    TooManySessions,
)
from miles.session.store import SessionStore, Stored, stored_sessions
from miles.session.tokenize import ChatTokenizer
from miles.session.verify import verify

__all__ = [
    "Assembled", "ChatReply", "ChatTokenizer", "Checkpoint", "Engine", "Engines", "History", "Leaf", "Session", "SessionBusy", "SessionLimits",
    "SessionServer", "SessionService", "SessionStore", "Stored", "TooManySessions", "assemble", "assemble_leaves", "is_exact", "load_replay", "read_history",
    "reproducer", "settle_collector", "stored_sessions", "to_trajectories", "verify",
]
