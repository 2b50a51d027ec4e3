"""Build the network of a run, load its start weights and freeze layers."""

from __future__ import annotations

import numpy as np
import torch

from yolofleet.checkpoint.catalogue import resolve_weights
from yolofleet.checkpoint.reader import read_weights
from yolofleet.checkpoint.weights import Weights, transfer
from yolofleet.config.schema import TrainConfig
from yolofleet.datasets.index import DataIndex
from yolofleet.errors import ConfigError
from yolofleet.families import build_model
from yolofleet.models.anchors import GOOD_ENOUGH, anchor_fit, better_anchors
from yolofleet.models.description import CustomDescription, ModelDescription, describe
from yolofleet.models.detector import Detector
from yolofleet.models.ppyoloe_config import PpyoloeDescription
from yolofleet.report.console import NullConsole


def description_and_weights(
    config: TrainConfig, resumed: ModelDescription | None, own: ModelDescription | None = None
) -> tuple[ModelDescription, Weights | None]:
    """Return the network's description, and the weights to start from (None for random ones).

    Args:
        resumed: description from the checkpoint, when the run resumes; then start weights are not read.
        own: description of the network of ``--recipe-class``; None if that class has none.

    Raises:
        ConfigError, CheckpointError: the model is unknown, or the weights cannot be read.
    """
    if resumed is not None:
        return resumed, None
    if own is not None and (config.cfg or config.model):
        raise ConfigError(
            f"--recipe-class {config.recipe_class} has its own network, and {'--cfg' if config.cfg else '--model'} "
            "names another one",
            hint="leave one of them out",
        )
    described = describe(config.cfg or config.model) if config.cfg or config.model else own
    weights = read_weights(resolve_weights(config.weights), described) if config.weights else None
    if described is None:
        if weights is None:  # config/checks.py refuses it without --recipe-class
            raise ConfigError(
                f"no model: {config.recipe_class} has no method network",
                hint="--model yolov5n, or --weights",
            )
        described = weights.description
    return described, weights


def with_fitting_anchors(
    description: ModelDescription, index: DataIndex, threshold: float, img: int, seed: int
) -> tuple[ModelDescription, str]:
    """Replace the anchors if they match too few labels; return the description and a text about its anchors.

    The text is "" for networks without anchors. The result is equal on every rank.

    Args:
        threshold: largest side ratio of a match (``anchor_t``).
        img: training size, pixels.
    """
    if isinstance(description, PpyoloeDescription | CustomDescription):
        return description, ""
    image_of_label = np.repeat(np.arange(len(index)), np.diff(index.offsets))
    longest = index.sizes_wh.max(1, keepdims=True)
    sizes_px = index.boxes_cxcywh_unit[:, 2:] * (index.sizes_wh * (img / longest))[image_of_label]
    anchors = np.array(description.anchors_px)  # [L, A, 2]

    def text() -> str:
        return f"{recall:.1%} of the labels can be matched, by {per_label:.1f} anchors each"

    recall, per_label = anchor_fit(sizes_px, anchors.reshape(-1, 2), threshold)
    if recall >= GOOD_ENOUGH or not len(sizes_px):
        return description, text()
    before, better = recall, better_anchors(sizes_px, anchors, threshold, seed)
    if better is anchors:
        return description, f"{text()}; no better ones found"
    recall, per_label = anchor_fit(sizes_px, better.reshape(-1, 2), threshold)
    return description.with_anchors(better.tolist()), f"fitted to the labels: {text()}; before {before:.1%}"


def build_network(
    description: ModelDescription,
    weights: Weights | None,
    names: tuple[str, ...],
    seed: int,
    console: NullConsole,
) -> Detector:
    """Return the network with its start weights, equal on every rank."""
    model = build_model(description, len(names), seed=seed)
    model.names = names
    if weights is not None:
        console.fact(f"start weights of {weights.description.name}: {transfer(model, weights).text()}")
    return model


def freeze(model: Detector, spec: str) -> list[str]:
    """Switch gradients off for the layers that ``--freeze`` names; return the names of the frozen parameters.

    One number N means the first N layers, several numbers those layers, and ``backbone`` the description's backbone.
    Other words are prefixes of parameter names. Batch-norm layers of frozen parts keep their statistics.

    Raises:
        ConfigError: the model has no such layer, or no parameter is left to train.
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
