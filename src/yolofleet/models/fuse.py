"""Fold batch normalisation into the convolution before it, for inference."""

from __future__ import annotations

import copy

import torch

from yolofleet.models.detector import Detector


@torch.no_grad()
def fuse(model: Detector) -> Detector:
    """Return a copy in evaluation mode with folded batch normalisation; its outputs are equal up to rounding.

    Every block that can be folded has a method ``fold``.
    """
    fused = copy.deepcopy(model).eval()
    for module in fused.modules():
        fold = getattr(module, "fold", None)
        if fold is not None:
            fold()
    return fused.requires_grad_(False)
