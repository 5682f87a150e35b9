"""The durable trajectory buffer: parts, sealed groups, journal, staleness, retention.

Owns the storage format and the exactly-once accounting of groups. Must not import torch.
"""

from miles.buffer.files import UNREADABLE
from miles.buffer.frontier import Frontier, cut
from miles.buffer.queue import Taken, TrainerQueue
from miles.buffer.reader import GroupReader, read_group
from miles.buffer.state import BufferState, GroupInfo, SealedAt, Status, choose
from miles.buffer.storage import Sealed, Stored, stored_groups
from miles.buffer.versions import Lineage
from miles.buffer.view import BufferView
from miles.buffer.writer import BufferWriter, write_part

__all__ = [
    "UNREADABLE", "BufferState", "BufferView", "BufferWriter", "Frontier", "GroupInfo", "GroupReader", "Lineage", "Sealed", "SealedAt", "Status", "Stored", "Taken",
    "TrainerQueue", "choose", "cut", "read_group", "stored_groups", "write_part",
]
