"""Match predictions to labels one to one, by the least sum of costs (DETR, arXiv:2005.12872, section 3.1).

N images, P outputs of the network (encoder and decoder layers), Q queries, C classes, G labels of the image that has most,
T labels of the micro-batch, M matches. Boxes are cx, cy, w, h in 0..1.

Parity with a search through all assignments: tests/unit/losses/test_detr_matching.py; with transformers:
tests/parity/test_detr_loss_parity.py.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from yolofleet.data.geometry.boxes import xyxy_from_cxcywh
from yolofleet.families.losses.assign import overlap_pairs
from yolofleet.support.devices import HostCopy, to_device

CLASS_COST, L1_COST, GIOU_COST = 2.0, 5.0, 2.0
ALPHA = 0.25  # of the focal loss whose two cases are the class cost; its gamma is 2
UNUSABLE = 1e9  # stands for a cost that is not finite
COSTED = 1024  # labels whose costs are computed at once, to bound the memory
THREADS = 4  # that solve the assignments of large micro-batches; the solver releases the interpreter
THREADED = 2**20  # costs from which threads save time


class Pairs(NamedTuple):
    """Matched predictions and labels, as arrays [M] sorted by output."""

    output: np.ndarray  # int64, like the next three
    image: np.ndarray
    query: np.ndarray
    label: np.ndarray
    weight: np.ndarray  # float32: of a match's losses of boxes

    def on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return output, image, query and label on ``device``."""
        output, image, query, label = to_device(torch.from_numpy(np.stack(self[:4])), device)
        return output, image, query, label

    def rows(self, chosen: np.ndarray) -> Pairs:
        """Return some pairs, or all in another order."""
        return Pairs(*(part[chosen] for part in self))

    def beside(self, other: Pairs, outputs: int) -> Pairs:
        """Return at each output the pairs of both. Each has as many at every output."""
        both = zip(self, other, strict=True)
        return Pairs(*(np.hstack([part.reshape(outputs, -1) for part in parts]).ravel() for parts in both))

    def weighted(self, losses: Tensor) -> Tensor:
        """Return losses [M, ...] times the weights of the pairs."""
        weight = to_device(torch.from_numpy(self.weight), losses.device)
        return losses * weight.view(-1, *[1] * (losses.ndim - 1))

    def sums(self, losses: Tensor, outputs: int) -> Tensor:
        """Return the weighted sums of losses [M, ...] of each output, [P, ...].

        They are sums of parts: the order of an indexed sum varies on GPUs.
        """
        sizes = np.bincount(self.output, minlength=outputs).tolist()
        return torch.stack([part.sum(0) for part in self.weighted(losses).split(sizes)])

    def sums_by_kind(self, losses: Tensor, outputs: int, noisy: int) -> list[Tensor]:
        """Return the same for pairs with as many at every output: first of the queries below ``noisy``, then of the others."""
        each = len(self.output) // outputs
        first = np.count_nonzero(self.query[:each] < noisy)
        parts = self.weighted(losses).unflatten(0, (outputs, each)).split([first, each - first], 1)
        return [part.sum(1) for part in parts]


def at_each(
    outputs: int, image: np.ndarray, query: np.ndarray, label: np.ndarray, weight: np.ndarray
) -> Pairs:
    """Return pairs that are the same at every output."""
    parts = (np.tile(part, outputs) for part in (image, query, label, weight))
    return Pairs(np.repeat(np.arange(outputs), len(image)), *parts)


