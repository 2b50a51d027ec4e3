"""Make training samples, and micro-batches of them. Sample k of epoch e is a pure function of data, recipe, seed, e and k.

Legend: m images of a micro-batch, n labels, H x W pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol

import cv2
import numpy as np
import torch
from torch import Tensor

from yolofleet.config.schema import PREFETCH, Recipe, closing_epoch
from yolofleet.data.geometry.shapes import Shapes
from yolofleet.data.geometry.view import Look
from yolofleet.data.images.decode import Seen
from yolofleet.data.input import augment
from yolofleet.data.input.augment import Drawn, Scene
from yolofleet.data.input.cache import ImageCache
from yolofleet.data.input.loader import Loader
from yolofleet.data.input.order import ClassAP, Orders
from yolofleet.data.input.read_ahead import ReadAhead
from yolofleet.data.input.shared_buffers import image_buffer
from yolofleet.support.errors import DataError
from yolofleet.support.random_numbers import ReusedGenerator, generator

if TYPE_CHECKING:
    from yolofleet.data.input.single_images import Transforms

REPLACEMENTS = 3  # images to try instead of one that cannot be read
# changes of the recipe in the epochs of ``close_augment``
ONLY_FLIPS = {
    **dict.fromkeys(
        ("hsv_h", "hsv_s", "hsv_v", "degrees", "translate", "scale", "shear", "perspective"), 0.0
    ),
    **dict.fromkeys(("mosaic", "copy_paste", "cutout"), 0.0),
}


class Labelled(Protocol):
    """The part of ``DataIndex`` that samples need."""

    def __len__(self) -> int: ...
    def labels(self, image: int, /) -> Shapes: ...
    def outlines(self, image: int, /) -> list[list[np.ndarray]]: ...


class Images(Protocol):
    """The part of ``ImageCache`` that samples need: uint8 [h, w, 3] BGR whose longer side is the training size.

    Pixels outside the part that ``seen`` returns are unspecified.
    """

    def get(self, image: int, seen: Seen | None = None, /) -> np.ndarray: ...


class _Numbers:
    """Stands for the images while a sample is drawn, and keeps their numbers."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def get(self, image: int, seen: Seen | None = None) -> np.ndarray:
        self.asked.append(image)
        return _ANY_IMAGE


_ANY_IMAGE = np.broadcast_to(np.uint8(0), (8, 8, 3))  # its size changes no number that is drawn


