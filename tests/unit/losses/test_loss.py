import math

import numpy as np
import pytest
import torch
from label_rows import of_images, shapes_of

from yolofleet.families.yolov5.hyperparameters import Yolov5Hyperparameters
from yolofleet.families.yolov5.loss import Yolov5Loss
from yolofleet.support.errors import ConfigError

ANCHORS_PX = torch.tensor([[[8.0, 8.0], [16.0, 16.0]], [[32.0, 32.0], [64.0, 64.0]]])
SIZE_HW = (64, 96)


def make_loss(nc=3, **recipe):
    return Yolov5Loss(
        anchors_px=ANCHORS_PX, strides=(8, 16), nc=nc, recipe=Yolov5Hyperparameters(**recipe), img=64
    )


def random_raws(images, nc, seed=0, grad=True):
    """Raw heads of both levels, as the permuted view of a channels-last output."""
    generator = torch.Generator().manual_seed(seed)
    raws = [
        torch.randn(images, SIZE_HW[0] // s, SIZE_HW[1] // s, 2, 5 + nc, generator=generator).permute(
            0, 3, 1, 2, 4
        )
        for s in (8, 16)
    ]
    return [raw.requires_grad_(grad) for raw in raws]


def label(image, class_idx, cx_px, cy_px, w_px, h_px):
    height, width = SIZE_HW
    return [image, class_idx, cx_px / width, cy_px / height, w_px / width, h_px / height]


def labels(*rows):
    return shapes_of(rows)


def test_a_label_owns_its_cell_and_the_nearest_neighbours():
    # centre (3.25, 2.75) cells of 8 px: left half and lower half, so also (2, 2) and (3, 3); 8 x 8 px fits
    # anchors of 8 and 16 px (ratio < 4), not those of 32 and 64 px on level 1
    targets = make_loss().match(labels(label(1, 2, 26, 22, 8, 8)), 2, SIZE_HW)
    assert targets.matches == (6, 0)
    width, first = 12, 8 * 12 * 2  # cells a row; cells of image 0
    expected = [first + (y * width + x) * 2 + a for x, y in ((3, 2), (2, 2), (3, 3)) for a in (0, 1)]
    assert targets.cells.tolist() == expected
    assert (
        targets.boxes_cxcywh[:, :2].tolist() == [[0.25, 0.75]] * 2 + [[1.25, 0.75]] * 2 + [[0.25, -0.25]] * 2
    )
    assert (targets.boxes_cxcywh[:, 2:] == 1).all() and (targets.classes == 2).all()
    cells_of_level = [2 * 8 * 12 * 2, 2 * 4 * 6 * 2]
    assert targets.counts.tolist() == [6, 0, *cells_of_level, 18, 0] and targets.counts.dtype == np.int64


def test_the_last_label_sets_the_objectness_of_a_shared_cell():
    shared = [label(0, 0, 20, 20, 8, 8), label(0, 1, 21, 21, 8, 8)]  # both in cell (2, 2)
    targets = make_loss().match(labels(*shared), 1, SIZE_HW)
    cell = (2 * 12 + 2) * 2
    owners = np.flatnonzero(targets.cells == cell)
    assert targets.classes[owners].tolist() == [0, 1]
    winner = targets.winners[targets.winner_cells.tolist().index(cell)]
    assert winner == owners[1]
    assert len(set(targets.winner_cells.tolist())) == len(targets.winner_cells)


