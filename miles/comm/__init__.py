"""MPI: a checked world, msgpack messages, receives that poll instead of spinning, and the wake-up link between the two worlds.

Owns no state that a run needs: a lost message costs time, never data.
"""

from miles.comm.entry import run_rank
from miles.comm.link import Link
from miles.comm.world import World

__all__ = ["Link", "World", "run_rank"]
