"""The configuration: pydantic schema, loading, overrides, rules across sections, the resolved file.

Owns what a run may be told. Must not touch devices or the network.
"""

from miles.config.load import dump_config, load_config, load_site
from miles.config.schema import MilesConfig, SiteConfig

__all__ = ["MilesConfig", "SiteConfig", "dump_config", "load_config", "load_site"]
