import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from label_rows import of_images, shapes_of

from yolofleet.families.losses.assign import Grid, pairs_inside
from yolofleet.families.ppyoloe.loss import PpyoloeLoss, distribution_focal

STRIDES = (32, 16, 8)
SIZE_HW = (96, 128)
BINS = 17
PHASES = {"atss": 0.0, "tal": 1.0}


@pytest.fixture(params=PHASES)
def loss(request):
    return PpyoloeLoss(strides=STRIDES).at(PHASES[request.param])


@pytest.fixture
def aligned():
    return PpyoloeLoss(strides=STRIDES).at(1.0)


def random_raws(images, nc, seed=0, size_hw=SIZE_HW, spread=2.0):
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(images, size_hw[0] // s, size_hw[1] // s, c, generator=generator) * spread
        ).requires_grad_()
        for s in STRIDES
        for c in (nc, 4 * BINS)
    ]


def random_labels(images, each, nc, seed=0, sizes=(0.02, 0.9), border=0.0):
    """Labels of all sizes; with a border, centres lie up to so far outside."""
    rng = np.random.default_rng(seed)
    n = images * each
    image = np.repeat(np.arange(images), each)
    smallest, largest = np.log(sizes)
    wh = np.exp(rng.uniform(smallest, largest, (n, 2)))
    centres = rng.uniform(-border, 1 + border, (n, 2))
    return shapes_of(np.column_stack((image, rng.integers(0, nc, n), centres, wh)))


def label(image, class_idx, x1, y1, x2, y2, size_hw=SIZE_HW):
    height, width = size_hw
    return [
        image,
        class_idx,
        (x1 + x2) / 2 / width,
        (y1 + y2) / 2 / height,
        (x2 - x1) / width,
        (y2 - y1) / height,
    ]


def labels(*rows):
    return shapes_of(rows)


def gradients(raws):
    return torch.cat([raw.grad.flatten() for raw in raws])


def backward(loss, raws, targets):
    """(sums, gradient of the gained sums)."""
    for raw in raws:
        raw.grad = None
    sums = loss.sums(raws, targets)
    (loss.gains.to(sums.device) * sums[:3]).sum().backward()
    return sums.detach(), gradients(raws)


# the rules in their plain form, over all labels and all cells of one image


