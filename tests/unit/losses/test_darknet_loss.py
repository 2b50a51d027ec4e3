"""Boxes coded as Darknet does: by hand, in the loss, and learnt by a network."""

import math

import pytest
import torch
from label_rows import shapes_of

from yolofleet.data.geometry.boxes import MAX_LOG_SIZE, Exponential, SquaredSigmoid
from yolofleet.families.build import build_model, family_loss
from yolofleet.families.darknet.cfg import parse_cfg
from yolofleet.families.yolov5.hyperparameters import Yolov5Hyperparameters
from yolofleet.families.yolov5.loss import Yolov5Loss

ANCHORS_PX = torch.tensor([[[8.0, 8.0], [16.0, 16.0]], [[32.0, 32.0], [64.0, 64.0]]])
HEIGHT, WIDTH = 64, 96
CFG = """\
[net]
width=96
height=64
""" + "".join(
    f"[convolutional]\nbatch_normalize=1\nfilters={filters}\nsize=3\nstride=2\npad=1\nactivation=leaky\n"
    for filters in (8, 16, 32)
)
LEVEL = "[convolutional]\nfilters=14\nactivation=linear\n[yolo]\nmask={mask}\nanchors=8,8,16,16,32,32,64,64\nclasses=2\nnum=4\n"
CFG += LEVEL.format(mask="0,1")
CFG += "[route]\nlayers=-3\n[maxpool]\nsize=2\nstride=2\n" + LEVEL.format(mask="2,3") + "scale_x_y=1.2\n"


def make_loss(*codings, **recipe):
    codings = codings or (Exponential(), Exponential())
    return Yolov5Loss(
        anchors_px=ANCHORS_PX,
        strides=(8, 16),
        nc=3,
        recipe=Yolov5Hyperparameters(**recipe),
        img=64,
        codings=codings,
    )


def labels(*rows):
    """Of (class, cx, cy, w, h) in pixels, all of image 0."""
    return shapes_of([[c, x / WIDTH, y / HEIGHT, w / WIDTH, h / HEIGHT] for c, x, y, w, h in rows])


