"""The nouns of Miles (turn, trajectory, group, layout) and its errors. Imports nothing else of Miles."""

from miles.core.errors import LOST_PEER, ConfigError, EnvironmentFault, MilesError, StaleEpochError, StructureError
from miles.core.types import NO_VERSION, Drafts, Group, Layout, Role, Trajectory, Turn

__all__ = [
    "LOST_PEER", "NO_VERSION", "ConfigError", "Drafts", "EnvironmentFault", "Group", "Layout", "MilesError", "Role", "StaleEpochError",
    "StructureError", "Trajectory", "Turn",
]