class Matching:
    """The matches of each output: the constructor computes the costs, and :meth:`pairs` waits for them.

    The device can compute something else while the host solves the assignments. An image with more labels than queries has
    as many matches as queries. Equal costs always give the same matches.

    Args:
        boxes: [N, P, Q, 4]. logits: [N, P, Q, C]. Both float32.
        true_boxes: [N, G, 4].
        classes: int64 [N, G]; -1 = no label.

    Attributes:
        factor: 1, or NaN if a cost is not finite. The loss multiplies its sums by it: the gradient is then not finite either,
            so that the step changes nothing on any rank, and the run names it.
    """

    @torch.no_grad()
    def __init__(self, boxes: Tensor, logits: Tensor, true_boxes: Tensor, classes: np.ndarray) -> None:
        self._image, self._label = np.nonzero(classes >= 0)  # [T]
        self._borders = np.searchsorted(self._image, range(len(boxes) + 1))
        rows = np.stack([self._image, self._label, classes[self._image, self._label]])
        parts = []
        for part in to_device(torch.from_numpy(rows), boxes.device).split(COSTED, 1):
            images, labels, names = part.unbind()
            chance = logits[images, :, :, names]  # [T, P, Q]
            parts.append(costs(boxes[images], chance, true_boxes[images, labels][:, None, None]))
        cost = torch.cat(parts)
        finite = cost.isfinite()
        self.factor = torch.where(finite.all(), 1.0, torch.nan)
        self._cost = HostCopy(cost.where(finite, UNUSABLE))

    def pairs(self) -> Pairs:
        """Return the matches. Host synchronisation: one, for the costs of all outputs and images."""
        output, query, row = assigned(self._cost.read().numpy(), self._borders)
        return Pairs(output, self._image[row], query, self._label[row], np.ones(len(row), np.float32))


def costs(boxes: Tensor, logits: Tensor, true_boxes: Tensor) -> Tensor:
    """Return the cost of predictions [...] for labels; boxes [..., 4] broadcast.

    Args:
        logits: of the label's class.
    """
    chance = logits.sigmoid()
    named = ALPHA * (1 - chance).square() * F.softplus(-logits)
    cost = CLASS_COST * (named - (1 - ALPHA) * chance.square() * F.softplus(logits))
    cost += L1_COST * (boxes - true_boxes).abs().sum(-1)
    return cost - GIOU_COST * giou(boxes, true_boxes)[1]


def giou(boxes: Tensor, true_boxes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the IoU and the generalised IoU (arXiv:1902.09630) of boxes [..., 4]; leading dimensions broadcast."""
    ours, theirs = xyxy_from_cxcywh(boxes), xyxy_from_cxcywh(true_boxes)
    intersection, union = overlap_pairs(ours, theirs)
    union = union + 1e-12  # a pixel of an image of 640 px has 2e-6
    hull = torch.maximum(ours[..., 2:], theirs[..., 2:]) - torch.minimum(ours[..., :2], theirs[..., :2])
    area = hull[..., 0] * hull[..., 1] + 1e-12
    iou = intersection / union
    return iou, iou - (area - union) / area


def assigned(cost: np.ndarray, borders: np.ndarray) -> np.ndarray:
    """Return outputs, queries and rows of the cheapest assignments, int64 [3, M], sorted by output and row.

    Args:
        cost: float32 [T, P, Q], finite.
        borders: [N + 1]; labels borders[i] to borders[i + 1] are those of image i.
    """
    from scipy.optimize import linear_sum_assignment  # no rank of another family loads scipy

    def solve(image: int) -> list[np.ndarray]:
        first, last = borders[image : image + 2]
        found = []
        for output in range(cost.shape[1] if last > first else 0):
            label, query = linear_sum_assignment(cost[first:last, output])
            found.append(np.stack([np.full(len(label), output), query, first + label]))
        return found

    images = range(len(borders) - 1)
    if cost.size < THREADED:
        solved = list(map(solve, images))
    else:
        with ThreadPoolExecutor(THREADS) as pool:
            solved = list(pool.map(solve, images))
    found = np.concatenate([np.zeros((3, 0), np.int64), *(part for parts in solved for part in parts)], 1)
    in_order: np.ndarray = found[:, np.argsort(found[0], kind="stable")]
    return in_order
