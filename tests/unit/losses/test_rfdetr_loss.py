"""RF-DETR's loss: sums of parts, groups that are matched by themselves, and gradients that no micro-batch changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from detr_raws import CLASSES, labels
from exported import small_detr
from label_rows import of_images
from torch import Tensor

from yolofleet.families.build import build_model, family_loss
from yolofleet.families.dfine.hyperparameters import DfineHyperparameters
from yolofleet.families.rtdetr.hyperparameters import DetrGains
from yolofleet.families.rtdetr.raws import DetrRaws, RtdetrTrainingRaws

SIZE_HW = (64, 64)
RECIPES = {"rfdetr-toy": DetrGains, "dfine-toy": DfineHyperparameters}


def network(name: str) -> Any:
    return build_model(small_detr["preset"](name), CLASSES, seed=1).train()


def raws(images: int, groups: int, queries: int = 8, layers: int = 2) -> RtdetrTrainingRaws:
    """Raw predictions in training; each image's are drawn by themselves."""
    every = groups * queries
    made = []
    for image in range(images):
        rng = np.random.default_rng(image)
        boxes, logits = rng.uniform(0.2, 0.6, (layers, every, 4)), rng.normal(size=(layers, every, CLASSES))
        cells = rng.uniform(0.2, 0.6, (every, 4)), rng.normal(size=(every, CLASSES))
        made.append(
            (
                boxes[-1, :queries],
                logits[-1, :queries],
                np.ones(4),
                boxes,
                logits,
                *cells,
                boxes[:, :0],
                logits[:, :0],
            )
        )
    parts = (torch.from_numpy(np.stack(part).astype(np.float32)) for part in zip(*made, strict=True))
    return RtdetrTrainingRaws(*(part.requires_grad_() for part in parts))


def loss_of() -> Any:
    return family_loss(network("rfdetr-toy"), DetrGains(), 64)


def rows(found: RtdetrTrainingRaws, first: int, last: int) -> RtdetrTrainingRaws:
    return RtdetrTrainingRaws(*(part[first:last] for part in found))


def test_parts_of_a_micro_batch_add_up_to_the_whole() -> None:
    loss, counts = loss_of(), (3, 0, 12, 1)
    truth, predicted = labels(*counts), raws(4, 3)
    whole = loss.sums(predicted, loss.match(truth, 4, SIZE_HW))
    parts = [
        loss.sums(rows(predicted, a, b), loss.match(of_images(truth, a, b), b - a, SIZE_HW))
        for a, b in ((0, 1), (1, 2), (2, 4))
    ]
    assert torch.allclose(sum(parts), whole, rtol=1e-5)
    assert loss.match(truth, 4, SIZE_HW).counts.tolist() == [16] * 4
    assert parts[1][0] > 0 and not parts[1][1:3].any()  # an image without labels has a class loss alone


def test_equal_groups_have_the_loss_of_one() -> None:
    """Each group is matched by itself, and all together weigh as much as one."""
    loss, truth, one = loss_of(), labels(3, 2), raws(2, 1)
    targets = loss.match(truth, 2, SIZE_HW)
    three = RtdetrTrainingRaws(
        *one[:3],
        *(part.repeat(*(3 if i == part.ndim - 2 else 1 for i in range(part.ndim))) for part in one[3:]),
    )
    assert torch.allclose(loss.sums(three, targets), loss.sums(one, targets), rtol=1e-5)
    # a query of another group in the place of a match does not take it away
    pairs = loss.matched(three, targets)[1]
    assert len(pairs.output) == 3 * 3 * 5 and pairs.weight.sum() == pytest.approx(3 * 5)
    assert sorted({*(pairs.query // 8).tolist()}) == [0, 1, 2]


def test_a_validation_has_the_terms_of_the_last_layer() -> None:
    loss, truth, one = loss_of(), labels(3, 2), raws(2, 1)
    targets = loss.match(truth, 2, SIZE_HW)
    found = loss.sums(DetrRaws(*one[:3]), targets)
    assert torch.allclose(found[:3], loss.sums(one, targets)[:3]) and found[3] == 0


def test_a_prediction_that_is_not_finite_gives_no_finite_sum() -> None:
    loss, found = loss_of(), raws(1, 3)
    with torch.no_grad():
        found.all_boxes[0, 0, 5] = torch.nan
    assert loss.sums(found, loss.match(labels(3), 1, SIZE_HW)).isnan().all()


def gradient(name: str, micro_batch: int) -> Tensor:
    """The gradient of a step of 8 images, of which three have no labels, in micro-batches of this size."""
    model, counts = network(name), (3, 0, 7, 1, 0, 0, 2, 4)
    loss = family_loss(model, RECIPES[name](), 64)
    truth = labels(*counts)
    x = torch.rand(8, 3, *SIZE_HW, generator=torch.Generator().manual_seed(3))
    divisor = torch.from_numpy(loss.match(truth, 8, SIZE_HW).counts)
    for first in range(0, 8, micro_batch):
        last = first + micro_batch
        keys = [(0, 0, i) for i in range(first, last)]
        targets = loss.match(of_images(truth, first, last), micro_batch, SIZE_HW, keys)
        ((loss.sums(model(x[first:last], targets), targets) * loss.gains) / divisor).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize(("name", "bound"), [("rfdetr-toy", 2e-6), ("dfine-toy", None)])
def test_another_micro_batch_changes_the_gradient_by_rounding_alone(name: str, bound: float | None) -> None:
    """D-FINE, which normalises over the images of a micro-batch, shows that the comparison can fail."""
    whole = gradient(name, 8)
    for micro_batch in (1, 2, 4):
        other = float((gradient(name, micro_batch) - whole).norm() / whole.norm())
        print(f"{name}: micro-batches of {micro_batch}, relative difference {other:.1e}")
        assert other < bound if bound else other > 0.05
