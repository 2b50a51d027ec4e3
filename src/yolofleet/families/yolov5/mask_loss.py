"""YOLOv5's loss with a term for masks: cross entropy within the label's box (arXiv:1904.02689), as sums and counts.

N images, L levels, C classes, D prototypes, M matches, K of them with a mask, R labels with a mask and matches, S cells of
their boxes. Masks and prototypes are maps of h x w *cells*, a quarter of the image's sides.

Parity with a plain formula in float64, and additivity: tests/unit/losses/test_mask_loss.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from yolofleet.families.losses.loss import Key
from yolofleet.families.yolov5.loss import Targets, Yolov5Loss
from yolofleet.families.yolov5.rows import PROTOTYPE_STRIDE
from yolofleet.support.devices import is_host, to_device

# logits that exist at once, 64 MiB; a forward pass has about 5 such tensors, a backward pass 6
MOST_LOGITS = 1 << 24


@dataclass(frozen=True)
class MaskTargets(Targets):
    """Those of boxes, and the masks of labels; the last L ``counts`` are those of matches with a mask."""

    map_hw: tuple[int, int]
    masked: np.ndarray  # int64 [K]: matches with a mask, sorted by image and label
    owners: np.ndarray  # int64 [K]: the label of each, in 0..R-1, ascending
    images: np.ndarray  # int64 [R], ascending
    # int64 [R, 4] top, bottom, left, right: the cells whose centres lie in the label's box
    windows: np.ndarray
    starts: np.ndarray  # int64 [R + 1]: where the cells of each window begin in ``wanted``
    areas: np.ndarray  # float32 [R] of the boxes in cells, at least 1
    wanted: np.ndarray  # uint8 [S]: share of each cell within the mask, in 1/255


class MaskLoss(Yolov5Loss):
    """The loss of boxes, and for each level ``mask``: the mean cross entropy of a match's mask, over the cells of its label's box.

    Sums over cells are divided by the area of the box, at least 1 cell. The sum over matches is divided by the number of the
    step's matches with a mask on that level; its gain is that of boxes.

    Departures from YOLOv5: its mean is over the matches of a batch on one rank, so there the gradient depends on how a step is
    cut. Labels may lack a mask. Targets are shares of cells, not 0 or 1, and objects may overlap.

    Memory: logits are computed for some matches at a time (``MOST_LOGITS``), and again in the backward pass, which also has
    the gradient of all prototypes in 32 bits.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        levels = len(self.strides)
        self.terms += tuple(f"mask/{level}" for level in range(levels))
        self.gains = torch.cat([self.gains, self.gains[:levels]])

    def match(
        self, labels: Any, images: int, size_hw: tuple[int, int], keys: Sequence[Key] = ()
    ) -> MaskTargets:
        """Assign labels to cells as for boxes, and rasterise their masks; ``labels``: ``MaskShapes``."""
        targets, label = self._matched(labels, images, size_hw)
        height, width = map_hw = size_hw[0] // PROTOTYPE_STRIDE, size_hw[1] // PROTOTYPE_STRIDE
        masked = np.flatnonzero(labels.has_mask[label])
        masked = masked[np.lexsort((label[masked], labels.image[label[masked]]))]
        is_next = np.diff(label[masked], prepend=-1) != 0  # [K] the first match of a label
        chosen = labels.rows(label[masked][is_next])

        corners = chosen.corners_px(width, height)  # [R, 4]
        limits = np.array([width, height, width, height])
        left, top, right, bottom = np.clip(np.ceil(corners - 0.5), 0, limits).astype(np.int64).T
        windows = np.stack([top, bottom, left, right], axis=1)
        level = np.repeat(np.arange(len(self.strides)), targets.matches)[masked]
        return MaskTargets(
            **{
                **vars(targets),
                "counts": np.append(targets.counts, np.bincount(level, minlength=len(self.strides))),
            },
            map_hw=map_hw,
            masked=masked,
            owners=np.cumsum(is_next) - 1,
            images=chosen.image,
            windows=windows,
            starts=np.append(0, np.cumsum((bottom - top) * (right - left))),
            areas=np.maximum((corners[:, 2:] - corners[:, :2]).prod(1), 1).astype(np.float32),
            wanted=chosen.in_windows(map_hw, windows),
        )

    def sums(self, raws: Sequence[Tensor], targets: Targets) -> Tensor:
        """Return [4 L] float32 in the order of ``terms``, differentiable; a term without matches is exactly 0.

        Args:
            raws: per level [N, A, H, W, 5 + C + D], see :class:`Yolov5Loss`; and prototypes [N, D, h, w].
        """
        assert isinstance(targets, MaskTargets)
        *levels, prototypes = raws
        assert tuple(prototypes.shape[2:]) == targets.map_hw, "targets were made for another size"
        sums, picked = self._sums(levels, targets)
        masked = to_device(torch.from_numpy(targets.masked), picked.device)
        coefficients = picked[:, 5 + self.nc :].index_select(0, masked)  # [K, D]
        blocks = _Blocks(targets, picked.device, one_per_label=is_host(picked.device))
        of_masked = _mask_sums(coefficients, prototypes, blocks)
        of_match = of_masked.new_zeros(len(picked)).index_copy(0, masked, of_masked)  # [M]
        return torch.stack([*sums, *(part.sum() for part in of_match.split(targets.matches))])


