"""Adam on CPUs with the interface and state layout of Transformer Engine's FusedAdam.

megatron-core's distributed optimizer and its checkpoints rely on that layout: the step counter lives in the parameter group,
`exp_avg` and `exp_avg_sq` in the state.
"""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch

from miles.core.compiled import compiled


class CpuFusedAdam(torch.optim.Optimizer):
    """Adam (Kingma and Ba 2015) or, with `adam_w_mode`, AdamW (Loshchilov and Hutter 2019), over float32 parameters."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, adam_w_mode=True, bias_correction=True, **_fused_only):
        self.adam_w_mode = adam_w_mode
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, "bias_correction": bias_correction})

    @torch.no_grad()
    def step(self, closure=None, grad_scaler=None):
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = int(group.get("step") or 0) + 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p.data), torch.zeros_like(p.data)
                adam_(p.detach(), p.grad.to(p.dtype), state["exp_avg"], state["exp_avg_sq"], group, self.adam_w_mode)


def adam_(param: torch.Tensor, grad: torch.Tensor, mean: torch.Tensor, square: torch.Tensor, group: dict, adam_w_mode: bool = True) -> None:
    """One step of Adam on contiguous float32 tensors of equal size, in place. `group`: lr, betas, eps, weight_decay, bias_correction and `step`, which
    counts from 1.

    Elementwise, each operation rounded to float32: how the elements are cut into tensors changes nothing.
    """
    if not param.numel():
        return
    beta1, beta2 = group["betas"]
    correction1, correction2 = (1 - beta1 ** group["step"], 1 - beta2 ** group["step"]) if group["bias_correction"] else (1.0, 1.0)
    decay = group["weight_decay"]
    numbers = (1 - group["lr"] * decay if adam_w_mode else 1.0, 0.0 if adam_w_mode else decay, 1 - beta1, beta2, 1 - beta2, math.sqrt(correction2), group["eps"],
               group["lr"] / correction1)
    _adam(*(_flat(t) for t in (param, grad, mean, square)), *(np.float32(x) for x in numbers))


def _flat(t: torch.Tensor) -> np.ndarray:
    """The same memory as an array, which must not outlive `t`. Not `t.numpy()`: after that the storage cannot be resized, as giving memory back does
    (miles.trainer.memory)."""
    assert t.is_contiguous() and t.dtype == torch.float32 and t.device.type == "cpu", (t.stride(), t.dtype, t.device)
    return np.asarray(SimpleNamespace(__array_interface__={"data": (t.data_ptr(), False), "shape": (t.numel(),), "typestr": "<f4", "version": 3}))


@partial(compiled, error_model="numpy")  # a test for division by 0 would keep it from using vectors
def _adam(param, grad, mean, square, keep, l2, rest1, beta2, rest2, correction, eps, rate):
    """One pass over memory: as separate torch operations it is eight, and three times as slow."""
    for i in range(len(param)):
        p = param[i]
        g = grad[i] + l2 * p
        m = mean[i] + rest1 * (g - mean[i])
        v = beta2 * square[i] + rest2 * (g * g)
        mean[i], square[i] = m, v
        param[i] = keep * p - rate * (m / (np.sqrt(v) / correction + eps))
