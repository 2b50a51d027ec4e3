"""Optimizers with YOLOv5's three groups: biases, decayed weights, batch-norm weights."""

from __future__ import annotations

import torch

# torch.optim imports this at first use, and its functions then keep today's process group as a default argument
# for good: its threads would outlive Python, which aborts one exit in six. So it is imported before there is one.
import torch.distributed.nn.functional
from torch import nn

from yolofleet.config.schema import Recipe
from yolofleet.train.schedule import StepPlan

NORMS = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm)


def parameter_groups(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
    """(biases, weights that decay, normalisation weights), trainable ones only, in model order."""
    biases: list[nn.Parameter] = []
    weights: list[nn.Parameter] = []
    norms: list[nn.Parameter] = []
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            if not p.requires_grad:
                continue
            if name == "bias":
                biases.append(p)
            elif isinstance(module, NORMS):
                norms.append(p)
            else:
                weights.append(p)
    return biases, weights, norms


def build_optimizer(
    model: nn.Module, name: str, recipe: Recipe, weight_decay: float
) -> torch.optim.Optimizer:
    """SGD, Adam or AdamW; groups in the order biases, weights, norms."""
    biases, weights, norms = parameter_groups(model)
    of_norms = {p for module in model.modules() if isinstance(module, NORMS) for p in module.parameters()}
    decayed = [p for p in biases if recipe.decay_biases and p not in of_norms]
    undecayed = [p for p in biases if not recipe.decay_biases or p in of_norms]
    groups = [
        {"role": "bias", "params": undecayed, "weight_decay": 0.0},
        {"role": "bias", "params": decayed, "weight_decay": weight_decay},
        {"role": "weight", "params": weights, "weight_decay": weight_decay},
        {"role": "norm", "params": norms, "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    device = next(model.parameters()).device.type
    fused = device in ("cpu", "cuda")  # one kernel over all tensors; the same arithmetic
    if name == "SGD":
        nesterov = recipe.nesterov and recipe.momentum > 0
        return torch.optim.SGD(
            groups, lr=recipe.lr0, momentum=recipe.momentum, nesterov=nesterov, fused=fused
        )
    adam = torch.optim.AdamW if name == "AdamW" else torch.optim.Adam
    return adam(groups, lr=recipe.lr0, betas=(recipe.momentum, 0.999), fused=fused)


def set_rates(optimizer: torch.optim.Optimizer, plan: StepPlan) -> None:
    """Give every group the rates of this step."""
    for group in optimizer.param_groups:
        group["lr"] = plan.lr_bias if group["role"] == "bias" else plan.lr
        if "momentum" in group:
            group["momentum"] = plan.momentum
        else:
            group["betas"] = (plan.momentum, group["betas"][1])
