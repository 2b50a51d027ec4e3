"""A small network and its exported files, made once for all tests."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from yolofleet.families.build import build_model
from yolofleet.families.custom import CustomDescription
from yolofleet.families.darknet.cfg import DarknetDescription
from yolofleet.families.networks.description import ModelDescription, describe
from yolofleet.families.networks.detector import Detector
from yolofleet.inference.export.export_metadata import ExportMetadata, Suppression
from yolofleet.inference.export.graph import ExportGraph, ExportJob
from yolofleet.inference.export.verify import batches_of, generated_images
from yolofleet.tasks.table import task_of

NAMES = ("person", "dog", "traffic light")
SIZE_HW = (64, 96)
# an import would keep its name from other tests, whose runs load a copy
small_detr = runpy.run_path(str(Path(__file__).parent / "detr_family" / "small_detr.py"))


def small(name: str) -> ModelDescription:
    """A narrow and shallow form of a built-in model."""
    description = describe(name)
    if isinstance(description, DarknetDescription):
        return description
    assert not isinstance(description, CustomDescription)
    return replace(cast(Any, description), depth_multiple=0.1, width_multiple=0.125)  # rows or PP-YOLOE


def pictures(count: int, size_hw: tuple[int, int] = SIZE_HW) -> Tensor:
    """[N, 3, H, W] in 0..1, of the kind that :func:`network` has seen."""
    shapes = ExportMetadata("", "", NAMES, (32,), size_hw, count)
    return batches_of(shapes, size_hw, generated_images())[0]


def network(name: str = "yolov5n", nc: int = len(NAMES), seed: int = 0) -> Detector:
    """A small network whose output depends on the image, as a trained one's does and a fresh one's hardly: the
    statistics of all normalisations are those of some images, and the last layers' weights are large."""
    model = build_model(small(name), nc, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = None  # plain mean
            elif isinstance(module, nn.Conv2d) and module.bias is not None:  # no normalisation after it
                module.weight.normal_(0, 1 / module.weight[0].numel() ** 0.5, generator=generator)
                module.bias.zero_()
        model.train()(pictures(4))
    if nc == len(NAMES):
        model.names = NAMES
    return model.eval()


def spread(name: str, seed: int) -> Detector:
    """Return a small network whose scores differ."""
    if "-toy" not in name:
        return network(name, seed=seed)
    model = build_model(small_detr["preset"](name), 3, seed=seed)
    model.names, generator = ("a", "b", "c"), torch.Generator().manual_seed(seed)
    decoder: nn.Module = model.decoder  # type: ignore[assignment]
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = None  # plain mean
        model.train()(pictures(4))
        for part, parameter in decoder.named_parameters():
            if ("score_head" in part or "class_embed" in part) and part.endswith("weight"):
                parameter.normal_(0, 0.7, generator=generator)
            elif ("bbox_head" in part or "bbox_embed" in part) and part.endswith("layers.2.weight"):
                parameter.normal_(0, 0.1, generator=generator)
        for part, parameter in model.named_parameters():
            if part in ("masks.vectors.weight", "masks.project.weight"):
                parameter.normal_(0, 1, generator=generator)
    return model.eval()


def metadata_of(
    model: Detector,
    *,
    size_hw: tuple[int, int] | None = SIZE_HW,
    batch: int | None = 1,
    half: bool = False,
    nms: Suppression | None = None,
) -> ExportMetadata:
    description = model.description
    return ExportMetadata(
        description.family,
        description.name,
        model.names,
        model.strides,
        size_hw,
        batch,
        half,
        nms,
        needs_nms=model.needs_nms,
        task=model.task,
        outputs=task_of(model).outputs,
    )


def job_of(
    model: Detector, metadata: ExportMetadata, size_hw: tuple[int, int] = SIZE_HW, *, simplify: bool = False
) -> ExportJob:
    return ExportJob(ExportGraph(model, half=metadata.half), metadata, size_hw, simplify)
