"""The cross entropy of masks within a box against two more packages, with predictions and masks by formula.

lucid-yolo 0.5.0.dev2 (Apache-2.0) has the term of YOLOv5's networks: of each mask the sum over the cells whose centres lie in the
box, by the box's area of at least one cell, and its mean over masks. nitid 0.9.2 (Apache-2.0) has the term of D-FINE-seg: equal, with
boxes that end at cells. Its dice is taken within the box and has no 1 added; ours is RF-DETR's, see test_detr_masks_parity.py.
Both packages import torchvision. Numbers are stored as of_transformers.py says.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from conditioning import compare, perturbed
from of_transformers import each_result, some

from yolofleet.data.geometry.boxes import cxcywh_from_xyxy
from yolofleet.data.geometry.shapes import Shapes
from yolofleet.families.rtdetr.mask_loss import mask_losses
from yolofleet.families.yolov5.hyperparameters import Yolov5Hyperparameters
from yolofleet.families.yolov5.mask_loss import MaskLoss

WIDTH, MAP_HW, CLASSES = 4, (16, 24), 2
TORCHVISION = find_spec("torchvision") is not None
CORNERS = np.array([[0.5, 2.25, 7, 9.75], [3, 0, 24, 16], [10.25, 5.5, 13.75, 12], [18, 3, 18.5, 3.25]])


def drawn(seed: int, *shape: int) -> torch.Tensor:
    values = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    return perturbed(torch.from_numpy(values))


def rasters_of(masks: int) -> np.ndarray:
    return np.random.default_rng(9).integers(0, 2, (masks, *MAP_HW)).astype(np.uint8) * 255


def logits_of(coefficients: torch.Tensor, prototypes: torch.Tensor) -> torch.Tensor:
    return torch.einsum("nd,dhw->nhw", coefficients.double(), prototypes.double())


def gradients(loss: torch.Tensor, leaves: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    found = torch.autograd.grad(loss, list(leaves.values()))
    named = {f"gradient of {name}": some(g.double()) for name, g in zip(leaves, found, strict=True)}
    return {"loss": loss.detach().double().numpy(), **named}


def compare_all(found: dict[str, np.ndarray], key: str, ask: Any, package: str) -> None:
    for expected in each_result(key, ask, TORCHVISION and find_spec(package) is not None):
        assert expected.keys() == found.keys()
        for name, values in expected.items():
            compare(found[name], values, rtol=2e-5, atol=2e-6, name=name)


@dataclass(frozen=True)
class Drawn(Shapes):
    """Labels whose masks are ``rasters_of``."""

    has_mask: np.ndarray

    def in_windows(self, size_hw: tuple[int, int], windows: np.ndarray) -> np.ndarray:
        assert size_hw == MAP_HW
        parts = zip(rasters_of(len(self)), windows.tolist(), strict=True)
        return np.concatenate(
            [one[top:bottom, left:right].ravel() for one, (top, bottom, left, right) in parts]
        )


def test_the_term_of_yolov5_is_that_of_lucid_yolo() -> None:
    height, width = MAP_HW
    boxes = cxcywh_from_xyxy(CORNERS / np.array([width, height] * 2)).astype(np.float32)
    labels = Drawn(np.zeros(4, np.int64), np.arange(4) % CLASSES, boxes, np.ones(4, bool))
    anchors = torch.tensor([[[12.0, 12.0], [40.0, 40.0]]])
    recipe = Yolov5Hyperparameters(anchor_t=20)
    loss = MaskLoss(anchors_px=anchors, strides=(8,), nc=CLASSES, recipe=recipe, img=96)
    raw = drawn(1, 1, 2, height // 2, width // 2, 5 + CLASSES + WIDTH).requires_grad_()
    prototypes = drawn(2, 1, WIDTH, *MAP_HW).requires_grad_()
    leaves = {"raw": raw, "prototypes": prototypes}
    targets = loss.match(labels, 1, (4 * height, 4 * width))
    cells = torch.from_numpy(np.asarray(targets.cells))
    owners = torch.from_numpy(targets.owners[np.argsort(targets.masked)])
    assert len(cells) == len(owners) >= 12
    found = loss.sums([raw, prototypes], targets)[-1] / len(cells)

    def ask() -> dict[str, Any]:
        from lucid_yolo.losses.mask_loss import instance_mask_loss

        rows = raw.permute(0, 2, 3, 1, 4).flatten(0, 3)[cells]
        logits = logits_of(rows[:, -WIDTH:], prototypes[0])
        masks = torch.from_numpy(rasters_of(4) / 255.0)[owners]
        return gradients(instance_mask_loss(logits, masks, torch.from_numpy(CORNERS)[owners]), leaves)

    compare_all(gradients(found, leaves), "mask-loss-lucid-yolo", ask, "lucid_yolo")


def test_the_cross_entropy_of_the_transformers_is_that_of_nitid() -> None:
    masks = 3
    windows = torch.tensor([[0, 2, 7, 10], [3, 0, 24, 16], [10, 5, 14, 12]])
    number = torch.tensor([2, 0, 1])
    coefficients, prototypes = (
        drawn(3, masks, WIDTH + 1).requires_grad_(),
        drawn(4, WIDTH, *MAP_HW).requires_grad_(),
    )
    leaves = {"coefficients": coefficients, "prototypes": prototypes}
    rasters = torch.from_numpy(rasters_of(masks))
    found = mask_losses(coefficients, prototypes, rasters, windows, number)[:, 0].mean()

    def ask() -> dict[str, Any]:
        from dfine.nn.losses.criterion import DFINECriterion

        logits = logits_of(coefficients[:, :-1], prototypes) + coefficients[:, -1:, None].double()
        boxes = windows[number].double()
        loss = DFINECriterion._cropped_bce_loss(logits, rasters[number].double() / 255, boxes)
        return gradients(loss, leaves)

    compare_all(gradients(found, leaves), "mask-loss-nitid", ask, "dfine")
