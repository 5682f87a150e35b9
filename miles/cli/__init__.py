"""`miles-submit`: the command line. Parses, calls `miles.cluster` and its siblings, prints. Holds no logic of its own."""

from miles.cli.main import main

__all__ = ["main"]
