"""The run directory: paths, atomic publish, journals, epochs and fences, retention.

Owns how bytes become durable on the shared file system. Must not know what the bytes mean.
"""

from miles.rundir.journal import JournalReader, JournalWriter, read_journal
from miles.rundir.pooldir import POOL_RANKS, PoolDir, PoolFacts
from miles.rundir.publish import fsync_dir, publish_bytes, publish_dir, remove_tree, remove_unfinished, temp_path
from miles.rundir.rundir import RunDir

__all__ = [
    "POOL_RANKS", "JournalReader", "JournalWriter", "PoolDir", "PoolFacts", "RunDir", "fsync_dir", "publish_bytes", "publish_dir", "read_journal", "remove_tree",
    "remove_unfinished", "temp_path",
]
