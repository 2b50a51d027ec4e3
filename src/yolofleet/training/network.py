"""Build the network of a run, load its start weights and freeze layers."""

from __future__ import annotations

import fnmatch
from functools import partial

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from yolofleet.config.recipe import is_listed, parse_lr_factors
from yolofleet.config.schema import Recipe, TrainConfig
from yolofleet.data.datasets.index import DataIndex
from yolofleet.families.build import build_model
from yolofleet.families.networks.anchor_fit import GOOD_ENOUGH, USUAL_RATIO, anchor_fit
from yolofleet.families.networks.description import AnchorDescription, ModelDescription, describe
from yolofleet.families.networks.detector import Detector
from yolofleet.families.table import FAMILIES
from yolofleet.families.weights.value import Weights
from yolofleet.runs.report.console import NullConsole
from yolofleet.support.errors import ConfigError
from yolofleet.support.text import shown


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
    weights = None
    if config.weights:  # a run from scratch imports no readers of weights files
        from yolofleet.families.weights.catalogue import resolve_weights
        from yolofleet.families.weights.reader import read_weights

        weights = read_weights(resolve_weights(config.weights), described)
    if described is None:
        if weights is None:  # config/checks.py refuses it without --recipe-class
            raise ConfigError(
                f"no model: {config.recipe_class} has no method network", hint="--model yolov5n, or --weights"
            )
        described = weights.description
    return described, weights


def with_fitting_anchors(
    description: ModelDescription, index: DataIndex, recipe: Recipe, img: int, seed: int
) -> tuple[ModelDescription, str]:
    """Replace the anchors if they match too few labels; return the description and a text about its anchors.

    The text is "" for networks without anchors. The result is equal on every rank.

    Args:
        recipe: its ``anchor_t`` is the largest side ratio of a match.
        img: training size, pixels.
    """
    if not isinstance(description, AnchorDescription):
        return description, ""
    threshold = getattr(recipe, "anchor_t", USUAL_RATIO)  # the loss may be a user's
    image_of_label = np.repeat(np.arange(len(index)), np.diff(index.offsets))
    longest = index.sizes_wh.max(1, keepdims=True)
    sizes_px = index.boxes_cxcywh_unit[:, 2:] * (index.sizes_wh * (img / longest))[image_of_label]
    anchors = np.array(description.anchors_px)  # [L, A, 2]

    def text() -> str:
        return f"{recall:.1%} of the labels can be matched, by {per_label:.1f} anchors each"

    recall, per_label = anchor_fit(sizes_px, anchors.reshape(-1, 2), threshold)
    if recall >= GOOD_ENOUGH or not len(sizes_px):
        return description, text()
    from yolofleet.families.networks.anchors import better_anchors  # most runs keep their anchors

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
        from yolofleet.families.weights.transfer import transfer  # a run from scratch transfers nothing

        classes = weights.header.nc
        if classes == len(names):
            weights = _with_classes_of(names, weights, console)
        ours, theirs = (getattr(one, "activation", "") for one in (description, weights.description))
        if ours and theirs and ours != theirs:
            console.warn(
                f"start weights: the decoder of {weights.description.name} has {theirs}, and that of {description.name} {ours}"
            )
        other = f" for {classes} classes, {len(names)} here" if classes != len(names) else ""
        console.fact(f"start weights of {weights.description.name}{other}: {transfer(model, weights).text()}")
    return model


def _with_classes_of(names: tuple[str, ...], weights: Weights, console: NullConsole) -> Weights:
    """Return start weights whose classes have the order of the data set; print what differs."""
    from yolofleet.families.networks.class_names import match_names  # a run from scratch does not need it

    match = match_names(weights.header.names, names, assumed="names" in weights.header.assumed)
    # only its author knows its rows
    if match.columns is not None and FAMILIES[weights.header.family].user_code:
        console.warn(f"start weights: {match.text}; those of a network of your own keep their order")
    elif match.text:
        console.note(f"start weights: {match.note}")
        if match.columns is not None:
            from yolofleet.families.weights.transfer import with_class_order

            return with_class_order(weights, match.columns)
    return weights


