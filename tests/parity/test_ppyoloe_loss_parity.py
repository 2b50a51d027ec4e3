"""Loss, gradient and assigned labels against numbers of PaddleDetection's PP-YOLOE head (13 cases), and of whole
networks.

The numbers in tests/parity/data leave out distance logits of cells that are in no label and belong to none (zeros),
boxes of cells without a label, and what the cases with both assigners share.
"""

import json
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from conditioning import compare, perturbed, worst
from formula import fill_by_formula
from label_rows import shapes_of
from reference import parity
from ties import for_each_order

from yolofleet.families.losses.assign import Grid, atss
from yolofleet.families.networks.description import describe
from yolofleet.families.ppyoloe.description import PpyoloeDescription
from yolofleet.families.ppyoloe.loss import PpyoloeLoss
from yolofleet.families.ppyoloe.network import PpyoloeNetwork

SIZE_HW = (128, 160)
STRIDES = (32, 16, 8)
CELLS = [20, 80, 320]  # of an image, per level
NC = 4
CASES = json.loads(parity("ppyoloe_loss/cases.json").read_text())
WHOLE = json.loads(parity("ppyoloe_loss/whole_network.json").read_text())
# labels of the whole networks' numbers, px
WHOLE_BOXES = np.array(
    [[[10, 12, 70, 90], [80, 40, 150, 120], [30, 30, 44, 52]], [[20, 20, 140, 110], [0] * 4, [0] * 4]],
    np.float32,
)
WHOLE_CLASSES = np.array([[3, 17, 0], [79, 0, 0]])


class Numbers:
    """Arrays of one case; predictions and labels of a task-aligned case are those of its ATSS twin."""

    def __init__(self, path):
        with np.load(path) as file:
            self.arrays = {name: file[name] for name in file.files}

    def __call__(self, case, name):
        own = f"{case}.{name}"
        return self.arrays[own if own in self.arrays else own.replace("tal", "atss", 1)]


@pytest.fixture(scope="module")
def numbers():
    return Numbers(parity("ppyoloe_loss/cases.npz"))


def labels_of(boxes_xyxy_px, classes, is_label):
    """Labels of [N, G, 4] boxes."""
    image, place = np.nonzero(is_label)
    unit = boxes_xyxy_px[image, place] / np.array([SIZE_HW[1], SIZE_HW[0]] * 2, np.float64)
    low, high = unit[:, :2], unit[:, 2:]
    return shapes_of(np.column_stack((image, classes[image, place], (low + high) / 2, high - low)))


def loss_and_targets(case, numbers):
    loss = PpyoloeLoss(strides=STRIDES).at(CASES[case]["epoch_id"] / 300)
    boxes = numbers(case, "gt_bbox")
    is_label = numbers(case, "pad_gt_mask")[..., 0] > 0
    labels = labels_of(boxes, numbers(case, "gt_class")[..., 0], is_label)
    return loss, loss.match(labels, len(boxes), SIZE_HW)


def raws_of(case, numbers):
    """The head's output; probabilities are given, so logits are their inverse."""
    probabilities = perturbed(numbers(case, "pred_scores").astype(np.float64))
    logits = np.log(probabilities / (1 - probabilities)).astype(np.float32)
    borders = np.cumsum(CELLS)[:-1]
    levels = zip(
        np.split(logits, borders, 1), np.split(perturbed(numbers(case, "pred_dist")), borders, 1), strict=True
    )
    return [torch.from_numpy(part.copy()).requires_grad_() for level in levels for part in level]


def by_image(rows, images):
    """[N, 420, ...] of rows as the loss numbers cells: level, image, place."""
    levels = np.split(rows, np.cumsum(images * np.array(CELLS))[:-1])
    return np.concatenate([level.reshape(images, -1, *level.shape[1:]) for level in levels], 1)


