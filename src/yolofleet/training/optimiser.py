"""Optimizers with YOLOv5's three groups: biases, decayed weights, batch-norm weights. They are torch's, or a class of the user."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

# torch's compiler imports this module. The module's functions keep the process group of that moment as a default
# argument, so the group's threads would outlive Python: one exit in six aborts. Import it before a group exists.
import torch.distributed.nn.functional
from torch import Tensor, nn

from yolofleet.config.schema import Recipe
from yolofleet.support.devices import has_fused, is_host
from yolofleet.training.schedule import StepPlan

KINDS: dict[str, type[torch.optim.Optimizer]] = {
    "SGD": torch.optim.SGD,
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSProp": torch.optim.RMSprop,
}
FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)  # whose fused kernels look at ``found_inf``
# that build_optimizer gives a group, beside those of the optimizer
OWN_SETTINGS = ("params", "role", "lr_factor")
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
            if name == "bias" or name.endswith("_bias"):  # in_proj_bias of an attention
                biases.append(p)
            elif isinstance(module, NORMS):
                norms.append(p)
            else:
                weights.append(p)
    return biases, weights, norms


def build_optimizer(
    model: nn.Module,
    optimizer: str | type[torch.optim.Optimizer],
    recipe: Recipe,
    weight_decay: float,
    lr_factors: Mapping[str, float] | None = None,
) -> torch.optim.Optimizer:
    """Return an optimizer with groups in the order biases, weights, norms.

    Args:
        optimizer: a name of ``KINDS``, or the class of a user.
        lr_factors: of the rates of parameters, by name; 1 for those that it lacks. Each factor has groups of its own.
    """
    biases, weights, norms = parameter_groups(model)
    in_norms = {p for module in model.modules() if isinstance(module, NORMS) for p in module.parameters()}
    decayed = [p for p in biases if recipe.decay_biases and p not in in_norms]
    undecayed = [p for p in biases if not recipe.decay_biases or p in in_norms]
    by_role: list[dict[str, Any]] = [
        {"role": "bias", "params": undecayed, "weight_decay": 0.0},
        {"role": "bias", "params": decayed, "weight_decay": weight_decay},
        {"role": "weight", "params": weights, "weight_decay": weight_decay},
        {"role": "norm", "params": norms, "weight_decay": 0.0},
    ]
    factors = {p: (lr_factors or {}).get(name, 1.0) for name, p in model.named_parameters()}
    groups = [
        {**group, "params": params, "lr_factor": factor}
        for group in by_role
        for factor in sorted({factors[p] for p in group["params"]})
        if (params := [p for p in group["params"] if factors[p] == factor])
    ]
    trained = [*biases, *weights, *norms]
    if isinstance(optimizer, type):
        return optimizer(groups, **arguments_of(optimizer, recipe))
    kind, arguments = without_compiler(KINDS[optimizer]), arguments_of(KINDS[optimizer], recipe)
    if "fused" in inspect.signature(KINDS[optimizer]).parameters:
        # one kernel over all tensors; the same arithmetic
        arguments["fused"] = has_fused(kind, trained[0].device)
    if optimizer != "SGD":
        return kind(groups, **arguments)
    sgd = kind(groups, nesterov=recipe.nesterov and recipe.momentum > 0, **arguments)
    if max(recipe.momentum, recipe.warmup_momentum) > 0:
        # Fused SGD allocates its buffers uninitialised, and keeps them so if its first step overflows. Zeros give the
        # same first step, because dampening is 0.
        for p in trained:
            sgd.state[p]["momentum_buffer"] = torch.zeros_like(p)
    return sgd


def arguments_of(kind: type[torch.optim.Optimizer], recipe: Recipe) -> dict[str, Any]:
    """Return the rate of the recipe, and its momentum as the class takes it: as first beta, as momentum or not at all."""
    accepted = inspect.signature(kind).parameters
    arguments: dict[str, Any] = {"lr": recipe.lr0}
    if "betas" in accepted:
        arguments["betas"] = (recipe.momentum, *accepted["betas"].default[1:])
    elif "momentum" in accepted:
        arguments["momentum"] = recipe.momentum
    return arguments


def without_compiler(kind: type[torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    """Return a class of optimizers that never import torch's compiler.

    torch's wrappers import it only to switch it off: 2 s of CPU time in every process.
    """
    add_param_group, step = (inspect.unwrap(getattr(kind, name)) for name in ("add_param_group", "step"))
    return type(kind.__name__, (kind,), {"add_param_group": add_param_group, "step": torch.no_grad()(step)})


@torch.no_grad()
def update_if_finite(optimizer: Any, finite: Tensor) -> None:
    """Do one update that changes nothing if ``finite`` (bool, on the device) is False, without reading it on the host.

    Without fused kernels the counts of steps on accelerators still go on, because they lie on the host.
    """
    is_fused = isinstance(optimizer, FUSED) and all(group.get("fused") for group in optimizer.param_groups)
    if is_fused:
        optimizer.found_inf = (~finite).float()  # with 1 the kernels leave weights and slots as they are
        optimizer.step()
        return
    if is_host(finite.device):
        if finite:
            optimizer.step()
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    slots = device_slots(optimizer, parameters)
    known = [*parameters, *slots.values()]
    # one tensor of each number format: a launch for each of some 500 tensors would take longer than the update
    groups = [
        [t.as_strided((t.numel(),), (1,)) for t in known if t.dtype == dtype]
        for dtype in dict.fromkeys(t.dtype for t in known)
    ]
    before = [torch.cat(group) for group in groups]
    optimizer.step()
    for group, old in zip(groups, before, strict=True):
        kept = torch.where(finite, torch.cat(group), old)
        torch._foreach_copy_(group, kept.split([t.numel() for t in group]))
    for key, t in device_slots(optimizer, parameters).items():
        before_step = slots.get(key)
        # this step has made the slot, which starts at 0, or has put another tensor there
        if t is not before_step:
            t.copy_(torch.where(finite, t, torch.zeros_like(t) if before_step is None else before_step))


def device_slots(optimizer: Any, parameters: Sequence[Tensor]) -> dict[tuple[int, str], Tensor]:
    """Return the optimizer's tensors that are on the device of their parameter, by its index and their name."""
    return {
        (index, name): t
        for index, p in enumerate(parameters)
        for name, t in optimizer.state[p].items()
        if t.device == p.device
    }


