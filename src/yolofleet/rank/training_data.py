"""The augmented images of a run from its settings, for the training and for ``yolofleet data preview``."""

from __future__ import annotations

from pathlib import Path

import torch

from yolofleet.config.schema import Recipe, TrainConfig
from yolofleet.datasets.index import DataIndex
from yolofleet.errors import DataError
from yolofleet.input.cache import ImageCache
from yolofleet.input.order import RectOrders, build_orders, fraction_of
from yolofleet.input.sample import Images, MicroBatchKey, TrainSamples, train_loader
from yolofleet.report.draw import Picture
from yolofleet.report.plots import plot_pictures, training_pictures

STRIDE = 32  # stride that a preview assumes; the built-in networks for 640 px have it


def used_part(index: DataIndex, config: TrainConfig) -> DataIndex:
    """Return the index of the images that ``--fraction`` keeps.

    Raises:
        DataError: none of them has a label.
    """
    if config.fraction == 1:
        return index
    part = index.part(fraction_of(len(index), config.fraction, config.seed))
    if not len(part.classes):
        raise DataError(
            f"--fraction {config.fraction:g} leaves {len(part)} training images, none with a label",
            hint="a larger --fraction, or another --seed",
        )
    return part


def training_samples(
    config: TrainConfig, recipe: Recipe, index: DataIndex, cache: Images, *, img: int, stride: int
) -> TrainSamples:
    """Return the augmented images of a run.

    Args:
        config: with the micro-batch of the run.
        img: training size in pixels, a multiple of ``stride``.
    Raises:
        ConfigError: albumentations is not usable.
    """
    orders = build_orders(index, config.seed, config.sampler, recipe.repeat_threshold)
    if config.rect:
        orders = RectOrders(orders, index, config.step_shape.micro_batch, stride)
    return TrainSamples(index, cache, recipe, img=img, seed=config.seed, epochs=config.epochs, orders=orders)


def write_preview(
    config: TrainConfig, recipe: Recipe, index: DataIndex, out: Path, *, count: int, epoch: int
) -> None:
    """Write a sheet of the first ``count`` training images of an epoch with their boxes, as JPEG or PNG by the suffix.

    Args:
        epoch: from 1.
    Raises:
        YolofleetError: an image cannot be read, or the file cannot be written.
    """
    index, img = used_part(index, config), -(-config.img // STRIDE) * STRIDE
    cache = ImageCache(index, img, "none", quick=True)
    samples = training_samples(config, recipe, index, cache, img=img, stride=STRIDE)
    together, images = config.step_shape.micro_batch, len(index)
    first = -(-(epoch - 1) * images // together) * together  # micro-batches begin at multiples of their size
    positions = [divmod(at, images) for at in range(first, first + count)]
    keys = [MicroBatchKey(0, 0, tuple(positions[at : at + together])) for at in range(0, count, together)]
    pictures: list[Picture] = []
    with train_loader(samples, keys, lambda *_: None, workers=0) as loader:
        for key, batch in zip(keys, loader, strict=True):
            names = [Path(index.path(samples.orders.image_of(*at))).name for at in key.samples]
            shown = batch.images_on(torch.device("cpu"))
            pictures += training_pictures(shown, batch.labels, names, most=together)
    plot_pictures(pictures, index.names, out, most=count)
