"""megatron-core's distributed optimizer with its state on disk: see miles.optim.

Reduction of gradients, clipping and the gathering of parameters stay megatron's; main parameters and moments are nowhere in memory but in the buckets of
a step. Checkpoints have the format of resident state: its tensors are read from disk while one is taken, and written to disk when one is loaded.
"""

from __future__ import annotations

from pathlib import Path

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from miles.optim import StreamedAdam


class StreamedDistributedOptimizer(DistributedOptimizer):
    """Made of a DistributedOptimizer by `stream`."""

    def _copy_main_params_to_model_params(self):
        """Nothing: the step has written each bucket into the model parameters."""

    def _get_main_param_and_optimizer_states(self, model_param):
        return self.optimizer.read(self._main(model_param))

    def _set_main_param_and_optimizer_states(self, model_param, tensors):
        self._loaded[self._main(model_param)] = tensors

    def load_state_dict(self, state_dict):
        self._loaded: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        super().load_state_dict(state_dict)
        if self._loaded:
            self.optimizer.replace(self._loaded)
        del self._loaded

    def _main(self, model_param: torch.Tensor) -> torch.Tensor:
        group, order = self.model_param_group_index_map[model_param]
        return self.optimizer.param_groups[group]["params"][order]


def stream(part: DistributedOptimizer, folder: Path) -> None:
    """Move the state of one distributed optimizer, before its first step, to files in `folder`.

    Raises EnvironmentFault: the folder is in memory, on the network or too small.
    """
    targets = {main: model for mains, models in zip(part.shard_fp32_from_float16_groups, part.shard_float16_groups, strict=True)
               for main, model in zip(mains, models, strict=True)}
    mains = [p for group in part.optimizer.param_groups for p in group["params"]]
    part.optimizer = StreamedAdam(part.optimizer.param_groups, [targets.get(p, p).detach() for p in mains], folder)
    part.__class__ = StreamedDistributedOptimizer  # megatron's factory has no place for another class
    for p in targets:
        p.untyped_storage().resize_(0)
