"""Batch normalisation folded into the convolution before it, for inference."""

from __future__ import annotations

import copy

import torch
from torch import nn

from yolofleet.models.blocks import Conv
from yolofleet.models.detection import DetectionModel


@torch.no_grad()
def fuse(model: DetectionModel) -> DetectionModel:
    """A copy in evaluation mode whose convolutions carry the normalisation; same outputs up to rounding.

    With scale g = weight / sqrt(var + eps): W' = g W and b' = bias - g mean, worked out in float64.
    """
    fused = copy.deepcopy(model).eval()
    for module in fused.modules():
        if isinstance(module, Conv) and isinstance(module.bn, nn.BatchNorm2d):
            conv, bn = module.conv, module.bn
            assert bn.running_mean is not None and bn.running_var is not None
            scale = bn.weight.double() / (bn.running_var.double() + bn.eps).sqrt()
            conv.weight.copy_(conv.weight.double() * scale.view(-1, 1, 1, 1))
            conv.bias = nn.Parameter(
                (bn.bias.double() - scale * bn.running_mean.double()).to(conv.weight.dtype)
            )
            module.bn = nn.Identity()
    return fused.requires_grad_(False)