def slot_device(optimizer: Any, parameter: Tensor, slot: Tensor) -> torch.device:
    """Return the device for a slot of ``parameter``: the parameter's, or the CPU for counts without fused kernels."""
    (group,) = [g for g in optimizer.param_groups if any(p is parameter for p in g["params"])]
    beside = slot.shape == parameter.shape or group.get("fused") or group.get("capturable")
    return parameter.device if beside else torch.device("cpu")


def set_rates(optimizer: torch.optim.Optimizer, plan: StepPlan) -> None:
    """Set the rates of this step in every group."""
    for group in optimizer.param_groups:
        group["lr"] = (plan.lr_bias if group["role"] == "bias" else plan.lr) * group["lr_factor"]
        if "momentum" in group:
            group["momentum"] = plan.momentum
        elif "betas" in group:
            group["betas"] = (plan.momentum, *group["betas"][1:])


# -- class of the user -------------------------------------------------------------------------------------------


def counts_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return what the optimizer keeps in each group beside settings: a count of steps, for example."""
    known = {*optimizer.defaults, *OWN_SETTINGS}
    return [
        {key: value for key, value in group.items() if key not in known} for group in optimizer.param_groups
    ]


def is_storable(slot: Tensor, parameter: Tensor) -> bool:
    """Return whether a checkpoint can have ``slot`` in the state of ``parameter``."""
    return slot.shape in ((), parameter.shape) and not slot.is_complex() and slot.dtype != torch.bool
