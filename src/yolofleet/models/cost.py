"""Count the floating-point operations of a forward pass without running it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from yolofleet.models.blocks import Upsample
from yolofleet.models.detector import Detector


def gflops(model: Detector, img: int = 640) -> float:
    """Return 10^9 floating-point operations for one image of ``img`` x ``img`` pixels.

    The rules are those of YOLOv5's published figures: a multiply-add counts 2; convolutions count without bias; a batch
    normalisation counts 4 multiply-adds per value, an upsampled map 1; other operations count 0.
    """
    total = 0

    def count(module: nn.Module, _inputs: Any, output: Tensor) -> None:
        nonlocal total
        if isinstance(module, nn.Conv2d):
            total += output.numel() * module.weight[0].numel()
        else:
            total += output.numel() * (4 if isinstance(module, nn.BatchNorm2d) else 1)

    shadow = copy.deepcopy(model).to("meta")  # shapes only
    for module in shadow.modules():
        if isinstance(module, (nn.Conv2d, nn.BatchNorm2d, Upsample)):
            module.register_forward_hook(count)
    with torch.no_grad():
        shadow(torch.zeros(1, 3, img, img, device="meta"))
    return 2 * total / 1e9