class TrainSamples:
    """The augmented images of a run.

    Args:
        cache: its images; their longer side is img.
        img: side of the square output, pixels.
        epochs: length of the run; see ``recipe.close_mosaic`` and ``recipe.close_augment``.
        orders: the images of each epoch; default: each once.
        labels: (index, image) -> its labels; default: ``index.labels``.

    Raises:
        ConfigError: albumentations is not usable.

    Attributes:
        unreadable: why images were replaced, by their numbers; the caller may clear it.
    """

    def __init__(
        self,
        index: Labelled,
        cache: Images,
        recipe: Recipe,
        *,
        img: int,
        seed: int,
        epochs: int,
        orders: Orders | None = None,
        labels: Callable[[Any, int], Shapes] | None = None,
    ) -> None:
        self.index = index
        # image -> its labels, as the data set has them
        self.labels: Callable[[int], Shapes] = partial(labels, index) if labels else index.labels
        self.cache = cache
        self.recipe = recipe
        self.img = img
        self.seed = seed
        self.epochs = epochs
        self.unreadable: dict[int, str] = {}
        self.orders = orders or Orders(index, seed)
        self.transforms: Transforms | None = None
        if recipe.albumentations:
            # only recipes that change single images
            from yolofleet.data.input.single_images import Transforms

            self.transforms = Transforms(recipe.albumentations)
        self.plain_from = closing_epoch(recipe.close_augment, epochs)
        self.plain_recipe = recipe.model_copy(update=ONLY_FLIPS)
        self._rng = ReusedGenerator()

    def __len__(self) -> int:
        """Return the number of samples of an epoch."""
        return len(self.index)

    def sample(
        self,
        epoch: int,
        position: int,
        out: np.ndarray | None = None,
        class_ap: ClassAP | None = None,
        shape_hw: tuple[int, int] | None = None,
    ) -> tuple[np.ndarray, Shapes]:
        """Return an augmented image and its labels.

        Args:
            out: uint8 [H, W, 3] contiguous, receives the image; default: a new array.
            shape_hw: H and W; default: img.
        Returns:
            uint8 [H, W, 3] RGB; the labels.
        Raises:
            DataError: an image and its replacements cannot be read.
        """
        drawn = self.draw(epoch, position, class_ap, shape_hw)
        height, width = shape_hw or (self.img, self.img)
        if height == width == self.img:
            return self._rendered(drawn, self._empty() if out is None else out), drawn.labels
        top, left = (self.img - height) // 2, (self.img - width) // 2  # the middle of the square
        middle = self._rendered(drawn, self._empty())[top : top + height, left : left + width]
        if out is None:
            return np.ascontiguousarray(middle), drawn.labels
        out[:] = middle
        return out, drawn.labels

    def _rendered(self, drawn: Drawn, out: np.ndarray) -> np.ndarray:
        """Render a sample into ``out``, uint8 [img, img, 3] contiguous, and return it."""
        if len(drawn.scenes) == 1:
            augment.render(*drawn.scenes[0], drawn.look, out)
        else:
            first, second = self._empty(), self._empty()
            augment.render(*drawn.scenes[0], None, first)
            augment.render(*drawn.scenes[1], None, second)
            augment.finish(cv2.addWeighted(first, drawn.weight, second, 1 - drawn.weight, 0), drawn.look, out)
        return out

    def draw(
        self,
        epoch: int,
        position: int,
        class_ap: ClassAP | None = None,
        shape_hw: tuple[int, int] | None = None,
    ) -> Drawn:
        """Return a sample before it is rendered. Its tiles are the images of the cache, not copies.

        Args:
            class_ap, shape_hw: as for :meth:`sample`. The labels are those of the middle part of that shape.
        Raises:
            DataError: as :meth:`sample`.
        """
        if epoch >= self.plain_from:
            plain = copy(self)
            plain.recipe, plain.transforms, plain.plain_from = self.plain_recipe, None, math.inf
            return plain.draw(epoch, position, class_ap, shape_hw)
        # One more number drawn from this generator would change all samples of existing runs: a new augmentation
        # draws from a generator with a purpose of its own.
        rng = self._rng.restart(self.seed, "augment", epoch, position)
        is_mosaic, is_mixed, is_mirrored, is_upside_down = (rng.random(4) < self._chances(epoch)).tolist()
        number = self.orders.image_of(epoch, position, class_ap)

        def read(number: int, seen: Seen | None) -> tuple[np.ndarray, Shapes]:
            return self._changed(number, seen, epoch, position, class_ap)

        def partner() -> int:
            return self.orders.partner(epoch, rng.random(), class_ap)

        height, width = shape_hw or (self.img, self.img)
        scenes = [self._scene(rng, read, partner, number, is_mosaic, (height, width))]
        weight = 1.0
        if is_mosaic and is_mixed:
            scenes.append(self._scene(rng, read, partner, partner(), True, (height, width)))
            weight = augment.mixing_weight(rng)
        look = Look(augment.colour_gains(rng, self.recipe), is_mirrored, is_upside_down)
        labels = [scene.labels(look, self.no_labels) for scene in scenes]
        return Drawn(scenes, weight, look, labels[0].joined(labels) if len(labels) > 1 else labels[0])

    def images_of(self, samples: Iterable[tuple[int, int]], class_ap: Mapping[int, ClassAP]) -> list[int]:
        """Return the numbers of the images of samples (epoch, position), without reading them.

        The images that ``copy_paste`` takes objects from are left out.
        """
        likeness = copy(self)
        likeness.cache = numbers = _Numbers()
        likeness.recipe = self.recipe.model_copy(update={"copy_paste": 0.0, "cutout": 0.0})
        likeness.transforms = None
        for epoch, position in samples:
            likeness.draw(epoch, position, class_ap.get(epoch))
        return numbers.asked

    def _empty(self) -> np.ndarray:
        return np.empty((self.img, self.img, 3), np.uint8)

    def _chances(self, epoch: int) -> tuple[float, float, float, float]:
        """Return the probabilities of a mosaic, of mixing two mosaics, of a horizontal and of a vertical flip."""
        recipe = self.recipe
        is_closed = epoch >= closing_epoch(recipe.close_mosaic, self.epochs)
        return (
            0.0 if is_closed or self.orders.is_rect else recipe.mosaic,
            recipe.mixup,
            recipe.fliplr,
            recipe.flipud,
        )

    def _scene(
        self,
        rng: np.random.Generator,
        read: augment.Read,
        partner: Callable[[], int],
        number: int,
        is_mosaic: bool,
        shape_hw: tuple[int, int],
    ) -> Scene:
        """Return the images of a mosaic, or a single image, on a canvas, and the view of it."""
        if not is_mosaic:
            view = augment.draw_view(rng, self.recipe, self.img, self.img, shape_hw)
            return Scene(augment.centred(read, number, view), view)
        view = augment.draw_view(rng, self.recipe, 2 * self.img, self.img, shape_hw)
        is_nine = rng.random() < self.recipe.mosaic9
        numbers = [number, *(partner() for _ in range(8 if is_nine else 3))]
        places = np.argsort(rng.random(len(numbers)), kind="stable").tolist()
        build = augment.mosaic9 if is_nine else augment.mosaic4
        return Scene(build(rng, read, [numbers[place] for place in places], view), view)

    def _changed(
        self, number: int, seen: Seen | None, epoch: int, position: int, class_ap: ClassAP | None
    ) -> tuple[np.ndarray, Shapes]:
        """Return the pixels and labels of an image as they are placed on a canvas."""
        image, labels = self._read(epoch, number, None if self.transforms else seen)

        def drawn_for(purpose: str) -> np.random.Generator:
            return generator(self.seed, purpose, epoch, position, number)

        if self.recipe.copy_paste:
            rng = drawn_for("copy-paste")
            source = self.orders.partner(epoch, rng.random(), class_ap)
            outlines = self.index.outlines(source)
            chosen = np.flatnonzero(rng.random(len(outlines)) < self.recipe.copy_paste).tolist()
            if chosen := [i for i in chosen if outlines[i]]:
                pixels = self._source(source)
                classes = self.labels(source).classes[chosen].tolist()
                if pixels is not None:
                    from yolofleet.data.input.single_images import paste_objects

                    objects = [outlines[i] for i in chosen]
                    image, labels = paste_objects(rng, image, labels, pixels, classes, objects)
        if self.transforms is not None:
            image = self.transforms(drawn_for("albumentations"), image)
        if self.recipe.cutout and (rng := drawn_for("cutout")).random() < self.recipe.cutout:
            from yolofleet.data.input.single_images import cut_hole

            image, labels = cut_hole(rng, image, labels)
        return image, labels

    @cached_property
    def no_labels(self) -> Shapes:
        return self.labels(0).rows(slice(0))

    def _source(self, number: int) -> np.ndarray | None:
        """Return the pixels of an image to paste from; None if it cannot be read."""
        try:
            return self.cache.get(number)
        except DataError as problem:
            self.unreadable[number] = problem.what
            return None

    def _read(self, epoch: int, number: int, seen: Seen | None) -> tuple[np.ndarray, Shapes]:
        """Return the pixels and labels of an image, or of another one if it cannot be read.

        The seed, the epoch and the number of the image decide which images to try instead, so they are the same in
        every process.
        """
        try:
            return self.cache.get(number, seen), self.labels(number)
        except DataError as problem:
            first = problem
        self.unreadable[number] = first.what
        draws = generator(self.seed, "replacement", epoch, number).random(REPLACEMENTS)
        for other in (draws * len(self)).astype(int).tolist():
            try:
                return self.cache.get(other, seen), self.labels(other)
            except DataError as problem:
                self.unreadable[other] = problem.what
        first.what += f", and {REPLACEMENTS} others that could replace it cannot be read either"
        raise first


