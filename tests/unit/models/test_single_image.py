"""A micro-batch of one image has the gradient of the same image twice, halved, in every family and memory format."""

from __future__ import annotations

import copy
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from exported import network
from torch import Tensor

from yolofleet.families.build import build_model
from yolofleet.families.networks.detector import Detector

# an import would keep its name from other tests, whose runs load a copy
small_detr = runpy.run_path(str(Path(__file__).resolve().parents[2] / "detr_family" / "small_detr.py"))
NETWORKS = ("yolov5n", "darknet-yolov3-tiny", "ppyoloe-s", "rtdetr-toy", "dfine-toy", "rfdetr-toy")
FORMATS = {"channels-last": torch.channels_last, "contiguous": torch.contiguous_format}
SIZE_HW = (96, 64)


def made(name: str) -> Detector:
    if not name.endswith("-toy"):
        return network(name)
    # every cell is a query, so that no rounding error chooses
    return build_model(replace(small_detr["preset"](name), queries=1000), 3, seed=1)


def gradient(model: Detector, images: Tensor) -> Tensor:
    """Return the gradient of a weighted sum of all outputs for each image, in float64, as one vector."""
    raws = model.train()(images)
    total = images.new_zeros((), dtype=torch.float64)
    for i, raw in enumerate(raws):
        # one weight for all queries, whose order is a matter of rounding
        shape = raw.shape[1:] if model.needs_nms else raw.shape[-1:]
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
        total = total + (raw.double() * weight).sum()
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(total / len(images), parameters, allow_unused=True)
    return torch.cat([g.double().flatten() for g in found if g is not None])


@pytest.mark.parametrize("memory", FORMATS)
@pytest.mark.parametrize("name", NETWORKS)
def test_one_image_has_half_the_gradient_of_the_same_image_twice(name, memory):
    base = made(name)
    image = torch.rand(1, 3, *SIZE_HW, generator=torch.Generator().manual_seed(0))
    pair = image.repeat(2, 1, 1, 1)
    truth = gradient(copy.deepcopy(base).double(), pair.double())
    for images in (image, pair):
        model: Any = copy.deepcopy(base)  # torch's stub lacks memory_format
        model = model.to(memory_format=FORMATS[memory])
        found = gradient(model, images.to(memory_format=FORMATS[memory]))
        assert (found - truth).norm() / truth.norm() < 0.1, len(images)