@pytest.mark.parametrize("case", CASES)
def test_cells_get_the_originals_labels_boxes_and_scores(case, numbers):
    loss, targets = loss_and_targets(case, numbers)
    images = len(targets.boxes_xyxy_px)
    matches = loss.assign(raws_of(case, numbers), targets)

    cells, labels = matches.cells.numpy(), matches.labels.numpy()
    classes = np.full(images * sum(CELLS), NC)
    classes[cells] = targets.classes[labels]
    compare(by_image(classes, images), numbers(case, "assigned_labels"))

    boxes = np.zeros((len(classes), 4), np.float32)
    boxes[cells] = targets.boxes_xyxy_px.reshape(-1, 4)[labels]
    is_matched = numbers(case, "assigned_labels") != NC
    expected = numbers(case, "assigned_bboxes_px") * is_matched[..., None]
    compare(by_image(boxes, images), expected, atol=2e-5)

    scores = np.zeros((len(classes), NC), np.float32)
    scores[cells, targets.classes[labels]] = matches.scores
    compare(by_image(scores, images), numbers(case, "assigned_scores"), rtol=6e-5, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_value_and_gradient_are_the_originals(case, numbers):
    loss, targets = loss_and_targets(case, numbers)
    raws = raws_of(case, numbers)
    *sums, divisor = loss.sums(raws, targets)
    items = loss.gains * torch.stack(sums) / divisor.clamp(min=1)
    items.sum().backward()

    expected = CASES[case]
    compare(divisor.item(), expected["assigned_scores_sum"], rtol=1.5e-5)
    by_name = [expected[name] for name in ("loss_cls", "loss_iou", "loss_dfl")]
    compare(items.detach() / loss.gains, by_name, rtol=1.5e-5)
    compare(items.sum().item(), expected["loss"], rtol=1.5e-5)

    probabilities = numbers(case, "pred_scores").astype(np.float64)
    slope = probabilities * (1 - probabilities)  # from probabilities, as the original has it, to logits
    for name, parts, factor in (("grad_scores", raws[0::2], slope), ("grad_dist", raws[1::2], 1)):
        gradient = torch.cat([part.grad for part in parts], 1).numpy()
        original = numbers(case, name) * factor
        compare(gradient, original, rtol=4e-5, atol=4e-5 * np.abs(original).max())


def whole_network(name):
    """A network with the weights that the numbers were made with."""
    description = describe(name)
    assert isinstance(description, PpyoloeDescription)
    model = PpyoloeNetwork(replace(description, normalise=None), 80)
    fill_by_formula(model, 2.0)
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if key.endswith(".alpha"):
                r = np.random.RandomState(zlib.crc32(key.encode()))
                tensor.fill_(0.5 + 0.5 * (0.5 + r.random_sample()))
            elif "pred_cls" in key:
                tensor.copy_(tensor - 3 if key.endswith("bias") else tensor * 0.1)
            elif "pred_reg" in key and key.endswith("weight"):
                tensor.mul_(0.25)
    return model.train().to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stub lacks memory_format


@pytest.mark.parametrize("phase", ["atss", "tal"])
@pytest.mark.parametrize("name", ["s", "plus_s"])
def test_loss_and_gradient_norms_of_a_whole_network_are_the_originals(name, phase):
    expected = WHOLE[f"{name}.{phase}"]
    model = perturbed(whole_network("ppyoloe-plus-s" if name == "plus_s" else "ppyoloe-s"))
    r = np.random.RandomState(7)
    cells = r.randint(0, 200, (2, 3, SIZE_HW[0] // 8, SIZE_HW[1] // 8)).repeat(8, 2).repeat(8, 3)
    images = torch.from_numpy((cells + r.randint(0, 56, (2, 3, *SIZE_HW))).astype(np.float32)) / 255
    images = perturbed(images)

    loss = PpyoloeLoss(strides=STRIDES).at(0 if phase == "atss" else 200 / 300)
    targets = loss.match(labels_of(WHOLE_BOXES, WHOLE_CLASSES, WHOLE_BOXES.any(-1)), 2, SIZE_HW)
    # The label of the second image has its centre at (80, 65) px. The centres of places 33 and 36 of stride 16,
    # (56, 56) and (104, 56) px, are equally near, exactly. The original took the later one, which follows from its
    # library's partial sort, not from a rule.
    cells = targets.atss_cells.copy()
    earlier, later = (2 * CELLS[0] + CELLS[1] + place for place in (33, 36))
    cells[cells == earlier] = later
    targets = replace(targets, atss_cells=cells)

    def items_and_gradients():
        model.zero_grad()
        *sums, divisor = loss.sums(model(images.contiguous(memory_format=torch.channels_last)), targets)
        items = torch.stack(sums) / divisor.clamp(min=1)
        (items * loss.gains).sum().backward()
        parameters = dict(model.named_parameters())
        return items.detach().numpy(), [parameters[key].grad.norm().item() for key in expected["grad_l2"]]

    original = expected["grad_l2"]
    norms = np.array(list(original.values()))
    atol = np.full(len(norms), 1e-5)
    for place, key in enumerate(original):
        if key.endswith(".alpha"):
            # A sum over channels that add up to as little as a twentieth of their norm, which is that of the
            # normalisation before it: the tolerance is relative to the terms.
            weight, bias = (original[key.replace("alpha", f"conv2.bn.{name}")] for name in ("weight", "bias"))
            atol[place] += 2e-3 * np.hypot(weight, bias)
    # plus-s has a near tie under its pooling windows: gradients may go either way, as long as they go the original's
    items, found = min(
        for_each_order(items_and_gradients), key=lambda both: worst(both[1], norms, rtol=1e-3, atol=atol)
    )
    compare(items, [expected[key] for key in ("loss_cls", "loss_iou", "loss_dfl")], rtol=5e-5)
    compare(found, norms, rtol=1e-3, atol=atol)


def test_of_equally_near_cells_the_first_is_taken():
    # the tie that the test above turns round
    cells, _ = atss(WHOLE_BOXES, Grid(2, SIZE_HW, STRIDES))
    of_level = cells - (2 * CELLS[0] + CELLS[1])
    assert 33 in of_level and 36 not in of_level
