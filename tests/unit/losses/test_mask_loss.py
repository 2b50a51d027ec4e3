"""The term of masks of YOLOv5's loss, beside a plain formula."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from label_rows import of_images

from yolofleet.data.geometry.shapes import Shapes
from yolofleet.families.yolov5 import mask_loss
from yolofleet.families.yolov5.hyperparameters import Yolov5Hyperparameters
from yolofleet.families.yolov5.loss import Yolov5Loss
from yolofleet.families.yolov5.mask_loss import MaskLoss, _Blocks, _mask_sums

CLASSES, COEFFICIENTS, SIZE_HW = 3, 4, (64, 96)
ANCHORS_PX = torch.tensor([[[8.0, 8.0], [16.0, 16.0]], [[32.0, 32.0], [64.0, 64.0]]])


@dataclass(frozen=True)
class Stripes(Shapes):
    """Masks whose share of a cell follows from its row, its column and the label."""

    has_mask: np.ndarray

    def rasters(self, size_hw: tuple[int, int]) -> np.ndarray:
        y, x = np.mgrid[: size_hw[0], : size_hw[1]]
        numbers = (self.boxes[:, 0] * 1000).astype(int)
        return np.stack([(37 * y + 91 * x + n) % 256 for n in numbers]).astype(np.uint8)

    def in_windows(self, size_hw: tuple[int, int], windows: np.ndarray) -> np.ndarray:
        maps = zip(self.rasters(size_hw) if len(self) else [], windows.tolist(), strict=True)
        parts = [one[y0:y1, x0:x1].ravel() for one, (y0, y1, x0, x1) in maps]
        return np.concatenate([np.zeros(0, np.uint8), *parts])


def some_labels(images: int, seed: int = 0) -> Stripes:
    """Return labels, none in image 1, some without a mask, two in one box, and one smaller than a cell."""
    rng = np.random.default_rng(seed)
    image = np.sort(rng.choice([i for i in range(images) if i != 1], 5 * images))
    sides = rng.uniform(0.05, 0.7, (len(image), 2))
    boxes = np.concatenate([rng.uniform(0.1, 0.9, (len(image), 2)), sides], 1).astype(np.float32)
    boxes[1], boxes[2] = boxes[0], [0.5, 0.5, 0.03, 0.04]
    return Stripes(image, rng.integers(0, CLASSES, len(image)), boxes, rng.random(len(image)) < 0.8)


def make_loss(kind: type[Yolov5Loss] = MaskLoss) -> Yolov5Loss:
    recipe = Yolov5Hyperparameters(label_smoothing=0.1)
    return kind(anchors_px=ANCHORS_PX, strides=(8, 16), nc=CLASSES, recipe=recipe, img=64)


def random_raws(images: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = 5 + CLASSES + COEFFICIENTS
    shapes = [(images, SIZE_HW[0] // s, SIZE_HW[1] // s, 2, values) for s in (8, 16)]
    raws = [torch.randn(shape, generator=generator).permute(0, 3, 1, 2, 4) for shape in shapes]
    prototypes = torch.randn(images, SIZE_HW[0] // 4, SIZE_HW[1] // 4, COEFFICIENTS, generator=generator)
    return [raw.requires_grad_() for raw in (*raws, prototypes.permute(0, 3, 1, 2))]


def plain_sums(raws: list[torch.Tensor], labels: Stripes) -> torch.Tensor:
    """Return the sums of masks [L] as the paper has them, cell by cell of a whole map, in float64."""
    *levels, prototypes = (raw.double() for raw in raws)
    targets, label = make_loss()._matched(labels, len(prototypes), SIZE_HW)
    height, width = prototypes.shape[2:]
    y, x = np.mgrid[:height, :width] + 0.5
    maps = labels.rasters((height, width))
    sums, at = [], 0
    for raw, matches in zip(levels, targets.matches, strict=True):
        rows = raw.permute(0, 2, 3, 1, 4).flatten(0, 3)
        total = raw.new_zeros(())
        for match in range(at, at + matches):
            number = label[match]
            if not labels.has_mask[number]:
                continue
            coefficients = rows[targets.cells[match], 5 + CLASSES :]
            logits = torch.einsum("d,dhw->hw", coefficients, prototypes[labels.image[number]])
            x1, y1, x2, y2 = labels.corners_px(width, height)[number]
            inside = torch.from_numpy((x >= x1) & (x < x2) & (y >= y1) & (y < y2))
            wanted = torch.from_numpy(maps[number] / 255)
            loss = -(wanted * logits.sigmoid().log() + (1 - wanted) * (-logits).sigmoid().log())
            total = total + loss[inside].sum() / max((x2 - x1) * (y2 - y1), 1)
        sums.append(total)
        at += matches
    return torch.stack(sums)


def test_values_and_gradients_are_those_of_a_plain_formula_in_64_bits() -> None:
    loss, labels, raws = make_loss(), some_labels(4), random_raws(4)
    targets = loss.match(labels, 4, SIZE_HW)
    sums = loss.sums(raws, targets)
    factors = torch.tensor([0.5, 2.0])
    (sums[-2:] * factors).sum().backward()
    found = [raw.grad for raw in raws]
    others = [raw.detach().double().requires_grad_() for raw in raws]
    expected = plain_sums(others, labels)
    (expected * factors).sum().backward()
    torch.testing.assert_close(sums[-2:].double(), expected, rtol=1e-6, atol=1e-6)
    assert expected.min() > 0
    for mine, other in zip(found, others, strict=True):
        assert mine is not None and other.grad is not None
        torch.testing.assert_close(mine.double(), other.grad, rtol=1e-5, atol=1e-6)


def test_terms_of_boxes_have_the_bits_of_the_loss_of_boxes() -> None:
    labels, raws = some_labels(3), random_raws(3)
    boxes = [raw.detach()[..., : 5 + CLASSES].clone().requires_grad_() for raw in raws[:-1]]
    masks, other = make_loss(), make_loss(Yolov5Loss)
    mine, theirs = masks.match(labels, 3, SIZE_HW), other.match(labels, 3, SIZE_HW)
    assert masks.terms[:6] == other.terms and masks.terms[6:] == ("mask/0", "mask/1")
    assert torch.equal(masks.gains, torch.cat([other.gains, other.gains[:2]]))
    assert np.array_equal(mine.counts[:6], theirs.counts)
    sums, expected = masks.sums(raws, mine), other.sums(boxes, theirs)
    assert torch.equal(sums[:6], expected)
    sums[:6].sum().backward()
    expected.sum().backward()
    for raw, box in zip(raws[:-1], boxes, strict=True):
        assert raw.grad is not None and box.grad is not None
        assert torch.equal(raw.grad[..., : 5 + CLASSES], box.grad)
        assert not raw.grad[..., 5 + CLASSES :].any()


@pytest.mark.parametrize("parts", [2, 4])
def test_any_split_of_a_step_has_the_gradient_of_the_whole(parts: int) -> None:
    loss, labels, raws = make_loss(), some_labels(4), random_raws(4)
    whole = loss.match(labels, 4, SIZE_HW)
    factors = loss.gains / torch.from_numpy(whole.counts).clamp(min=1)
    (loss.sums(raws, whole) * factors).sum().backward()
    counts, grads = np.zeros_like(whole.counts), []
    for first in range(0, 4, 4 // parts):
        last = first + 4 // parts
        part = loss.match(of_images(labels, first, last), last - first, SIZE_HW)
        mine = [raw.detach()[first:last].requires_grad_() for raw in raws]
        (loss.sums(mine, part) * factors).sum().backward()
        counts += part.counts
        grads.append([raw.grad for raw in mine])
    assert np.array_equal(counts, whole.counts)
    for raw, *pieces in zip(raws, *grads, strict=True):
        torch.testing.assert_close(torch.cat(pieces), raw.grad, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("most", [1, 200, 1 << 24])
def test_blocks_of_images_are_those_of_labels(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    labels, raws = some_labels(4), random_raws(4)
    targets = make_loss().match(labels, 4, SIZE_HW)
    assert isinstance(targets, mask_loss.MaskTargets)
    found = []
    for one_per_label in (True, False):
        blocks = _Blocks(targets, torch.device("cpu"), one_per_label=one_per_label)
        prototypes = raws[-1].detach().requires_grad_()
        rows = torch.randn(
            len(targets.masked), COEFFICIENTS, generator=torch.Generator().manual_seed(1)
        ).requires_grad_()
        sums = _mask_sums(rows, prototypes, blocks)
        (sums * torch.arange(len(sums))).sum().backward()
        found.append((sums.detach(), rows.grad, prototypes.grad))
        monkeypatch.setattr(mask_loss, "MOST_LOGITS", most)
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)
    assert found[0][2] is not None and found[0][2].stride() == raws[-1].stride()


def test_labels_without_a_mask_are_learned_as_boxes() -> None:
    labels, raws = some_labels(2), random_raws(2)
    loss, bare = make_loss(), replace(labels, has_mask=np.zeros(len(labels), bool))
    targets = loss.match(bare, 2, SIZE_HW)
    assert targets.counts[-2:].tolist() == [0, 0] and targets.counts[:2].min() > 0
    sums = loss.sums(raws, targets)
    assert sums[-2:].tolist() == [0, 0] and sums[:2].min() > 0
    sums.sum().backward()
    assert raws[-1].grad is not None and not raws[-1].grad.any()


def test_no_labels_and_labels_smaller_than_a_cell_cost_nothing() -> None:
    loss, raws = make_loss(), random_raws(2)
    none = some_labels(2).rows(np.zeros(10, bool))
    tiny = replace(some_labels(2), boxes=np.full((10, 4), [0.5, 0.5, 0.03, 0.04], np.float32))
    for labels, counted in ((none, 0), (tiny, 1)):
        targets = loss.match(labels, 2, SIZE_HW)
        assert min(targets.counts[6], 1) == counted
        sums = loss.sums(raws, targets)
        assert sums[-2:].tolist() == [0, 0] and torch.isfinite(sums).all()
        sums.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_half_precision_are_32_bits(dtype: torch.dtype) -> None:
    loss, labels = make_loss(), some_labels(2)
    raws = [raw.detach().to(dtype).requires_grad_() for raw in random_raws(2)]
    targets = loss.match(labels, 2, SIZE_HW)
    sums = loss.sums(raws, targets)
    sums.sum().backward()
    torch.testing.assert_close(sums, loss.sums([raw.detach().float() for raw in raws], targets))
    assert sums.dtype == torch.float32
    assert all(raw.grad is not None and raw.grad.dtype == dtype for raw in raws)


def test_targets_of_another_size_are_refused() -> None:
    loss, raws = make_loss(), random_raws(2)
    with pytest.raises(AssertionError, match="another size"):
        loss.sums(raws, loss.match(some_labels(2), 2, (96, 64)))
