"""The losses of masks of RT-DETR and D-FINE: formulas, sums of parts, labels without a mask, background, chunks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from detr_raws import CLASSES, LAYERS, QUERIES, REG_SCALE, bins, labels, of_images, raws
from torch import Tensor

from yolofleet.data.geometry.mask_shapes import MaskShapes
from yolofleet.data.geometry.shapes import Shapes
from yolofleet.families.dfine.hyperparameters import DfineHyperparameters
from yolofleet.families.dfine.loss import DfineLoss
from yolofleet.families.rtdetr import mask_loss
from yolofleet.families.rtdetr.loss import RtdetrLoss
from yolofleet.families.rtdetr.mask_loss import MaskLoss, MaskTargets, mask_losses, windows_of
from yolofleet.families.rtdetr.raws import MaskRaws, MaskTrainingRaws
from yolofleet.tasks.masks.task import MASKS

SIZE_HW, CELLS_HW, WIDTH = (64, 96), (16, 24), 6


def masked(shapes: Shapes, *without: int) -> MaskShapes:
    """Labels whose masks are diamonds in their boxes; the labels ``without`` have none."""
    rings = []
    for number, (x, y, w, h) in enumerate(shapes.boxes):
        ring = np.array([[x, y - h / 2], [x + w / 2, y], [x, y + h / 2], [x - w / 2, y]], np.float32)
        rings.append([] if number in without else [ring])
    return replace(MaskShapes.of_image(shapes.classes, shapes.boxes, rings), image=shapes.image)


def part_of_labels(every: MaskShapes, first: int, last: int) -> MaskShapes:
    mine = every.rows((every.image >= first) & (every.image < last))
    return replace(mine, image=mine.image - first)


def loss_of(family: str, **values: object) -> MaskLoss:
    recipe = DfineHyperparameters.model_validate(values)
    dfine = family == "dfine"
    boxes = DfineLoss(recipe, CLASSES, bins(), REG_SCALE) if dfine else RtdetrLoss(recipe, CLASSES)
    return MaskLoss(boxes, recipe)


def predicted(images: int, noisy: int, family: str) -> MaskTrainingRaws:
    """Random raw predictions, each image's drawn by itself."""
    found = raws(images, noisy, dfine=family == "dfine")
    drawn = [np.random.default_rng((1, image)) for image in range(images)]
    coefficients = np.zeros((images, LAYERS, noisy + QUERIES, WIDTH + 1), np.float32)
    for of_image, rng in zip(coefficients, drawn, strict=True):
        of_image[:, noisy:] = rng.normal(size=(LAYERS, QUERIES, WIDTH + 1))
        of_image[:, :noisy] = rng.normal(size=(noisy, LAYERS, WIDTH + 1)).swapaxes(0, 1)
    maps = np.array([rng.normal(size=(LAYERS, WIDTH, *CELLS_HW)) for rng in drawn], np.float32)
    maps = maps.reshape(images, LAYERS, WIDTH, *CELLS_HW)
    prototypes = tuple(torch.from_numpy(maps[:, i].copy()).requires_grad_() for i in range(LAYERS))
    return MaskTrainingRaws(found, torch.from_numpy(coefficients).requires_grad_(), prototypes)


def part_of(whole: MaskTrainingRaws, first: int, last: int, noisy: int) -> MaskTrainingRaws:
    most = whole.found.noisy_boxes.shape[2]
    picked = [*range(noisy), *range(most, most + QUERIES)]
    coefficients = whole.coefficients.detach()[first:last, :, picked].requires_grad_()
    prototypes = tuple(maps.detach()[first:last].clone().requires_grad_() for maps in whole.prototypes)
    return MaskTrainingRaws(of_images(whole.found, first, last, noisy), coefficients, prototypes)


