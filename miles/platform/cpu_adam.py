"""Adam in plain torch with the interface and state layout of Transformer Engine's FusedAdam.

megatron-core's distributed optimizer and its checkpoints rely on that layout: the step counter lives in the parameter group,
`exp_avg` and `exp_avg_sq` in the state.
"""

from __future__ import annotations

import math

import torch


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
            params, grads, means, squares = [], [], [], []
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p.data), torch.zeros_like(p.data)
                params.append(p)
                grads.append(p.grad.to(p.dtype))
                means.append(state["exp_avg"])
                squares.append(state["exp_avg_sq"])
            if params:
                adam_(params, grads, means, squares, group, self.adam_w_mode)


def adam_(params: list[torch.Tensor], grads: list[torch.Tensor], means: list[torch.Tensor], squares: list[torch.Tensor], group: dict,
          adam_w_mode: bool = True) -> None:
    """One step of Adam on lists of float32 tensors, in place. `group`: lr, betas, eps, weight_decay, bias_correction and `step`, which counts from 1.

    Elementwise: how the elements are cut into tensors changes nothing.
    """
    beta1, beta2 = group["betas"]
    step = group["step"]
    correction1, correction2 = (1 - beta1**step, 1 - beta2**step) if group["bias_correction"] else (1.0, 1.0)
    if group["weight_decay"]:
        if adam_w_mode:
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        else:
            grads = torch._foreach_add(grads, params, alpha=group["weight_decay"])
    torch._foreach_lerp_(means, grads, 1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
    denominators = torch._foreach_sqrt(squares)
    torch._foreach_div_(denominators, math.sqrt(correction2))
    torch._foreach_add_(denominators, group["eps"])
    torch._foreach_addcdiv_(params, means, denominators, -group["lr"] / correction1)