def plain_cells(size_hw):
    """([K, 2] centres, [K] strides) of one image."""
    centres, strides = [], []
    for s in STRIDES:
        y, x = np.mgrid[: size_hw[0] // s, : size_hw[1] // s]
        centres.append(((np.stack((x, y), -1).reshape(-1, 2) + 0.5) * s).astype(np.float32))
        strides.append(np.full(len(centres[-1]), s))
    return np.concatenate(centres), np.concatenate(strides)


def plain_iou(a, b):
    """[A, B]"""
    low, high = np.maximum(a[:, None, :2], b[None, :, :2]), np.minimum(a[:, None, 2:], b[None, :, 2:])
    shared = (high - low).clip(min=0).prod(-1)
    areas = [(boxes[:, 2:] - boxes[:, :2]).clip(min=0).prod(-1) for boxes in (a, b)]
    return shared / (areas[0][:, None] + areas[1] - shared + np.float32(1e-9))


def plain_inside(boxes, centres):
    return ((centres > boxes[:, None, :2]) & (centres < boxes[:, None, 2:])).all(-1)


def plain_owner(wanted, ious):
    """[K] label of each cell, -1 for none, of what each label wants [G, K]."""
    times = wanted.sum(0)
    return np.where(times == 0, -1, np.where(times == 1, wanted.argmax(0), ious.argmax(0)))


def plain_atss(boxes, size_hw):
    centres, strides = plain_cells(size_hw)
    half = (2.5 * strides[:, None]).astype(np.float32)
    anchors = np.concatenate((centres - half, centres + half), 1)
    ious = plain_iou(boxes, anchors)
    wanted = np.zeros(ious.shape, bool)
    for g, box in enumerate(boxes):
        distance = np.sqrt((((box[:2] + box[2:]) / 2 - centres) ** 2).sum(1))
        by_level = []
        for s in STRIDES:
            level = np.flatnonzero(strides == s)
            by_level.append(level[np.argsort(distance[level], kind="stable")[:9]])
        nearest = np.concatenate(by_level)
        candidates = ious[g, nearest]
        wanted[g, nearest] = candidates > candidates.mean() + candidates.std(ddof=1)
    return plain_owner(wanted & plain_inside(boxes, centres), ious)


def plain_task_aligned(boxes, classes, predicted, probabilities, size_hw):
    """([K] label, [K] score)"""
    centres, _ = plain_cells(size_hw)
    ious = plain_iou(boxes, predicted)
    merits = probabilities[:, classes].T * ious**6
    is_inside = plain_inside(boxes, centres)
    best = np.argsort(-np.where(is_inside, merits, -1), axis=1, kind="stable")[:, :13]
    wanted = np.zeros(ious.shape, bool)
    np.put_along_axis(wanted, best, True, 1)
    owner = plain_owner(wanted & is_inside, ious)
    own = owner == np.arange(len(boxes))[:, None]  # [G, K]
    scale = (ious * own).max(1) / ((merits * own).max(1) + 1e-9)
    return owner, (merits * own * scale[:, None]).max(0)


def decoded(raws, size_hw):
    """([N, K, 4] px, [N, K, C] probabilities)"""
    centres, strides = (torch.from_numpy(part) for part in plain_cells(size_hw))
    distances = torch.cat([raw.detach().flatten(1, 2) for raw in raws[1::2]], 1)
    means = (distances.unflatten(2, (4, BINS)).softmax(-1) * torch.arange(BINS)).sum(-1)
    reach = means * strides[:, None].float()
    boxes = torch.cat((centres - reach[..., :2], centres + reach[..., 2:]), -1)
    return boxes.numpy(), torch.cat([raw.detach().flatten(1, 2) for raw in raws[0::2]], 1).sigmoid().numpy()


def by_image(cells, values, images, size_hw, fill):
    """[N, K] values of cells as the loss numbers them (level, image, place)."""
    sizes = [images * (size_hw[0] // s) * (size_hw[1] // s) for s in STRIDES]
    flat = np.full(sum(sizes), fill)
    flat[cells] = values
    return np.concatenate([part.reshape(images, -1) for part in np.split(flat, np.cumsum(sizes)[:-1])], 1)


SITUATIONS = {
    "few": {"each": 3, "sizes": (0.1, 0.6)},
    "crowded": {"each": 60, "sizes": (0.1, 0.7)},
    "smaller than a cell": {"each": 20, "sizes": (0.005, 0.08)},
    "half outside": {"each": 20, "sizes": (0.1, 2.0), "border": 0.5},
}


@pytest.mark.parametrize("size_hw", [(96, 128), (32, 32), (32, 352)])
@pytest.mark.parametrize("situation", SITUATIONS)
def test_atss_is_its_plain_form(situation, size_hw):
    rows = random_labels(3, nc=5, **SITUATIONS[situation])
    rows.boxes[:, :2] = (rows.boxes[:, :2] * 16).round() / 16  # many centres with equally near cells
    targets = PpyoloeLoss(strides=STRIDES).match(rows, 3, size_hw)
    boxes = targets.boxes_xyxy_px
    owners = by_image(targets.atss_cells, targets.atss_labels % boxes.shape[1], 3, size_hw, -1)
    np.testing.assert_array_equal(owners, [plain_atss(of_image, size_hw) for of_image in boxes])


@pytest.mark.parametrize("head", ["trained", "fresh"])
@pytest.mark.parametrize("situation", SITUATIONS)
def test_task_alignment_is_its_plain_form(situation, head, aligned):
    rows = random_labels(3, nc=5, **SITUATIONS[situation])
    raws = random_raws(3, 5, spread=0.0 if head == "fresh" else 3.0)  # fresh: many cells are equally good
    targets = aligned.match(rows, 3, SIZE_HW)
    boxes, classes = targets.boxes_xyxy_px, targets.classes.reshape(3, -1)
    predicted, probabilities = decoded(raws, SIZE_HW)
    owners, scores = zip(
        *(
            plain_task_aligned(boxes[i], classes[i], predicted[i], probabilities[i], SIZE_HW)
            for i in range(3)
        ),
        strict=True,
    )
    matches = aligned.assign(raws, targets)
    cells, found = matches.cells.numpy(), matches.labels.numpy() % boxes.shape[1]
    np.testing.assert_array_equal(by_image(cells, found, 3, SIZE_HW, -1), owners)
    np.testing.assert_allclose(by_image(cells, matches.scores, 3, SIZE_HW, 0.0), scores, rtol=1e-5, atol=1e-7)


def test_cells_on_the_edge_of_a_label_are_not_inside():
    # stride 32: centres 16, 48, ...; a box from 16 to 80 holds the centre 48 alone
    pairs = pairs_inside(np.array([[[16, 16, 80, 80]]], np.float32), Grid(1, SIZE_HW, (32,)))
    assert pairs.cells.tolist() == [1 * 4 + 1] and pairs.best.tolist() == [0]


def test_two_cells_and_one_label_give_sums_worked_by_hand():
    # two cells of 32 px; distances are 0 or 1 stride, evenly: half a stride in the mean, so the first cell's box is
    # the label; all class logits are 0
    loss = PpyoloeLoss(strides=(32,)).at(1.0)
    targets = loss.match(labels(label(0, 2, 0, 0, 32, 32, (32, 64))), 1, (32, 64))
    distances = torch.full((1, 1, 2, 4, BINS), -1000.0)
    distances[..., :2] = 0
    sums = loss.sums([torch.zeros(1, 1, 2, 3), distances.flatten(3)], targets)
    # IoU 1, so the score is merit / merit * 1; the matched class costs 1 x log 2, five others 0.75 x 0.5^2 x log 2;
    # the distance 0.5 lies evenly between bins of probability 1/2 each
    log2 = math.log(2)
    torch.testing.assert_close(sums, torch.tensor([log2 * (1 + 5 * 0.75 * 0.25), 0, log2, 1]))


def test_distances_to_learn_stay_between_the_first_and_the_last_bin():
    # logits 0, 1 .. 16: bin b costs log(sum of e^k) - b, a distance between two bins likewise. The left side is
    # half a stride on the wrong side: 0; the others are too far: 15.99
    ramp = torch.arange(float(BINS)).repeat(4)[None]
    cost = distribution_focal(ramp, torch.tensor([[0.5, 0.5]]), torch.tensor([[1.0, -100, 100, 100]]))
    expected = math.log(sum(math.exp(k) for k in range(BINS))) - 3 * 15.99 / 4
    torch.testing.assert_close(cost, torch.tensor([expected]))


def test_images_without_labels_cost_what_the_negatives_cost(loss):
    raws = random_raws(2, 3)
    sums, gradient = backward(loss, raws, loss.match(labels(), 2, SIZE_HW))
    logits = torch.cat([raw.flatten() for raw in raws[0::2]])
    expected = (0.75 * logits.sigmoid() ** 2 * F.softplus(logits)).sum()
    torch.testing.assert_close(sums[0], expected.detach())
    assert sums[1:].tolist() == [0, 0, 0]
    assert all((raw.grad == 0).all() for raw in raws[1::2]) and gradient.isfinite().all()


def test_class_gradient_is_that_of_the_formula(loss):
    raws, rows = random_raws(2, 3), random_labels(2, 5, 3)
    targets = loss.match(rows, 2, SIZE_HW)
    backward(loss, raws, targets)
    matches = loss.assign(raws, targets)
    logits = torch.cat([raw.detach().flatten(0, 2) for raw in raws[0::2]]).requires_grad_()
    wanted = torch.zeros_like(logits)
    classes = torch.from_numpy(targets.classes)[matches.labels]
    wanted[matches.cells, classes] = matches.scores
    is_matched = torch.zeros_like(logits)
    is_matched[matches.cells, classes] = 1
    weight = 0.75 * logits.sigmoid() ** 2 * (1 - is_matched) + wanted * is_matched
    (F.binary_cross_entropy_with_logits(logits, wanted, reduction="none") * weight).sum().backward()
    found = torch.cat([raw.grad.flatten(0, 2) for raw in raws[0::2]])
    torch.testing.assert_close(found, logits.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("situation", SITUATIONS)
def test_micro_batches_add_to_the_whole(situation, loss):
    images, nc = 5, 4
    rows, raws = random_labels(images, nc=nc, **SITUATIONS[situation]), random_raws(images, nc)
    rows = rows.rows(rows.image != 2)  # an image without labels
    whole = loss.match(rows, images, SIZE_HW)
    sums, _ = backward(loss, raws, whole)

    parts_sums, parts_counts, parts = 0, 0, []
    for first, last in ((0, 1), (1, 4), (4, 5)):
        part_raws = [raw.detach()[first:last].clone().requires_grad_() for raw in raws]
        part = loss.match(of_images(rows, first, last), last - first, SIZE_HW)
        part_sums, _ = backward(loss, part_raws, part)
        parts_sums, parts_counts = parts_sums + part_sums, parts_counts + part.counts
        parts.append(part_raws)
    np.testing.assert_array_equal(parts_counts, whole.counts)
    assert whole.counts.dtype == np.int64 and (whole.counts == len(rows)).all()
    torch.testing.assert_close(parts_sums, sums, rtol=2e-6, atol=1e-5)
    for i, raw in enumerate(raws):
        # not to the bit: the last few values of an array take another path through the processor
        torch.testing.assert_close(
            torch.cat([part[i].grad for part in parts]), raw.grad, rtol=2e-6, atol=1e-7
        )


@pytest.mark.parametrize("nc", [1, 80])
@pytest.mark.parametrize(
    "rows",
    [
        labels(label(0, 0, 50, 50, 51, 51)),  # smaller than a cell
        labels(label(1, 0, 30, 30, 30, 60), label(1, 0, 30, 30, 30, 30)),  # without area
        labels(label(0, 0, 200, 200, 260, 260), label(0, 0, -90, -90, -10, -10)),  # outside
        labels(label(0, 0, -500, -500, 900, 900)),  # larger than anything
        labels(*[label(0, 0, 20, 20, 90, 80)] * 40),  # forty times the same
    ],
    ids=["tiny", "empty", "outside", "huge", "repeated"],
)
def test_odd_labels_give_finite_sums_and_gradients(rows, nc, loss):
    raws = random_raws(2, nc)
    targets = loss.match(rows, 2, SIZE_HW)
    sums, gradient = backward(loss, raws, targets)
    assert sums.isfinite().all() and (sums >= 0).all() and gradient.isfinite().all()
    if len(loss.assign(raws, targets).cells) == 0:
        assert sums[1:].tolist() == [0, 0, 0] and all((raw.grad == 0).all() for raw in raws[1::2])


@pytest.mark.parametrize("size", [1e4, -1e4])
def test_extreme_logits_give_finite_sums_and_gradients(size, loss):
    raws = [(raw.detach() * 0 + size).requires_grad_() for raw in random_raws(1, 2)]
    sums, gradient = backward(loss, raws, loss.match(labels(label(0, 1, 20, 20, 90, 80)), 1, SIZE_HW))
    assert sums.isfinite().all() and gradient.isfinite().all()


def test_order_of_rows_does_not_matter_between_images(loss):
    rows, raws = random_labels(3, 6, 4), random_raws(3, 4)
    mixed = rows.rows(np.arange(18).reshape(3, 6).T.ravel())  # each image's rows in their order
    sums, gradient = backward(loss, raws, loss.match(rows, 3, SIZE_HW))
    mixed_sums, mixed_gradient = backward(loss, raws, loss.match(mixed, 3, SIZE_HW))
    assert torch.equal(sums, mixed_sums) and torch.equal(gradient, mixed_gradient)


def test_assigner_changes_at_its_fraction_of_the_run():
    loss = PpyoloeLoss(strides=STRIDES)
    assert not loss.at(99 / 300).is_aligned and loss.at(100 / 300).is_aligned
    assert not loss.at(0.9).at(0.0).is_aligned and not loss.is_aligned
    assert PpyoloeLoss(strides=STRIDES, assigner_switch=0).is_aligned


def test_gains_are_in_the_order_of_the_terms():
    loss = PpyoloeLoss(strides=STRIDES, cls_gain=1, iou_gain=2, dfl_gain=3)
    assert loss.terms == ("cls", "iou", "dfl") and loss.gains.tolist() == [1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_half_precision_heads_are_float32(dtype, loss):
    raws = [raw.detach().to(dtype).requires_grad_() for raw in random_raws(1, 3)]
    targets = loss.match(random_labels(1, 5, 3), 1, SIZE_HW)
    sums, _ = backward(loss, raws, targets)
    torch.testing.assert_close(sums, loss.sums([raw.detach().float() for raw in raws], targets))
    assert sums.dtype == torch.float32 and all(raw.grad.dtype == dtype for raw in raws)


def test_gradient_reaches_the_head_in_the_heads_own_layout(loss):
    heads = [
        torch.randn(2, c, SIZE_HW[0] // s, SIZE_HW[1] // s).contiguous(memory_format=torch.channels_last)
        for s in STRIDES
        for c in (3, 4 * BINS)
    ]
    heads = [head.requires_grad_() for head in heads]
    targets = loss.match(random_labels(2, 5, 3), 2, SIZE_HW)
    loss.sums([head.permute(0, 2, 3, 1) for head in heads], targets).sum().backward()
    for head in heads:
        assert head.grad is not None and head.grad.stride() == head.stride()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_gradient_on_cuda_is_the_cpus_and_repeats_to_the_bit(loss):
    targets = loss.match(random_labels(4, 30, 80), 4, SIZE_HW)
    found = []
    for device in ("cpu", "cuda", "cuda"):
        raws = [raw.detach().to(device).requires_grad_() for raw in random_raws(4, 80)]
        sums, gradient = backward(loss, raws, targets)
        found.append((sums.cpu(), gradient.cpu()))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)
    assert torch.equal(found[1][0], found[2][0]) and torch.equal(found[1][1], found[2][1])