def named(model: Detector, part: str) -> list[str]:
    """Return the names of the parameters of ``part``: ``backbone``, a pattern with ``*``, ``?`` or ``[``, or a prefix."""
    names = [name for name, _ in model.named_parameters()]
    if part == "backbone":
        return [
            name for name in names if name.startswith(tuple(model.freeze_groups()[: model.backbone_groups]))
        ]
    if set(part) & set("*?["):
        return [name for name in names if fnmatch.fnmatchcase(name, part)]
    return [name for name in names if name.startswith(part)]


def freeze(model: Detector, spec: str) -> list[str]:
    """Switch gradients off for the layers that ``--freeze`` names; return the names of the frozen parameters.

    One number N means the first N layers, several numbers those layers; see :func:`named` for other words. Batch-norm
    layers of frozen parts keep their statistics.

    Raises:
        ConfigError: the model has no such layer, or no parameter is left to train.
    """
    if not spec or spec == "0":
        return []
    groups = model.freeze_groups()
    known = _layers_hint(model, "--freeze")
    parts = [part.strip() for part in spec.split(",") if part.strip()]
    if all(part.isdigit() for part in parts):
        layers = list(range(int(parts[0]))) if len(parts) == 1 else [int(part) for part in parts]
        if max(layers, default=0) >= len(groups):
            raise ConfigError(f"--freeze {spec}: the model has {len(groups)} layers", hint=known)
        parts = [groups[i] for i in layers]
    found = {part: named(model, part) for part in parts}
    unknown = [part for part in parts if not found[part] and part not in groups]  # or a layer without tensors
    frozen = {name for names in found.values() for name in names}
    if not frozen or unknown:
        raise ConfigError(f"--freeze {spec}: no layer {unknown[0] if unknown else spec}", hint=known)
    for name, parameter in model.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)
    if len(frozen) == len(list(model.parameters())):
        raise ConfigError(f"--freeze {spec} leaves nothing to train", hint="freeze fewer layers")
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.BatchNorm2d) and f"{name}.weight" in frozen:
            module.eval()
    return [name for name, _ in model.named_parameters() if name in frozen]


def checkpoint_activations(model: Detector) -> None:
    """Let each block of the network keep only its inputs in a forward pass in training (arXiv:1604.06174).

    The backward pass computes each block again, from the same inputs and with the same kernels, so its gradients have the
    same bits. Batch normalisation stores the same statistics twice.

    Raises:
        ConfigError: the network, a user's own, does not name its blocks.
    """
    try:
        blocks = [model.get_submodule(prefix.rstrip(".")) for prefix in model.freeze_groups()]
    except (NotImplementedError, AttributeError):
        raise ConfigError(
            "--checkpoint-activations: the network has no method freeze_groups, which names its blocks",
            hint="add that method to the network, or leave out --checkpoint-activations",
        ) from None
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)


def lr_factors(model: Detector, recipe: Recipe, source: str = "") -> dict[str, float]:
    """Return the factors of the learning rates of trained parameters, by name, from ``lr_factors`` and ``lr_layer_decay``.

    Args:
        source: of ``lr_factors``. A recipe or a file may have the factor of a part that ``--freeze`` stops.

    Raises:
        ConfigError: a part of ``lr_factors`` has no parameter that is trained.
    """
    groups = model.freeze_groups()
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    factors = dict.fromkeys(trained, 1.0)
    for layer, group in enumerate(groups):
        for name in (name for name in trained if name.startswith(group)):
            factors[name] = recipe.lr_layer_decay ** (len(groups) - 1 - layer)
    for part, factor in parse_lr_factors(recipe.lr_factors).items():
        all_names = named(model, part)
        names = [name for name in all_names if name in factors]
        if not names and not (all_names and is_listed(source)):
            raise ConfigError(
                f"lr_factors: no trained parameter is part of {shown(part)}",
                source=source or None,
                hint=_layers_hint(model, "lr_factors"),
            )
        for name in names:
            factors[name] *= factor
    return factors


def _layers_hint(model: Detector, setting: str) -> str:
    groups = model.freeze_groups()
    return (
        f"layers are 0 ({groups[0][:-1]}) to {len(groups) - 1} ({groups[-1][:-1]}); {setting} also takes backbone, and "
        "prefixes and patterns (model.*.bias) of parameter names"
    )
