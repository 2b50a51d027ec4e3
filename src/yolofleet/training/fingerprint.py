"""What identifies a run: everything that its result depends on, for its checkpoints. ``resume.py`` compares it."""

from __future__ import annotations

import json
from typing import Any

from yolofleet.config.schema import Recipe, TrainConfig
from yolofleet.data.datasets.index import DataIndex
from yolofleet.families.networks.detector import Detector
from yolofleet.training.agreement import kernels
from yolofleet.training.parallel.process import check_equal
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
    "freeze",
    "seed",
    "sync_bn",
]
BIT_SETTINGS = ("precision", "reduce")


def fingerprint(
    config: TrainConfig, recipe: Recipe, index: DataIndex, model: Detector, world: World, callbacks: str
) -> dict[str, Any]:
    """Return everything that the run's result depends on. Collective: every rank.

    A checkpoint continues only a run with an equal fingerprint, except for ``kernels`` and ``fleet``. ``kernels`` affects
    the last bits, so it must be equal in exact mode. ``fleet`` may change.

    Args:
        callbacks: identity of those that change the training; "": none.
    Raises:
        ClusterError: the ranks would augment with other polygons or packages.
    """
    settings = {name: getattr(config, name) for name in RESULT_SETTINGS}
    settings["lr_schedule"] = config.lr_decay
    if config.optimizer_class:  # its identity is below
        settings["optimizer"] = TrainConfig.model_fields["optimizer"].default
    # keys that checkpoints of earlier versions do not have
    if config.cache == "jpeg":  # the other caches do not change pixels
        settings["cache"] = "jpeg"
    newer = ["sampler", "rect", "fraction"]
    newer += ["val_period", "val_batch"] if config.sampler == "weights" else []
    for name in newer:
        if getattr(config, name) != TrainConfig.model_fields[name].default:
            settings[name] = getattr(config, name)
    settings |= {"callbacks": callbacks} if callbacks else {}
    for name in ("recipe_class", "optimizer_class"):
        if value := getattr(config, name):
            from yolofleet.config.user_code import identity_of

            settings[name] = identity_of(
                value, "--optimizer" if name == "optimizer_class" else "--recipe-class"
            )
    exact: dict[str, Any] = {name: getattr(config, name) for name in BIT_SETTINGS}
    if config.passes == "compiled":
        exact["compile"] = True
    if recipe.albumentations:
        from yolofleet.data.input.single_images import albumentations_version

        exact["albumentations"] = albumentations_version()
    found = {
        "settings": settings | {"micro_batch": config.micro_batch},
        "recipe": recipe.model_dump(mode="json"),
        "data": index.digest + (index.outline_digest() if recipe.copy_paste else ""),
        # as a checkpoint stores it: lists, no tuples
        "model": json.loads(json.dumps(model.description.to_dict())),
        "names": list(model.names),
        "kernels": kernels(world.device) | exact,
        "fleet": {"processes": world.size, "device": world.device.type, "host": world.host},
    }
    if recipe.copy_paste or recipe.albumentations:
        versions_here = f"{found['data']} {found['kernels'].get('albumentations')}"
        check_equal(world, "the polygons, or the version of albumentations,", versions_here)
    return found
