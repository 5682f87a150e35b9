"""Miles: a Slurm-native toolkit for reinforcement-learning post-training of large language models.

One sub-package per noun; `docs/architecture.md` draws the map. Imports point downward: `core` is the floor, `cli` the roof.
"""

__version__ = "0.1.0"
