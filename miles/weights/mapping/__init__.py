"""Hugging Face weights <-> megatron-core shards: what a model is (`architecture`), which tensor is which (`tables`), moving them (`transfer`).

Hugging Face names and layouts are the only interchange format of Miles. The tables and slicing are pure; only `transfer` needs ranks.
"""

from miles.weights.mapping.architecture import Adapters, Architecture, SparseIndex, read_architecture
from miles.weights.mapping.replicas import Replicas
from miles.weights.mapping.tables import Rule, hf_names, rules_for
from miles.weights.mapping.transfer import Shard, export_hf, load_hf, local_weights, shards_of

__all__ = ["Adapters", "Architecture", "Replicas", "Rule", "Shard", "SparseIndex", "export_hf", "hf_names", "load_hf", "local_weights", "read_architecture", "rules_for", "shards_of"]