# -- micro-batches ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MicroBatchKey:
    """Which samples make up a micro-batch.

    Attributes:
        step, ordinal: number of the update, and of the micro-batch within it.
        samples: (epoch, position) of each image.
        size: side of the images in pixels if it differs from the run's (multi-scale).
        class_ap: for some epochs, the figures that ``--sampler weights`` follows in them.
    """

    step: int
    ordinal: int
    samples: tuple[tuple[int, int], ...]
    size: int | None = None
    class_ap: tuple[tuple[int, ClassAP], ...] = ()


@dataclass
class MicroBatch:
    """Images that pass through the network together.

    Attributes:
        images: uint8 [m, 3, H, W] RGB with channels-last strides.
        targets: the result of ``match`` for the labels.
        unreadable: numbers of images that were replaced, and why.
    """

    step: int
    ordinal: int
    images: Tensor
    labels: Shapes
    targets: Any
    unreadable: dict[int, str] = field(default_factory=dict)

    def images_on(self, device: torch.device) -> Tensor:
        """Return the images on ``device``; the host does not wait."""
        return self.images.to(device, non_blocking=True)


Match = Callable[..., Any]  # (labels, m, (H, W), keys) -> targets; see ``DetectionLoss.match``


def train_loader(
    samples: TrainSamples,
    keys: Iterable[MicroBatchKey],
    match: Match,
    *,
    workers: int,
    prefetch: int = PREFETCH,
    pin_memory: bool = False,
) -> Loader[MicroBatchKey, MicroBatch]:
    """Return a loader of micro-batches in the order of ``keys``, which may be endless. The caller must close it.

    Args:
        match: target assignment from labels alone (a loss's ``match``); the processes that make the images call it.
        workers: number of loader processes; 0 means this process.
        prefetch: micro-batches that each loader process prepares ahead.
        pin_memory: copy images to page-locked memory (needs a GPU).
    """
    builder = _TrainBuilder(samples, match)
    ahead = None
    if isinstance(samples.cache, ImageCache) and samples.cache.index.is_mirrored:
        ahead = ReadAhead(builder.images_of, samples.cache)
    return Loader(builder, keys, workers=workers, prefetch=prefetch, pin_memory=pin_memory, read_ahead=ahead)


