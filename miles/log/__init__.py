"""Metrics and event spans to HDF5: one file, one writer, per process and attempt.

Owns the log file format. Must not block the loop that it measures: rows go to a queue, a thread writes them in blocks.
"""

from miles.log.runlog import RunLog

__all__ = ["RunLog"]
