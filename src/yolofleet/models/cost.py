"""Arithmetic of one forward pass, counted without doing it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from yolofleet.models.blocks import Upsample
from yolofleet.models.detector import Detector


def gflops(model: Detector, img: int = 640) -> float:
    """10^9 floating-point operations for one image of ``img`` x ``img`` pixels.

    Counted as published YOLOv5 figures are: a multiply-add is 2; convolutions without bias; 4 multiply-adds per
    value of a batch normalisation and 1 per value of an upsampled map; nothing for the rest.
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