def test_zero_logits_give_sums_worked_by_hand():
    # logits 0: the box is its cell's centre with the anchor's size, so a label of just that has IoU 1
    loss = make_loss(anchor_t=1.5)
    targets = loss.match(labels(label(0, 1, 28, 20, 8, 8)), 1, SIZE_HW)
    raws = [torch.zeros(1, 2, 64 // s, 96 // s, 8) for s in (8, 16)]
    # frac 0.5 is in the right and lower half by the rule (< 0.5 is left), and from_end's frac 0.5 is not below 0.5
    assert targets.matches == (1, 0)
    log2 = math.log(2)
    # an IoU of 1 costs nothing; each cell costs log 2 whatever its target; 3 classes cost log 2 each
    expected = [0, 0, 192 * log2, 48 * log2, 3 * log2, 0]
    torch.testing.assert_close(loss.sums(raws, targets), torch.tensor(expected), rtol=1e-6, atol=1e-6)


def test_two_micro_batches_add_to_the_loss_of_the_whole():
    loss, rows = (
        make_loss(),
        labels(label(0, 0, 30, 30, 10, 12), label(1, 2, 60, 20, 30, 40), label(2, 1, 9, 50, 7, 9)),
    )
    raws = random_raws(3, 3)
    whole = loss.match(rows, 3, SIZE_HW)
    sums = loss.sums(raws, whole)
    (sums * loss.gains).sum().backward()

    parts_sums, parts_counts, parts_raws = 0, 0, []
    for first, last in ((0, 1), (1, 3)):
        part = loss.match(of_images(rows, first, last), last - first, SIZE_HW)
        part_raws = [raw.detach()[first:last].requires_grad_() for raw in raws]
        part_sums = loss.sums(part_raws, part)
        (part_sums * loss.gains).sum().backward()
        parts_sums, parts_counts = parts_sums + part_sums, parts_counts + part.counts
        parts_raws.append(part_raws)
    np.testing.assert_array_equal(parts_counts, whole.counts)
    torch.testing.assert_close(parts_sums, sums, rtol=1e-6, atol=1e-6)
    for level, raw in enumerate(raws):
        torch.testing.assert_close(torch.cat([part[level].grad for part in parts_raws]), raw.grad)


def test_terms_without_matches_are_exactly_zero():
    loss, raws = make_loss(), random_raws(2, 3)
    sums = loss.sums(raws, loss.match(labels(), 2, SIZE_HW))
    assert sums[[0, 1, 4, 5]].tolist() == [0, 0, 0, 0]
    (sums[0] + sums[4]).backward()
    assert all(raw.grad.abs().max() == 0 for raw in raws)


def test_one_class_has_no_class_loss():
    loss, raws = make_loss(nc=1), random_raws(1, 1)
    sums = loss.sums(raws, loss.match(labels(label(0, 0, 30, 30, 10, 12)), 1, SIZE_HW))
    assert sums[4:].tolist() == [0, 0]
    sums.sum().backward()
    assert all((raw.grad[..., 5:] == 0).all() for raw in raws)


def test_gradient_of_a_cell_with_two_labels_is_the_sum_of_both():
    # the box and class terms of two labels on one cell are those of each alone
    loss = make_loss(anchor_t=1.5)
    first, second = label(0, 0, 28, 20, 8, 8), label(0, 1, 28, 20, 9, 8)
    gradients = []
    for rows in ((first, second), (first,), (second,)):
        raws = random_raws(1, 3)
        loss.sums(raws, loss.match(labels(*rows), 1, SIZE_HW))[[0, 1, 4, 5]].sum().backward()
        gradients.append(torch.cat([raw.grad.flatten() for raw in raws]))
    torch.testing.assert_close(gradients[0], gradients[1] + gradients[2])


def test_gradient_has_equal_bits_for_any_number_of_threads():
    rng = np.random.default_rng(0)
    classes, centres = rng.integers(0, 80, 400), rng.uniform(0.4, 0.6, (400, 2))
    # thousands of matches on a few cells
    rows = shapes_of(np.column_stack([classes, centres, np.full((400, 2), 0.2)]))
    loss, before = make_loss(nc=80), torch.get_num_threads()
    gradients = []
    try:
        for threads in (1, 4, 4):
            torch.set_num_threads(threads)
            raws = random_raws(1, 80)
            loss.sums(raws, loss.match(rows, 1, SIZE_HW)).sum().backward()
            gradients.append(torch.cat([raw.grad.flatten() for raw in raws]))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(gradients[0], gradients[1]) and torch.equal(gradients[1], gradients[2])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_gradient_on_cuda_is_the_cpus_and_repeats_to_the_bit():
    rng = np.random.default_rng(0)
    rows = shapes_of(
        np.column_stack([np.zeros(400), rng.uniform(0.4, 0.6, (400, 2)), np.full((400, 2), 0.2)])
    )
    loss, gradients = make_loss(nc=80), []
    targets = loss.match(rows, 1, SIZE_HW)
    for device in ("cpu", "cuda", "cuda"):
        raws = [raw.detach().to(device).requires_grad_() for raw in random_raws(1, 80)]
        loss.sums(raws, targets).sum().backward()
        gradients.append(torch.cat([raw.grad.flatten().cpu() for raw in raws]))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-4)
    assert torch.equal(gradients[1], gradients[2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_half_precision_heads_are_float32(dtype):
    loss = make_loss()
    raws = [raw.detach().to(dtype).requires_grad_() for raw in random_raws(1, 3)]
    targets = loss.match(labels(label(0, 0, 30, 30, 10, 12)), 1, SIZE_HW)
    sums = loss.sums(raws, targets)
    sums.sum().backward()
    torch.testing.assert_close(sums, loss.sums([raw.detach().float() for raw in raws], targets))
    assert sums.dtype == torch.float32 and raws[0].grad.dtype == dtype


def test_labels_without_size_or_on_the_border_are_no_trouble():
    rows = labels(label(0, 0, 30, 30, 0, 12), label(0, 0, 96, 64, 8, 8), label(0, 0, 0, 0, 8, 8))
    targets = make_loss().match(rows, 1, SIZE_HW)
    assert targets.cells.min() >= 0 and targets.winner_cells.max() < targets.counts[2:4].sum()
    raws = random_raws(1, 3)
    assert torch.isfinite(make_loss().sums(raws, targets)).all()


def test_gradient_reaches_the_head_in_the_heads_own_layout():
    loss, raws = make_loss(), random_raws(2, 3)
    loss.sums(raws, loss.match(labels(label(1, 0, 30, 30, 10, 12)), 2, SIZE_HW)).sum().backward()
    assert [raw.grad.stride() for raw in raws] == [raw.stride() for raw in raws]


def test_more_levels_than_have_a_balance_are_refused():
    with pytest.raises(ConfigError, match="6 detection levels"):
        Yolov5Loss(
            anchors_px=torch.ones(6, 3, 2), strides=[8] * 6, nc=1, recipe=Yolov5Hyperparameters(), img=64
        )