def random_raws(seed=0):
    pick = torch.Generator().manual_seed(seed)
    shapes = [(1, HEIGHT // s, WIDTH // s, 2, 8) for s in (8, 16)]
    return [torch.randn(*s, generator=pick).permute(0, 3, 1, 2, 4).requires_grad_() for s in shapes]


def test_boxes_by_hand():
    raw = torch.tensor([[0.0, math.log(3), 0.0, math.log(2)], [100.0, -100.0, 1000.0, -1000.0]])
    anchors = torch.tensor([[2.0, 3.0], [1.0, 1.0]])
    # sigmoid(log 3) = 3/4; sizes are limited to e^10 anchors
    limit = math.exp(MAX_LOG_SIZE)
    expected = torch.tensor([[0.5, 0.75, 2, 6], [1, 0, limit, 1 / limit]])
    torch.testing.assert_close(Exponential().boxes(raw, anchors), expected)
    expected[:, :2] = torch.tensor([[0.5, 0.75 * 1.2 - 0.1], [1.1, -0.1]])
    torch.testing.assert_close(Exponential(1.2).boxes(raw, anchors), expected)
    # sigmoid(log 2) = 2/3
    expected = torch.tensor([[0.5, 1, 2, 3 * (4 / 3) ** 2], [1.5, -0.5, 4, 0]])
    torch.testing.assert_close(SquaredSigmoid().boxes(raw, anchors), expected)


def test_a_label_owns_its_own_cell_only():
    # centre (3.25, 2.75) cells of 8 px; YOLOv5's coding would add the cells to the left and below
    row = labels((2, 26, 22, 8, 8))
    targets = make_loss().match(row, 1, (HEIGHT, WIDTH))
    assert targets.matches == (2, 0)
    assert targets.cells.tolist() == [(2 * 12 + 3) * 2, (2 * 12 + 3) * 2 + 1]
    assert targets.boxes_cxcywh.tolist() == [[0.25, 0.75, 1, 1]] * 2
    assert make_loss(SquaredSigmoid(), SquaredSigmoid()).match(row, 1, (HEIGHT, WIDTH)).matches == (6, 0)
    assert make_loss(SquaredSigmoid(), Exponential()).match(row, 1, (HEIGHT, WIDTH)).matches == (6, 0)


def test_zero_logits_give_sums_worked_by_hand():
    # logits 0: the middle of the cell, as large as the anchor; so IoU 1 with this label, which costs nothing
    loss = make_loss(anchor_t=1.5)
    targets = loss.match(labels((1, 28, 20, 8, 8)), 1, (HEIGHT, WIDTH))
    sums = loss.sums([torch.zeros(1, 2, 64 // s, 96 // s, 8) for s in (8, 16)], targets)
    log2 = math.log(2)
    expected = [0, 0, 192 * log2, 48 * log2, 3 * log2, 0]
    torch.testing.assert_close(sums, torch.tensor(expected), rtol=1e-6, atol=1e-6)


def test_levels_may_have_codings_of_their_own():
    rows = labels((0, 30, 30, 10, 12), (1, 60, 20, 30, 40), (2, 9, 50, 50, 60))
    raws, one, two = random_raws(), Exponential(), Exponential(1.2)
    losses = {codings: make_loss(*codings) for codings in ((one, one), (two, two), (one, two))}
    sums = {c: loss.sums(raws, loss.match(rows, 1, (HEIGHT, WIDTH))) for c, loss in losses.items()}
    assert sums[one, one][1] != sums[two, two][1]
    for fine in (0, 2, 4):  # terms of the finer level, then of the coarser
        assert sums[one, two][fine] == sums[one, one][fine]
        assert sums[one, two][fine + 1] == sums[two, two][fine + 1]


@pytest.mark.parametrize("size", [-1e4, -100.0, 100.0, 1e4])
def test_absurd_sizes_give_finite_losses_and_gradients(size):
    loss, raws = make_loss(), random_raws()
    with torch.no_grad():
        for raw in raws:
            raw[..., 2:4] = size
    loss.sums(
        raws, loss.match(labels((0, 30, 30, 10, 12), (1, 60, 20, 30, 40)), 1, (HEIGHT, WIDTH))
    ).sum().backward()
    assert all(torch.isfinite(raw.grad).all() for raw in raws)


def test_a_network_learns_to_find_boxes_with_the_loss_of_its_family():
    description = parse_cfg(CFG, name="learner", source="x")
    model = build_model(description, 2, seed=1).train()
    loss = family_loss(model, Yolov5Hyperparameters(), 96)
    assert isinstance(loss, Yolov5Loss)
    assert loss.codings == (Exponential(), Exponential(1.2))
    rows = labels((0, 28, 22, 14, 12), (1, 66, 34, 40, 44))
    image = torch.zeros(1, 3, HEIGHT, WIDTH)
    image[:, 0, 16:28, 21:35], image[:, 1, 12:56, 46:86] = 1, 1
    targets = loss.match(rows, 1, (HEIGHT, WIDTH))
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    for step in range(120):
        # at a constant rate the boxes swing by 3 px
        optimiser.param_groups[0]["lr"] = 0.02 * (1 - step / 120)
        sums = loss.sums(model(image), targets)
        (loss.gains * sums / torch.from_numpy(targets.counts).clamp(min=1)).sum().backward()
        optimiser.step()
        optimiser.zero_grad()
    with torch.no_grad():
        found = model.decode(model(image)).rows[0]
    scores = found[:, 4:5] * found[:, 5:]
    for class_idx, *box in ((0, 28, 22, 14, 12), (1, 66, 34, 40, 44)):
        best = scores[:, class_idx].argmax()
        assert (found[best, :4] - torch.tensor(box)).abs().max() < 2 and scores[best, class_idx] > 0.3
