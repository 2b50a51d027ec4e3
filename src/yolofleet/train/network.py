"""The network of a run: built, filled with start weights, partly frozen."""

from __future__ import annotations

import torch

from yolofleet.checkpoint.reader import read_weights, resolve_weights
from yolofleet.checkpoint.weights import transfer
from yolofleet.config.schema import TrainConfig
from yolofleet.errors import ConfigError
from yolofleet.families import build_model
from yolofleet.models.description import ModelDescription, describe
from yolofleet.models.detector import Detector
from yolofleet.report.console import NullConsole


def build_network(
    config: TrainConfig, names: tuple[str, ...], console: NullConsole, resumed: ModelDescription | None
) -> Detector:
    """The network with its starting weights, equal on every rank.

    Args:
        resumed: of the checkpoint that will fill it: start weights are not needed, and not read, any more.

    Raises:
        ConfigError, CheckpointError: no such model, unreadable weights.
    """
    if resumed is not None:
        model = build_model(resumed, len(names), seed=config.seed)
        model.names = names
        return model
    description = describe(config.cfg or config.model) if config.cfg or config.model else None
    weights = read_weights(resolve_weights(config.weights), description) if config.weights else None
    if description is None:
        assert weights is not None
        description = weights.description
    model = build_model(description, len(names), seed=config.seed)
    model.names = names
    if weights is not None:
        console.fact(f"start weights {config.weights}: {transfer(model, weights).text()}")
    return model


def freeze(model: Detector, spec: str) -> list[str]:
    """Switch gradients off for the layers that ``--freeze`` names; returns the frozen parameters' names.

    A number is the first N layers, a list those layers, ``backbone`` the description's backbone, else prefixes
    of parameter names. Batch-norm layers of frozen parts keep their statistics.

    Raises:
        ConfigError: nothing of that name.
    """
    if not spec or spec == "0":
        return []
    groups = model.freeze_groups()
    known = f"layers are 0 ({groups[0][:-1]}) to {len(groups) - 1} ({groups[-1][:-1]}); or --freeze backbone"
    parts = [part.strip() for part in spec.split(",") if part.strip()]
    if parts == ["backbone"]:
        prefixes = groups[: model.backbone_groups]
    elif all(part.isdigit() for part in parts):
        layers = list(range(int(parts[0]))) if len(parts) == 1 else [int(part) for part in parts]
        if max(layers, default=0) >= len(groups):
            raise ConfigError(f"--freeze {spec}: the model has {len(groups)} layers", hint=known)
        prefixes = [groups[i] for i in layers]
    else:
        prefixes = parts
    frozen = [name for name, _ in model.named_parameters() if any(name.startswith(p) for p in prefixes)]
    unknown = [p for p in prefixes if not any(name.startswith(p) for name in model.state_dict())]
    unknown = [prefix for prefix in unknown if prefix not in groups]  # a layer without tensors
    if not frozen or unknown:
        raise ConfigError(f"--freeze {spec}: no layer {unknown[0] if unknown else spec}", hint=known)
    for name, parameter in model.named_parameters():
        if name in set(frozen):
            parameter.requires_grad_(False)
    if len(frozen) == len(list(model.parameters())):
        raise ConfigError(f"--freeze {spec} leaves nothing to train", hint="freeze fewer layers")
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.BatchNorm2d) and f"{name}.weight" in frozen:
            module.eval()
    return frozen
