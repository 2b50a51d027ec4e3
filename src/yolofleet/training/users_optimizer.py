"""The optimizer of the user: ``--optimizer FILE.py:CLASS``."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from yolofleet.config.schema import Recipe
from yolofleet.config.user_code import failure_of_code, load_class
from yolofleet.support.errors import ConfigError
from yolofleet.training.optimiser import arguments_of, counts_of, is_storable

FLAG = "--optimizer"


def load_optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """Return the class that ``--optimizer`` names, after two updates on trial.

    Raises:
        ConfigError: the code cannot be loaded, its constructor does not fit, or a checkpoint cannot store its state.
    """
    kind = load_class(name, torch.optim.Optimizer, FLAG)
    accepted = inspect.signature(kind).parameters
    if lacking := [argument for argument in ("lr", "weight_decay") if argument not in accepted]:
        raise ConfigError(
            f"{FLAG} {name}: the constructor has no argument {lacking[0]}",
            hint="it needs params, lr and weight_decay; momentum or betas if it has any; defaults for all others",
        )
    if hasattr(kind, "train") or hasattr(kind, "eval"):
        raise ConfigError(
            f"{FLAG} {name}: it exchanges the weights in train() and eval(), which a run does not call",
            hint="--optimizer AdamW --lr-schedule constant: a run validates a moving average of the weights",
        )
    try:
        problem = _unstorable(kind)
    except Exception as error:
        raise failure_of_code(f"{FLAG} {name}: two updates on trial failed", error) from None
    if problem:
        raise ConfigError(
            f"{FLAG} {name}: {problem}",
            hint="a checkpoint stores tensors of the form of a parameter, single numbers, and counts in the groups",
        )
    return kind


def _unstorable(kind: type[torch.optim.Optimizer]) -> str:
    """Return what a checkpoint cannot store after two updates of two small parameters; "" if it stores all."""
    parameters = [nn.Parameter(torch.ones(16, 8, 3, 3)), nn.Parameter(torch.ones(16))]
    groups: list[dict[str, Any]] = [{"role": "weight", "params": [p], "lr_factor": 1.0} for p in parameters]
    optimizer = kind(groups, **arguments_of(kind, Recipe()))
    before = [{key: group[key] for key in optimizer.defaults} for group in optimizer.param_groups]
    for _ in range(2):
        for p in parameters:
            p.grad = torch.linspace(-1, 1, p.numel()).view_as(p)
        optimizer.step()
    for group, settings in zip(optimizer.param_groups, before, strict=True):
        if changed := [key for key, value in settings.items() if group[key] != value]:
            return f"a step changes the setting {changed[0]}"
    for key, value in ((key, value) for counts in counts_of(optimizer) for key, value in counts.items()):
        if type(value) not in (int, float):
            return f"its groups keep {key}, which is {type(value).__name__}"
    if len(optimizer.state) > len(parameters):
        return "it has state that belongs to no parameter"
    for p in parameters:
        for key, value in optimizer.state[p].items():
            if not isinstance(value, Tensor):
                return f"its state keeps {key}, which is {type(value).__name__}"
            if not is_storable(value, p):
                return f"its state keeps {key}, which is {value.dtype} {list(value.shape)} for a parameter {list(p.shape)}"
    return ""