def backward(
    loss: MaskLoss, given: MaskTrainingRaws, targets: MaskTargets
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Sums, and the gradients of coefficients and prototypes."""
    sums = loss.sums(given, targets)
    leaves = [given.coefficients, *given.prototypes]
    found = torch.autograd.grad((sums * loss.gains).sum(), leaves, allow_unused=True)
    first, *others = (torch.zeros_like(t) if g is None else g for g, t in zip(found, leaves, strict=True))
    return sums.detach(), first, others


def named(loss: MaskLoss, sums: Tensor) -> dict[str, float]:
    return dict(zip(loss.terms, sums.tolist(), strict=True))


@pytest.fixture(params=["rtdetr", "dfine"])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


def test_a_box_has_the_cells_that_it_touches() -> None:
    boxes = np.array(
        [[0.5, 0.5, 0.5, 0.25], [0.51, 0.5, 0.001, 0.001], [0.999, 0.0, 0.002, 0.0], [0.5, 0.5, 2, 2]]
    )
    found = windows_of(boxes, (8, 12))
    # 3..9 and 3..5; a point; a point at the right edge, at the top; more than the map
    assert found.tolist() == [[3, 3, 9, 5], [6, 3, 7, 5], [11, 0, 12, 1], [0, 0, 12, 8]]


def test_both_losses_have_the_values_of_their_formulas() -> None:
    rng = np.random.default_rng(0)
    coefficients, prototypes = rng.normal(size=(3, WIDTH + 1)), rng.normal(size=(WIDTH, 5, 7))
    rasters, windows = rng.integers(0, 256, (2, 5, 7), np.uint8), np.array([[1, 0, 4, 3], [6, 2, 7, 3]])
    number = np.array([1, 0, 1])
    expected = []
    for c, n in zip(coefficients, number, strict=True):
        chance = 1 / (1 + np.exp(-(np.tensordot(c[:-1], prototypes, 1) + c[-1])))
        wanted = rasters[n] / 255
        left, top, right, bottom = windows[n]
        cell = -(wanted * np.log(chance) + (1 - wanted) * np.log(1 - chance))
        shared = 2 * (chance * wanted).sum() + 1
        expected.append([cell[top:bottom, left:right].mean(), 1 - shared / (chance.sum() + wanted.sum() + 1)])
    given = (torch.from_numpy(part.astype(np.float32)) for part in (coefficients, prototypes))
    found = mask_losses(*given, *(torch.from_numpy(part) for part in (rasters, windows, number)))
    assert np.allclose(found.numpy(), expected, rtol=1e-5)


def test_a_mask_that_is_right_costs_less_than_its_opposite_and_than_nothing() -> None:
    targets = loss_of("rtdetr").match(masked(labels(1)), 1, SIZE_HW)
    right = torch.from_numpy(targets.rasters / 127.5 - 1).float() * 4  # as a prototype
    parts = (torch.from_numpy(part) for part in (targets.rasters, targets.windows, np.zeros(3, np.int64)))
    found = mask_losses(torch.tensor([[1.0, 0], [-1, 0], [0, -9]]), right, *parts)
    assert (found[0] < found[1:]).all()


@pytest.mark.parametrize("ends", [(1, 2, 3, 4), (2, 4), (1, 4)])
def test_parts_of_a_micro_batch_add_up_to_the_whole(family: str, ends: tuple[int, ...]) -> None:
    """No pass, fleet or neighbour changes an image's loss or its gradient."""
    loss, keys = loss_of(family), [(0, 2, i) for i in range(4)]
    truth = masked(labels(3, 0, 11, 25), 1, 20)
    whole = loss.match(truth, 4, SIZE_HW, keys)
    given = predicted(4, whole.noisy_boxes.shape[1], family)
    expected, of_coefficients, of_prototypes = backward(loss, given, whole)
    sums, total, first = torch.zeros_like(expected), np.zeros_like(whole.counts), 0
    for last in ends:
        targets = loss.match(part_of_labels(truth, first, last), last - first, SIZE_HW, keys[first:last])
        noisy = targets.noisy_boxes.shape[1]
        part, coefficients, prototypes = backward(loss, part_of(given, first, last, noisy), targets)
        sums, total = sums + part, total + targets.counts
        most = given.found.noisy_boxes.shape[2]
        wanted = of_coefficients[first:last, :, [*range(noisy), *range(most, most + QUERIES)]]
        assert torch.allclose(coefficients, wanted, rtol=1e-4, atol=1e-5)
        for mine, theirs in zip(prototypes, of_prototypes, strict=True):
            assert torch.allclose(mine, theirs[first:last], rtol=1e-4, atol=1e-5)
        first = last
    assert torch.allclose(sums, expected, rtol=1e-5)
    assert total.tolist() == whole.counts.tolist()
    assert whole.counts[-2:].tolist() == [39, 39], "labels without a mask count, too"


def test_the_terms_of_boxes_are_those_of_a_network_of_boxes(family: str) -> None:
    loss, truth = loss_of(family), labels(4, 0)
    targets, plain = loss.match(masked(truth), 2, SIZE_HW), loss.boxes.match(truth, 2, SIZE_HW)
    given = predicted(2, targets.noisy_boxes.shape[1], family)
    with_masks, boxes = loss.sums(given, targets), loss.boxes.sums(given.found, plain)
    assert loss.terms[:-2] == loss.boxes.terms and targets.counts[:-2].tolist() == plain.counts.tolist()
    for i, term in enumerate(loss.boxes.terms):
        assert (with_masks[i] > boxes[i]) if term in ("aux", "denoise") else with_masks[i] == boxes[i]


def test_every_layer_and_every_near_copy_has_both_terms(family: str) -> None:
    """With masks that are equal everywhere, each of the layers and copies adds the same."""
    loss = loss_of(family)
    truth = masked(labels(4, 2))
    targets = loss.match(truth, 2, SIZE_HW)
    given = predicted(2, targets.noisy_boxes.shape[1], family)
    flat = given._replace(coefficients=torch.zeros_like(given.coefficients))
    sums = named(loss, loss.sums(flat, targets))
    boxes = dict(zip(loss.boxes.terms, loss.boxes.sums(given.found, targets).tolist(), strict=True))
    wanted = targets.rasters.reshape(6, -1) / 255
    dice = (1 - (wanted.sum(1) + 1) / (0.5 * wanted.shape[1] + wanted.sum(1) + 1)).sum()
    assert sums["mask"] == pytest.approx(6 * np.log(2), rel=1e-5)
    assert sums["dice"] == pytest.approx(dice, rel=1e-5)
    each = 5 * (6 * np.log(2) + dice)
    assert sums["aux"] - boxes["aux"] == pytest.approx((LAYERS - 1) * each, rel=1e-3)
    assert sums["denoise"] - boxes["denoise"] == pytest.approx(LAYERS * each, rel=1e-3)


def test_labels_without_a_mask_are_learned_as_boxes(family: str) -> None:
    loss, truth = loss_of(family), labels(3, 2)
    targets = loss.match(masked(truth, *range(5)), 2, SIZE_HW)
    given = predicted(2, targets.noisy_boxes.shape[1], family)
    sums, coefficients, prototypes = backward(loss, given, targets)
    assert targets.rasters.shape == (0, *CELLS_HW)
    assert torch.equal(sums[:-2], loss.boxes.sums(given.found, targets).detach())
    assert not sums[-2:].any() and not coefficients.any() and not any(map(torch.any, prototypes))


@pytest.mark.parametrize("counts", [(), (0,), (0, 0)])
def test_background_has_no_loss_of_masks(family: str, counts: tuple[int, ...]) -> None:
    loss = loss_of(family)
    targets = loss.match(masked(labels(*counts)), len(counts), SIZE_HW)
    sums, coefficients, _ = backward(loss, predicted(len(counts), 0, family), targets)
    assert sums.isfinite().all() and not sums[-2:].any() and not coefficients.any()


def test_a_validation_has_the_terms_of_the_last_layer(family: str) -> None:
    loss = loss_of(family)
    targets = loss.match(masked(labels(4, 0)), 2, SIZE_HW)
    given = predicted(2, targets.noisy_boxes.shape[1], family)
    noisy = given.found.noisy_boxes.shape[2]
    last = MaskRaws(*given.found[:3], given.coefficients[:, -1, noisy:], given.prototypes[-1])
    with torch.inference_mode():
        sums = named(loss, loss.sums(last, targets))
    whole = named(loss, loss.sums(given, targets))
    assert [sums[term] for term in ("mask", "dice")] == [
        pytest.approx(whole[term]) for term in ("mask", "dice")
    ]
    assert sums["aux"] == sums["denoise"] == 0 < sums["mask"]


def test_masks_are_made_in_parts_of_bounded_size(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loss = loss_of(family)
    targets = loss.match(masked(labels(9, 5), 3), 2, SIZE_HW)
    given = predicted(2, targets.noisy_boxes.shape[1], family)
    expected, gradient, _ = backward(loss, given, targets)
    monkeypatch.setattr(mask_loss, "CELLS", 3 * CELLS_HW[0] * CELLS_HW[1])
    most, made = 0, mask_losses

    def counted(coefficients: Tensor, *others: Tensor) -> Tensor:
        nonlocal most
        most = max(most, len(coefficients))
        return made(coefficients, *others)

    monkeypatch.setattr(mask_loss, "mask_losses", counted)
    sums, found, _ = backward(loss, given, targets)
    assert most == 3
    assert torch.allclose(sums, expected, rtol=1e-5)
    assert torch.allclose(found, gradient, rtol=1e-4, atol=1e-6)


def test_a_mask_that_is_not_finite_gives_a_gradient_that_is_not_finite(family: str) -> None:
    loss = loss_of(family)
    targets = loss.match(masked(labels(2, 1)), 2, SIZE_HW)
    given = predicted(2, targets.noisy_boxes.shape[1], family)
    with torch.no_grad():
        given.prototypes[0][0] = float("nan")
    sums, coefficients, _ = backward(loss, given, targets)
    assert sums.isnan().any() and coefficients.isnan().any()


def test_more_labels_than_queries_leave_labels_out(family: str) -> None:
    loss = loss_of(family, denoising=0)
    targets = loss.match(masked(labels(2 * QUERIES)), 1, SIZE_HW)
    sums, coefficients, _ = backward(loss, predicted(1, 0, family), targets)
    assert sums.isfinite().all()
    assert coefficients.any(3).all(), "every query of every layer has a label"


def test_half_precision_predictions_give_float32_sums(family: str) -> None:
    loss = loss_of(family)
    targets = loss.match(masked(labels(6, 0)), 2, SIZE_HW)
    given = predicted(2, targets.noisy_boxes.shape[1], family)
    half = given._replace(
        coefficients=given.coefficients.bfloat16(), prototypes=tuple(t.bfloat16() for t in given.prototypes)
    )
    sums = loss.sums(half, targets)
    assert sums.dtype == torch.float32
    assert torch.allclose(sums, loss.sums(given, targets), rtol=0.02)


def test_made_up_labels_for_a_trial_of_memory_have_masks(family: str) -> None:
    loss = loss_of(family)
    counts = [loss.labels_with_most_queries(7), 7]
    assert counts[0] == loss.boxes.labels_with_most_queries(7) > 0
    labels = MaskShapes.of_images([MASKS.made_up(n) for n in counts])
    targets = loss.match(labels, 2, SIZE_HW)
    assert targets.rasters.shape == (sum(counts), *CELLS_HW)
    assert (targets.rasters.reshape(sum(counts), -1).mean(1) == 255 / 4).all(), "a half of each side"
    sums, coefficients, _ = backward(loss, predicted(2, targets.noisy_boxes.shape[1], family), targets)
    assert sums.isfinite().all() and coefficients.any()
