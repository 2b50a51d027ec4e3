"""What identifies a run: everything that its result depends on, for its checkpoints. ``resume.py`` compares it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from yolofleet.config.resume_options import VALIDATION
from yolofleet.config.schema import Recipe, TrainConfig
from yolofleet.data.datasets.index import DataIndex
from yolofleet.families.networks.detector import Detector
from yolofleet.training.agreement import kernels
from yolofleet.training.parallel.world import World

RESULT_SETTINGS = [
    "model",
    "cfg",
    "weights",
    "img",
    "single_cls",
    "batch",
    "nominal_batch",
    "optimizer",
    "lr_schedule",
    "lr_scale",
    "multi_scale",
    "freeze",
    "seed",
    "sync_bn",
]
BIT_SETTINGS = ("channels_last", "precision", "reduce")


def fingerprint(
    config: TrainConfig,
    recipe: Recipe,
    index: DataIndex,
    model: Detector,
    world: World,
    code: Mapping[str, Any],
) -> dict[str, Any]:
    """Return everything that the run's result depends on.

    A checkpoint continues only a run with an equal fingerprint, except for ``kernels`` and ``fleet``. ``kernels`` affects
    the last bits, so it must be equal in exact mode. ``fleet`` may change.

    Args:
        code: identity of the user's code that decides the result; empty values without such code.
    """
    settings = {name: getattr(config, name) for name in RESULT_SETTINGS}
    settings["lr_schedule"] = config.lr_decay
    # keys that checkpoints of earlier versions do not have
    if config.cache == "jpeg":  # the other caches do not change pixels
        settings["cache"] = "jpeg"
    newer = ["sampler", "rect", "fraction"] + (list(VALIDATION) if config.sampler == "weights" else [])
    for name in newer:
        if getattr(config, name) != TrainConfig.model_fields[name].default:
            settings[name] = getattr(config, name)
    settings |= {name: value for name, value in code.items() if value}
    return {
        "settings": settings | {"micro_batch": config.micro_batch},
        "recipe": recipe.model_dump(mode="json"),
        "data": index.digest + (index.outline_digest() if recipe.copy_paste else ""),
        # as a checkpoint stores it: lists, no tuples
        "model": json.loads(json.dumps(model.description.to_dict())),
        "names": list(model.names),
        "kernels": kernels(world.device)
        | {name: getattr(config, name) for name in BIT_SETTINGS}
        | ({"compile": True} if config.compile else {})
        | ({"albumentations": _albumentations_version()} if recipe.albumentations else {}),
        "fleet": {"processes": world.size, "device": world.device.type, "host": world.host},
    }


def _albumentations_version() -> str:
    from yolofleet.data.input.single_images import albumentations_version  # only recipes with albumentations

    return albumentations_version()
