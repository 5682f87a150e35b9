"""MPI: a checked world, msgpack messages, receives that poll instead of spinning, the wake-up link between the two worlds, and bulk data between their ranks.

Owns no state that a run needs: a lost message costs time, never data.
"""

from miles.comm.entry import run_rank
from miles.comm.link import Link
from miles.comm.peers import Abandoned, PeerPort, Peers
from miles.comm.world import World

__all__ = ["Abandoned", "Link", "PeerPort", "Peers", "World", "run_rank"]
