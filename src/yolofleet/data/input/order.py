"""The image at each position of an epoch: ``--sampler`` and ``--rect``.

An epoch always has as many positions as the training split has images. A sampler decides how often each image occurs:
its expected number in an epoch is proportional to its weight, and the real one is that number rounded up or down
(systematic sampling). So nothing but the seed, the epoch and the labels decides the order, and with ``weights`` the
figures of an earlier validation, which the key of a micro-batch contains.

Sums here are sequential (``cumsum``), and the other operations are rounded in one way only, so all hosts draw equally.

Legend: n images, M labels, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized

import numpy as np

from yolofleet.data.datasets.index import DataIndex
from yolofleet.data.input.cache import resized_wh
from yolofleet.support.random_numbers import generator, permutation

ORDERS_KEPT = 2  # in memory: a micro-batch may span two epochs

ClassAP = tuple[float, ...]  # AP of each class; -1 for a class without labels


class Orders:
    """The shuffled images of each epoch, each once.

    Attributes:
        is_rect: the images of a micro-batch have like aspect ratios and one shape; see :class:`RectOrders`.
    """

    is_rect = False

    def __init__(self, index: Sized, seed: int) -> None:
        self.index, self.seed = index, seed
        self._kept: dict[tuple[int, ClassAP | None], np.ndarray] = {}

    def shape_hw(self, images: Sequence[int], img: int) -> tuple[int, int]:
        """Return height and width, in pixels, of a micro-batch of these images whose longer sides become ``img``."""
        return img, img

    def image_of(self, epoch: int, position: int, class_ap: ClassAP | None = None) -> int:
        """Return the number of the image at a position of an epoch.

        Args:
            class_ap: figures of the validation that the epoch's weights follow; None before the first.
        """
        return int(self._order(epoch, class_ap)[position])

    def partner(self, epoch: int, share: float, class_ap: ClassAP | None = None) -> int:
        """Return the number of an image to show beside another; ``share`` is a random number in [0, 1)."""
        return int(share * len(self.index))

    def _order(self, epoch: int, class_ap: ClassAP | None) -> np.ndarray:
        """Return :meth:`order`, kept from an earlier call if possible."""
        key = epoch, class_ap
        if key not in self._kept:
            for old in sorted(self._kept, key=lambda key: key[0])[: 1 - ORDERS_KEPT]:
                del self._kept[old]
            self._kept[key] = self.order(epoch, class_ap)
        return self._kept[key]

    def order(self, epoch: int, class_ap: ClassAP | None = None) -> np.ndarray:
        """Return the numbers of the images of an epoch: int32 [n]. Arguments as for :meth:`image_of`."""
        return permutation(self.seed, epoch, len(self.index))


class SampledOrders(Orders):
    """Orders in which images occur as often as a sampler says.

    Images without labels occur once in each epoch, as without a sampler.

    - ``weights``: the sum over the labels of an image of (1 - AP)^2 / (labels of the class), where AP is the class's
      accuracy in a validation; each image once before the first one.
    - ``balanced``: the sum over the classes of an image of 1 / (images with the class): each class is shown equally often
      if images have one class each (class-aware sampling, arXiv:1512.05830).
    - ``repeat-factor``: the largest max(1, sqrt(t / f)) over the classes of an image, where f is the share of the images
      with the class (LVIS, arXiv:1908.03195).

    Args:
        threshold: t of ``repeat-factor``.
    """

    def __init__(self, index: DataIndex, seed: int, sampler: str, threshold: float) -> None:
        super().__init__(index, seed)
        self.labels = index
        self.sampler = sampler
        n = len(index)
        owner = np.repeat(np.arange(n, dtype=np.int32), np.diff(index.offsets))[~index.crowd]
        classes = index.classes[~index.crowd]
        self._labelled = np.bincount(owner, minlength=n) > 0
        if sampler == "weights":
            return
        pairs = np.unique(owner.astype(np.int64) * len(index.names) + classes)
        owner, classes = np.divmod(pairs, len(index.names))  # each class of an image once
        images_with = np.bincount(classes, minlength=len(index.names))
        if sampler == "balanced":
            weights = np.bincount(owner, weights=1 / images_with[classes], minlength=n)
            self._counts = self._expected(weights)
        else:
            repeats = np.ones(n)
            np.maximum.at(repeats, owner, np.sqrt(threshold * n / images_with[classes]))
            self._counts = repeats * (n / repeats.cumsum()[-1])

    def partner(self, epoch: int, share: float, class_ap: ClassAP | None = None) -> int:
        return self.image_of(epoch, int(share * len(self.index)), class_ap)

    def expected_counts(self, class_ap: ClassAP | None = None) -> np.ndarray:
        """Return how often each image occurs in an epoch on average: float64 [n], with the sum n."""
        if self.sampler != "weights":
            return self._counts
        if class_ap is None:
            return np.ones(len(self.index))
        index = self.labels
        ap = np.array(class_ap)
        ap[ap < 0] = ap[ap >= 0].cumsum()[-1] / (ap >= 0).sum() if (ap >= 0).any() else 0.0
        labels = np.bincount(index.classes[~index.crowd], minlength=len(index.names))
        of_class = (1 - ap) * (1 - ap) / np.maximum(labels, 1)
        sums = np.concatenate([[0.0], np.cumsum(of_class[index.classes] * ~index.crowd)])
        return self._expected(sums[index.offsets[1:]] - sums[index.offsets[:-1]])

    def _expected(self, weights: np.ndarray) -> np.ndarray:
        """Scale the weights of the labelled images to their number; the others count 1."""
        counts = np.ones(len(weights))
        weights = weights[self._labelled]
        if (total := weights.cumsum()[-1]) > 0:
            counts[self._labelled] = weights * (len(weights) / total)
        return counts

    def order(self, epoch: int, class_ap: ClassAP | None = None) -> np.ndarray:
        n = len(self.index)
        shuffled = permutation(self.seed, epoch, n)
        ends = self.expected_counts(class_ap)[shuffled].cumsum()
        points = (np.arange(n) + generator(self.seed, "sampler", epoch).random()) * (ends[-1] / n)
        drawn = shuffled[np.minimum(np.searchsorted(ends, points, side="right"), n - 1)]
        # equal images are neighbours so far
        return np.asarray(drawn[permutation(self.seed, epoch, n, "sampler order")])


class RectOrders(Orders):
    """Orders whose micro-batches have images of like aspect ratios (``--rect``).

    The images of an epoch are sorted by height / width and cut into micro-batches, which are then shuffled. Images of equal
    shape stay shuffled among each other. The stream of samples has no gap between epochs, so a micro-batch may contain
    images of two: those are the widest of both.

    Args:
        sampled: decides how often each image occurs.
        micro_batch: images that share one shape.
        stride: of the network, pixels; each side is a multiple of it.
    """

    is_rect = True

    def __init__(self, sampled: Orders, index: DataIndex, micro_batch: int, stride: int) -> None:
        super().__init__(index, sampled.seed)
        self.sampled, self.micro_batch, self.stride = sampled, micro_batch, stride
        self.sizes_wh = index.sizes_wh

    def partner(self, epoch: int, share: float, class_ap: ClassAP | None = None) -> int:
        return self.sampled.partner(epoch, share, class_ap)

    def order(self, epoch: int, class_ap: ClassAP | None = None) -> np.ndarray:
        drawn, m = self.sampled.order(epoch, class_ap), self.micro_batch
        widths, heights = self.sizes_wh[drawn].T
        ordered = drawn[np.argsort(heights / widths, kind="stable")]
        head = min(-epoch * len(drawn) % m, len(drawn))  # for the micro-batch that the last epoch began
        tail = (len(drawn) - head) % m
        ends, groups = ordered[: head + tail], ordered[head + tail :].reshape(-1, m)
        shuffled = groups[permutation(self.seed, epoch, len(groups), "rect")].ravel()
        return np.concatenate([ends[:head], shuffled, ends[head:]])

    def shape_hw(self, images: Sequence[int], img: int) -> tuple[int, int]:
        sides = resized_wh(self.sizes_wh[list(images)], img).max(axis=0)  # [2]
        width, height = (-(-sides // self.stride) * self.stride).tolist()
        return height, width


def build_orders(index: DataIndex, seed: int, sampler: str, threshold: float) -> Orders:
    """Return the orders of ``--sampler``."""
    return Orders(index, seed) if sampler == "none" else SampledOrders(index, seed, sampler, threshold)


def fraction_of(images: int, fraction: float, seed: int) -> np.ndarray:
    """Return the numbers of the images that ``--fraction`` keeps: ascending, at least one."""
    kept = max(round(images * fraction), 1)
    return np.sort(permutation(seed, 0, images, "fraction")[:kept])
