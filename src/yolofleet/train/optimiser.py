"""Optimizers with YOLOv5's three groups: biases, decayed weights, batch-norm weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

# torch's compiler imports this module. The module's functions keep the process group of that moment as a default
# argument, so the group's threads would outlive Python: one exit in six aborts. Import it before a group exists.
import torch.distributed.nn.functional
from torch import Tensor, nn

from yolofleet.config.schema import Recipe
from yolofleet.devices import has_fused
from yolofleet.train.schedule import StepPlan

KINDS = {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}
NORMS = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm)


def parameter_groups(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
    """Return (biases, weights that decay, normalisation weights) that require a gradient, in model order."""
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
    """Return SGD, Adam or AdamW with groups in the order biases, weights, norms."""
    biases, weights, norms = parameter_groups(model)
    in_norms = {p for module in model.modules() if isinstance(module, NORMS) for p in module.parameters()}
    decayed = [p for p in biases if recipe.decay_biases and p not in in_norms]
    undecayed = [p for p in biases if not recipe.decay_biases or p in in_norms]
    groups = [
        {"role": "bias", "params": undecayed, "weight_decay": 0.0},
        {"role": "bias", "params": decayed, "weight_decay": weight_decay},
        {"role": "weight", "params": weights, "weight_decay": weight_decay},
        {"role": "norm", "params": norms, "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    trained = [*biases, *weights, *norms]
    kind = without_compiler(KINDS[name])
    fused = has_fused(kind, trained[0].device)  # one kernel over all tensors; the same arithmetic
    if name != "SGD":
        return kind(groups, lr=recipe.lr0, betas=(recipe.momentum, 0.999), fused=fused)
    nesterov = recipe.nesterov and recipe.momentum > 0
    sgd = kind(groups, lr=recipe.lr0, momentum=recipe.momentum, nesterov=nesterov, fused=fused)
    if max(recipe.momentum, recipe.warmup_momentum) > 0:
        # Fused SGD allocates its buffers uninitialised, and keeps them so if its first step overflows. Zeros give the
        # same first step, because dampening is 0.
        for p in trained:
            sgd.state[p]["momentum_buffer"] = torch.zeros_like(p)
    return sgd


def without_compiler(kind: type[torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    """Return a class of optimizers that never import torch's compiler.

    torch's wrappers import it only to switch it off: 2 s of CPU time in every process.
    """
    add_param_group, step = (inspect.unwrap(getattr(kind, name)) for name in ("add_param_group", "step"))
    return type(kind.__name__, (kind,), {"add_param_group": add_param_group, "step": torch.no_grad()(step)})


@torch.no_grad()
def update_if_finite(optimizer: Any, finite: Tensor) -> None:
    """Do one update that changes nothing if ``finite`` (bool, on the device) is False, without reading it on the host.

    Without fused kernels Adam still counts the step, because its counts lie on the host.
    """
    if all(group["fused"] for group in optimizer.param_groups):
        optimizer.found_inf = (~finite).float()  # with 1 the kernels leave weights and slots as they are
        optimizer.step()
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    before = {id(t): t.clone() for t in parameters + device_slots(optimizer, parameters)}
    optimizer.step()
    for t in parameters + device_slots(optimizer, parameters):
        old = before.get(id(t), torch.zeros_like(t))  # a slot that this step has made starts at 0
        t.copy_(torch.where(finite, t, old))


def device_slots(optimizer: Any, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the optimizer's tensors that are on the device of their parameter."""
    return [t for p in parameters for t in optimizer.state[p].values() if t.device == p.device]


def slot_device(optimizer: Any, parameter: Tensor, slot: Tensor) -> torch.device:
    """Return the device for a slot of ``parameter``: the parameter's, or the CPU for counts without fused kernels."""
    (group,) = [g for g in optimizer.param_groups if any(p is parameter for p in g["params"])]
    beside = slot.shape == parameter.shape or group["fused"] or group.get("capturable")
    return parameter.device if beside else torch.device("cpu")


def set_rates(optimizer: torch.optim.Optimizer, plan: StepPlan) -> None:
    """Set the rates of this step in every group."""
    for group in optimizer.param_groups:
        group["lr"] = plan.lr_bias if group["role"] == "bias" else plan.lr
        if "momentum" in group:
            group["momentum"] = plan.momentum
        else:
            group["betas"] = (plan.momentum, group["betas"][1])