class _Block(NamedTuple):
    """Matches of one image whose masks are computed together, k of them, on a part of its map with s cells."""

    image: int
    matches: slice  # of the K
    window: tuple[int, int, int, int]  # top, bottom, left, right
    wanted: Tensor  # [k or 1, s] float32, 0..1
    weights: Tensor  # [k or 1, s or 1] float32: 1 / area within the box of the label, else 0

    def part(self, prototypes: Tensor) -> Tensor:
        """Return the view [height, width, D] of this part of the image's map."""
        top, bottom, left, right = self.window
        return prototypes[self.image].permute(1, 2, 0)[top:bottom, left:right]


class _Blocks:
    """The blocks of a micro-batch.

    Args:
        one_per_label: a block has the matches of one label, so no cell is computed in vain. Else it has as many matches of
            one image as possible, because starting a kernel takes longer on accelerators than computing some cells.
    """

    def __init__(self, targets: MaskTargets, device: torch.device, *, one_per_label: bool) -> None:
        self.targets, self.one_per_label = targets, one_per_label
        self.owners, self.windows, self.starts, self.areas, self.wanted = (
            to_device(torch.from_numpy(array), device)
            for array in (targets.owners, targets.windows, targets.starts, targets.areas, targets.wanted)
        )

    def __iter__(self) -> Iterator[_Block]:
        groups = np.arange(len(self.targets.images)) if self.one_per_label else self.targets.images
        edges = [*np.flatnonzero(np.diff(groups, prepend=-1)).tolist(), len(groups)]
        for first, last in pairwise(edges):  # labels
            top, bottom, left, right = self._window(first, last)
            begin, end = np.searchsorted(self.targets.owners, [first, last]).tolist()
            most = max(MOST_LOGITS // max((bottom - top) * (right - left), 1), 1)
            if self.targets.starts[first] < self.targets.starts[last]:  # else no box holds a cell's centre
                yield from (self._block(slice(at, min(at + most, end))) for at in range(begin, end, most))

    def _window(self, first: int, last: int) -> tuple[int, int, int, int]:
        """Return top, bottom, left, right around the windows of labels ``first`` to ``last - 1``."""
        windows = self.targets.windows[first:last]
        (top, _, left, _), (_, bottom, _, right) = windows.min(0).tolist(), windows.max(0).tolist()
        return top, bottom, left, right

    def _block(self, matches: slice) -> _Block:
        first, last = self.targets.owners[[matches.start, matches.stop - 1]].tolist()
        image, labels, window = (
            int(self.targets.images[first]),
            slice(first, last + 1),
            self._window(first, last + 1),
        )
        if first == last:
            cells = slice(*self.targets.starts[first : first + 2].tolist())
            return _Block(
                image, matches, window, self.wanted[cells].float()[None] / 255, 1 / self.areas[labels, None]
            )
        top, bottom, left, right = self.windows[labels, :, None, None].unbind(1)  # each [labels, 1, 1]
        y = torch.arange(window[0], window[1], device=self.windows.device)[:, None]
        x = torch.arange(window[2], window[3], device=self.windows.device)
        inside = (y >= top) & (y < bottom) & (x >= left) & (x < right)  # [labels, height, width]
        cell = self.starts[labels, None, None] + (y - top) * (right - left) + x - left
        wanted = self.wanted[cell.where(inside, 0)].flatten(1).float() / 255
        weights = inside.flatten(1) / self.areas[labels, None]
        owners = self.owners[matches] - first
        return _Block(image, matches, window, wanted[owners], weights[owners])


class _MaskSums(torch.autograd.Function):
    """Sums over cells of the weighted cross entropy of each match, float32 [K].

    Inputs are coefficients float32 [K, D], prototypes [N, D, h, w] and the blocks. The backward pass is written by hand: it
    computes the logits again, block by block, and adds to the prototypes in a fixed order.
    """

    @staticmethod
    def forward(ctx: Any, coefficients: Tensor, prototypes: Tensor, blocks: _Blocks) -> Tensor:
        ctx.save_for_backward(coefficients, prototypes)
        ctx.blocks = blocks
        sums = coefficients.new_zeros(len(coefficients))
        for block in blocks:
            cells = block.part(prototypes).flatten(0, 1).float()  # [s, D]
            logits = coefficients[block.matches] @ cells.T  # [k, s]
            loss = F.binary_cross_entropy_with_logits(
                logits, block.wanted.expand_as(logits), reduction="none"
            )
            sums[block.matches] = loss.mul_(block.weights).sum(1)
        return sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_sums: Tensor) -> tuple[Tensor, Tensor, None]:
        coefficients, prototypes = ctx.saved_tensors
        grad_coefficients = torch.zeros_like(coefficients)
        grad_prototypes = torch.zeros_like(prototypes, dtype=torch.float32)
        for block in ctx.blocks:
            cells = block.part(prototypes).flatten(0, 1).float()
            mine = coefficients[block.matches]
            errors = (mine @ cells.T).sigmoid_().sub_(block.wanted)  # [k, s]
            errors.mul_(block.weights).mul_(grad_sums[block.matches, None])
            grad_coefficients[block.matches] = errors @ cells
            part = block.part(grad_prototypes)
            part += (errors.T @ mine).view(part.shape)
        return grad_coefficients, grad_prototypes.to(prototypes.dtype), None


_mask_sums: Callable[[Tensor, Tensor, _Blocks], Tensor] = _MaskSums.apply
