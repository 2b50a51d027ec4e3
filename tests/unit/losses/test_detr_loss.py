"""The losses of RT-DETR and D-FINE: sums of parts, background, matches of all layers, numbers that are not finite."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from detr_raws import BINS, CLASSES, QUERIES, REG_SCALE, bins, labels, of_images, raws
from label_rows import of_images as labels_of_images
from torch import Tensor

from yolofleet.families.dfine.hyperparameters import DfineHyperparameters
from yolofleet.families.dfine.loss import DfineLoss, distillation_shares, union
from yolofleet.families.rtdetr.loss import RtdetrLoss
from yolofleet.families.rtdetr.matching import Pairs
from yolofleet.families.rtdetr.raws import DetrRaws, RtdetrTrainingRaws, TrainingRaws

SIZE_HW = (64, 64)


def loss_of(family: str, **values: object) -> RtdetrLoss:
    recipe = DfineHyperparameters.model_validate(values)
    return DfineLoss(recipe, CLASSES, bins(), REG_SCALE) if family == "dfine" else RtdetrLoss(recipe, CLASSES)


def backward(loss: RtdetrLoss, predicted: TrainingRaws, targets) -> tuple[Tensor, Any]:
    sums = loss.sums(predicted, targets)
    gradients = torch.autograd.grad((sums * loss.gains).sum(), predicted, allow_unused=True)
    return sums.detach(), type(predicted)(*(torch.zeros(0) if g is None else g for g in gradients))


@pytest.fixture(params=["rtdetr", "dfine"])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("class_loss", ["vfl", "mal"])
def test_parts_of_a_micro_batch_add_up_to_the_whole(family: str, class_loss: str) -> None:
    """Each image is treated by itself: no pass, fleet or neighbour changes its loss or its gradient."""
    loss, counts = loss_of(family, class_loss=class_loss), [3, 0, 11, 25]
    truth, keys = labels(*counts), [(0, 2, i) for i in range(4)]
    whole = loss.match(truth, 4, SIZE_HW, keys)
    predicted = raws(4, whole.noisy_boxes.shape[1], dfine=family == "dfine")
    expected, gradient = backward(loss, predicted, whole)
    sums, total = torch.zeros_like(expected), np.zeros_like(whole.counts)
    for first, last in ((0, 1), (1, 2), (2, 4)):
        mine = labels_of_images(truth, first, last)
        targets = loss.match(mine, last - first, SIZE_HW, keys[first:last])
        noisy = targets.noisy_boxes.shape[1]
        part, part_gradient = backward(loss, of_images(predicted, first, last, noisy), targets)
        sums, total = sums + part, total + targets.counts
        for name, theirs, whole_part in zip(gradient._fields, part_gradient, gradient, strict=True):
            if len(theirs):
                wanted = whole_part[first:last]
                wanted = wanted[:, :, :noisy] if name.startswith("noisy") else wanted
                assert torch.allclose(theirs, wanted, rtol=1e-5, atol=1e-7)
    assert torch.allclose(sums, expected, rtol=1e-5)
    assert total.tolist() == whole.counts.tolist()


def test_background_alone_is_the_class_loss_of_background(family: str) -> None:
    loss = loss_of(family)
    targets = loss.match(labels(0, 0), 2, SIZE_HW)
    predicted = raws(2, 0, dfine=family == "dfine")
    sums, gradient = backward(loss, predicted, targets)
    found = dict(zip(loss.terms, sums.tolist(), strict=True))

    def background(logits: Tensor) -> float:
        return (0.75 * logits.sigmoid() ** 2 * F.softplus(logits)).sum().item()

    assert found["cls"] == pytest.approx(background(predicted.logits), rel=1e-5)
    others = (
        background(predicted.all_logits) - background(predicted.logits) + background(predicted.cell_logits)
    )
    assert found["aux"] == pytest.approx(others, rel=1e-5)
    assert found["box"] == found["giou"] == found["denoise"] == found.get("fgl", 0.0) == 0
    assert all(torch.isfinite(part).all() for part in gradient)
    assert not gradient.all_boxes.any() and not gradient.cell_boxes.any(), "boxes have no gradient"
    assert targets.counts.tolist() == [2 if term == "ddf" else 0 for term in loss.terms]


def test_a_micro_batch_without_images_is_exactly_0(family: str) -> None:
    loss = loss_of(family)
    sums, _ = backward(loss, raws(0, 0, dfine=family == "dfine"), loss.match(labels(), 0, SIZE_HW))
    assert sums.tolist() == [0.0] * len(loss.terms)


def test_a_validation_has_the_terms_of_the_last_layer(family: str) -> None:
    loss = loss_of(family)
    targets = loss.match(labels(4, 0), 2, SIZE_HW)
    predicted = raws(2, 200, dfine=family == "dfine")
    sums = dict(zip(loss.terms, loss.sums(DetrRaws(*predicted[:3]), targets).tolist(), strict=True))
    whole = dict(zip(loss.terms, loss.sums(predicted, targets).tolist(), strict=True))
    assert sums["cls"] == pytest.approx(whole["cls"])
    assert sums["box"] > 0 and sums["giou"] > 0
    assert sums["aux"] == sums["denoise"] == 0


@pytest.mark.parametrize("name", RtdetrTrainingRaws._fields[3:])
def test_a_prediction_that_is_not_finite_gives_a_gradient_that_is_not_finite(family: str, name: str) -> None:
    """Then the step changes nothing and the run names it, whatever layer it is."""
    loss = loss_of(family)
    targets = loss.match(labels(2, 1), 2, SIZE_HW)
    predicted = raws(2, targets.noisy_boxes.shape[1], dfine=family == "dfine")
    with torch.no_grad():
        getattr(predicted, name)[0] = float("nan")
    sums, gradient = backward(loss, predicted, targets)
    assert sums.isnan().any()
    assert getattr(gradient, name).isnan().any()
    if not name.startswith("noisy"):  # an output that is matched
        assert sums.isnan().all()
        assert gradient.all_logits.isnan().all()


def test_more_labels_than_queries_leave_labels_out(family: str) -> None:
    loss = loss_of(family)
    targets = loss.match(labels(2 * QUERIES), 1, SIZE_HW)
    predicted = raws(1, targets.noisy_boxes.shape[1], dfine=family == "dfine")
    sums, gradient = backward(loss, predicted, targets)
    assert sums.isfinite().all()
    assert (gradient.cell_boxes != 0).any(2).sum() == QUERIES, "each query of the encoder has a label"


def test_half_precision_predictions_give_float32_sums(family: str) -> None:
    loss = loss_of(family)
    targets = loss.match(labels(6, 0), 2, SIZE_HW)
    predicted = raws(2, targets.noisy_boxes.shape[1], dfine=family == "dfine")
    sums = loss.sums(type(predicted)(*(part.bfloat16() for part in predicted)), targets)
    assert sums.dtype == torch.float32
    assert torch.allclose(sums, loss.sums(predicted, targets), rtol=0.05)


def test_the_union_takes_the_most_frequent_label_of_a_query_and_the_first_of_equals() -> None:
    # image 0: query 4 has label 1 twice and label 0 once; query 2 has labels 2 and 0 once each; query 7 label 0
    votes = np.array([[0, 4, 1], [0, 2, 2], [0, 4, 0], [1, 3, 0], [0, 4, 1], [0, 2, 0], [0, 7, 0]])
    pairs = Pairs(np.arange(7), votes[:, 0], votes[:, 1], votes[:, 2], np.ones(7, np.float32))
    targets = loss_of("dfine").match(labels(3, 1), 2, SIZE_HW)
    image, query, label, weight = union(pairs, targets)
    assert image.tolist() == [0, 0, 0, 1]
    assert query.tolist() == [2, 4, 7, 3]
    assert label.tolist() == [0, 1, 0, 0]
    assert weight.tolist() == [1, 1, 1, 1]  # three labels, three matches


def test_shares_of_distillation_follow_the_square_roots_of_counts() -> None:
    targets = loss_of("dfine", denoising=4).match(labels(4, 0), 2, SIZE_HW)
    joined = (np.zeros(4, int), 8 + np.arange(4))  # after the denoising queries
    noisy, normal = np.split(distillation_shares(joined, targets, QUERIES), [8], 1)
    # 4 matches and 16 others: 2 / (2 + 4) over 16 sides, 4 / (2 + 4) over 64 sides
    assert normal[0].tolist() == pytest.approx([1 / 48] * 4 + [1 / 96] * 16)
    assert normal[1].tolist() == pytest.approx([1 / (4 * QUERIES)] * QUERIES)
    assert noisy[0].tolist() == pytest.approx([1 / 48] * 4 + [1 / 24] * 4)
    assert not noisy[1].any()


def test_bins_share_a_distance_and_end_at_the_outermost() -> None:
    loss = loss_of("dfine")
    assert isinstance(loss, DfineLoss)
    table = loss.bins
    # reference of side 0.4 around 0.5; reg_scale 4: distances are in tenths, minus 2
    label = torch.tensor([[0.5, 0.5, 0.4, 0.0], [0.5, 0.5, 2.0, 0.45]])
    weights = loss.wanted_bins(torch.tensor([[0.5, 0.5, 0.4, 0.4]] * 2), label)
    assert weights.shape == (2, 4, BINS)
    assert torch.allclose(weights.sum(-1), torch.ones(2, 4))
    # left: 0.2 / 0.1 - 2 = 0; top: 0 / 0.1 - 2 = -2
    assert float((weights[0, 0] * table).sum()) == pytest.approx(0, abs=1e-5)
    assert float((weights[0, 1] * table).sum()) == pytest.approx(-2, abs=1e-5)
    # 1.0 / 0.1 - 2 = 8 is beyond 4
    assert weights[1, 0, -1] == 1
    assert float((weights[1, 1] * table).sum()) == pytest.approx(0.25, abs=1e-5)


def test_gains_weigh_terms_and_parts(family: str) -> None:
    """Without gains of boxes, auxiliary and denoising terms are class losses alone."""
    off = dict.fromkeys(("l1_gain", "giou_gain", "fgl_gain", "ddf_gain"), 0)
    loss, plain = loss_of(family, **off), loss_of(family)
    targets = plain.match(labels(2), 1, SIZE_HW)
    predicted = raws(1, targets.noisy_boxes.shape[1], dfine=family == "dfine")
    sums = dict(zip(loss.terms, loss.sums(predicted, targets).tolist(), strict=True))
    whole = dict(zip(plain.terms, plain.sums(predicted, targets).tolist(), strict=True))
    assert sums["cls"] == whole["cls"]
    assert 0 < sums["aux"] < whole["aux"]
    assert 0 < sums["denoise"] < whole["denoise"]
    quiet = loss_of(family, denoising=0)
    none = quiet.sums(raws(1, 0, dfine=family == "dfine"), quiet.match(labels(2), 1, SIZE_HW))
    assert none[-1] == 0


def test_a_label_weighs_as_much_in_denoising_whatever_the_number_of_groups(family: str) -> None:
    loss = loss_of(family, ddf_gain=0)
    targets = loss.match(labels(10), 1, SIZE_HW)
    predicted = raws(1, targets.noisy_boxes.shape[1], dfine=family == "dfine")
    groups = [replace(targets, noise_group=np.where(targets.noise_group == g, 0, -1)) for g in range(10)]
    groups = [
        replace(
            part,
            noise_label=np.where(part.noise_group == 0, part.noise_label, -1),
            noise_weight=np.ones(1, np.float32),
        )
        for part in groups
    ]
    by_group = torch.stack([loss.sums(predicted, part)[-1] for part in groups])
    assert loss.sums(predicted, targets)[-1].item() == pytest.approx(by_group.mean().item(), rel=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("class_loss", ["vfl", "mal"])
def test_a_gpu_gives_equal_bits_twice_and_the_values_of_the_cpu(family: str, class_loss: str) -> None:
    loss = loss_of(family, class_loss=class_loss)
    targets = loss.match(labels(6, 0, 9), 3, SIZE_HW)
    predicted = raws(3, targets.noisy_boxes.shape[1], dfine=family == "dfine")
    expected, wanted = backward(loss, predicted, targets)
    loss.gains = loss.gains.cuda()
    on_gpu = type(predicted)(*(part.detach().cuda().requires_grad_() for part in predicted))
    (sums, gradient), (again, same) = (backward(loss, on_gpu, targets) for _ in range(2))
    assert torch.equal(sums, again)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(gradient, same, strict=True))
    assert torch.allclose(sums.cpu(), expected, rtol=1e-4, atol=1e-6)
    for mine, theirs in zip(gradient, wanted, strict=True):
        assert torch.allclose(mine.cpu(), theirs, rtol=1e-3, atol=1e-5)