class _TrainBuilder:
    """Makes the micro-batch of a key."""

    def __init__(self, samples: TrainSamples, match: Match) -> None:
        self.samples = samples
        self.match = match

    def __call__(self, key: MicroBatchKey) -> MicroBatch:
        shape_hw = self._shape_hw(key, key.size or self.samples.img)
        images, truths = self._rendered(key, shape_hw)
        # a rank without work in a step has no images
        labels = truths[0].of_images(truths) if truths else self.samples.no_labels
        keys = [(self.samples.seed, *sample) for sample in key.samples]
        targets = self.match(labels, len(key.samples), shape_hw, keys)
        unreadable, self.samples.unreadable = self.samples.unreadable, {}
        return MicroBatch(key.step, key.ordinal, images, labels, targets, unreadable)

    def images_of(self, key: MicroBatchKey) -> list[int]:
        return self.samples.images_of(key.samples, dict(key.class_ap))

    def _shape_hw(self, key: MicroBatchKey, size: int) -> tuple[int, int]:
        """Return height and width of the images, pixels, if their longer side is ``size``."""
        orders, class_ap = self.samples.orders, dict(key.class_ap)
        if not orders.is_rect:
            return size, size
        return orders.shape_hw([orders.image_of(e, at, class_ap.get(e)) for e, at in key.samples], size)

    def _rendered(self, key: MicroBatchKey, shape_hw: tuple[int, int]) -> tuple[Tensor, list[Shapes]]:
        """Return the images, and the labels of each."""
        images, pixels = image_buffer(len(key.samples), *shape_hw)
        labels, class_ap = [], dict(key.class_ap)
        sampled_hw = self._shape_hw(key, self.samples.img)
        for i, (epoch, position) in enumerate(key.samples):
            out = pixels[i] if shape_hw == sampled_hw else None
            image, truth = self.samples.sample(epoch, position, out, class_ap.get(epoch), sampled_hw)
            if out is None:
                cv2.resize(image, shape_hw[::-1], dst=pixels[i], interpolation=cv2.INTER_LINEAR)
            labels.append(truth)
        return images, labels
