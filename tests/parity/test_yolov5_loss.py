"""Loss, gradient and matched cells against numbers of YOLOv5 v7.0 (12 cases)."""

import json

import numpy as np
import pytest
import torch
from conditioning import compare, perturbed
from label_rows import shapes_of
from reference import parity

from yolofleet.families.yolov5.hyperparameters import Yolov5Hyperparameters
from yolofleet.families.yolov5.loss import Yolov5Loss

FACTS = json.loads(parity("yolov5_loss/cases.json").read_text())
CASES = FACTS["cases"]
STRIDES = (8, 16, 32, 64)
WITHOUT_MATCHES = {
    "nc1",
    "nc80",
    "label_smoothing_pw",
    "focal15",
    "autobalance",
}  # the reference kept none of these


@pytest.fixture(scope="module")
def numbers():
    with np.load(parity("yolov5_loss/cases.npz")) as file:
        return {name: file[name] for name in file.files}


def loss_of(case):
    hyp, levels = case["hyp"], case["levels"]
    recipe = Yolov5Hyperparameters(
        **{name: hyp[name] for name in ("cls_pw", "obj_pw", "fl_gamma", "label_smoothing", "anchor_t")}
    )
    anchors = torch.tensor(FACTS["anchors_px"][str(levels)])
    return Yolov5Loss(anchors_px=anchors, strides=STRIDES[:levels], nc=case["nc"], recipe=recipe, img=640)


@pytest.mark.parametrize("head", ["as given", "channels last"])
@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_are_the_originals(name, head, numbers):
    case = CASES[name]
    levels, images = case["levels"], case["batch"]
    loss = loss_of(case)
    given = [perturbed(torch.from_numpy(numbers[f"{name}.p{i}"]).clone()) for i in range(levels)]
    if head == "channels last":  # what a model's head gives: a permuted view of [N, H, W, A, 5 + C]
        given = [raw.permute(0, 2, 3, 1, 4).contiguous().permute(0, 3, 1, 2, 4) for raw in given]
    raws = [raw.requires_grad_() for raw in given]

    targets = loss.match(shapes_of(numbers[f"{name}.targets"]), images, tuple(case["hw"]))
    sums = loss.sums(raws, targets)
    means = loss.gains * sums / torch.from_numpy(targets.counts).clamp(min=1)
    total = images * means.sum()
    total.backward()

    # the original's terms come in the order box, objectness, class and are sums over levels
    items = means.detach().reshape(3, levels).sum(1)
    compare(items, numbers[f"{name}.items"], rtol=1e-5, atol=1e-7)
    compare(total.item(), numbers[f"{name}.loss"].item(), rtol=1e-5)
    for raw, i in zip(raws, range(levels), strict=True):
        expected = numbers[f"{name}.grad{i}"]
        compare(raw.grad, expected, rtol=5e-5, atol=5e-6 * np.abs(expected).max())


@pytest.mark.parametrize("name", sorted(CASES.keys() - WITHOUT_MATCHES))
def test_matches_are_the_originals_in_its_order(name, numbers):
    case = CASES[name]
    levels = case["levels"]
    targets = loss_of(case).match(shapes_of(numbers[f"{name}.targets"]), case["batch"], tuple(case["hw"]))
    image, anchor, y, x = np.concatenate([numbers[f"{name}.idx{i}"] for i in range(levels)]).T
    height, width = np.concatenate(
        [np.tile(numbers[f"{name}.p{i}"].shape[2:4], (targets.matches[i], 1)) for i in range(levels)]
    ).T
    compare(targets.cells, ((image * height + y) * width + x) * 3 + anchor)
    for ours, theirs in (("boxes_cxcywh", "tbox"), ("anchors_wh", "anch"), ("classes", "tcls")):
        rows = np.concatenate([numbers[f"{name}.{theirs}{i}"] for i in range(levels)])
        compare(getattr(targets, ours), rows)


@pytest.mark.parametrize("name", CASES)
def test_matches_and_collisions_are_as_many_as_the_originals(name, numbers):
    case = CASES[name]
    targets = loss_of(case).match(shapes_of(numbers[f"{name}.targets"]), case["batch"], tuple(case["hw"]))
    assert list(targets.matches) == case["matches_per_level"]
    collisions = [
        len(c) - len(np.unique(c)) for c in np.split(targets.cells, np.cumsum(targets.matches)[:-1])
    ]
    assert collisions == case["collisions_per_level"]
    assert len(targets.cells) - len(targets.winners) == sum(collisions)
