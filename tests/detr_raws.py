"""Random raw predictions of RT-DETR and D-FINE, as their losses read them, and labels for them."""

from __future__ import annotations

import numpy as np
import torch
from label_rows import shapes_of
from torch import Tensor

from yolofleet.data.geometry.shapes import Shapes
from yolofleet.families.rtdetr.raws import DfineTrainingRaws, RtdetrTrainingRaws, TrainingRaws

CLASSES, QUERIES, LAYERS, BINS = 5, 20, 3, 33
REG_SCALE = 4.0


def labels(*counts: int, seed: int = 0) -> Shapes:
    """Labels of images that have so many."""
    rng = np.random.default_rng(seed)
    image = np.repeat(np.arange(len(counts)), counts)
    boxes = np.concatenate(
        [rng.uniform(0.3, 0.7, (len(image), 2)), rng.uniform(0.1, 0.4, (len(image), 2))], 1
    )
    return shapes_of(np.column_stack([image, rng.integers(0, CLASSES, len(image)), boxes]))


def raws(images: int, noisy: int, *, dfine: bool, seed: int = 0) -> TrainingRaws:
    """Raw predictions of a training pass with ``noisy`` denoising queries, which need gradients.

    Each image's are drawn by themselves, so that an image has the same in every company.
    """
    drawn = [_of_image(noisy, dfine, np.random.default_rng((seed, image))) for image in range(images)]
    parts = [np.stack(part) for part in zip(*drawn, strict=True)] if drawn else _of_none(dfine)
    kind = DfineTrainingRaws if dfine else RtdetrTrainingRaws
    return kind(*(torch.from_numpy(part).requires_grad_() for part in parts))


def _of_image(noisy: int, dfine: bool, rng: np.random.Generator) -> list[np.ndarray]:
    outputs = LAYERS + dfine

    def boxes(*shape: int) -> np.ndarray:
        return np.concatenate([rng.uniform(0.25, 0.75, (*shape, 2)), rng.uniform(0.15, 0.5, (*shape, 2))], -1)

    def values(*shape: int) -> np.ndarray:
        return rng.normal(size=shape)

    made = [
        boxes(outputs, QUERIES),
        values(outputs, QUERIES, CLASSES),
        boxes(QUERIES),
        values(QUERIES, CLASSES),
    ]
    made = [made[0][-1], made[1][-1], np.full(4, 640.0), *made]
    made += [boxes(outputs, noisy), values(outputs, noisy, CLASSES)]
    for queries in (QUERIES, noisy) if dfine else ():
        made += [values(LAYERS, queries, 4 * BINS), boxes(LAYERS, queries)]
    return [part.astype(np.float32) for part in made]


def _of_none(dfine: bool) -> list[np.ndarray]:
    return [part[None][:0] for part in _of_image(0, dfine, np.random.default_rng(0))]


def of_images(parts: TrainingRaws, first: int, last: int, noisy: int) -> TrainingRaws:
    """The raw predictions of some images, whose denoising queries end at ``noisy``."""
    picked = {name: part.detach()[first:last] for name, part in parts._asdict().items()}
    picked |= {name: part[:, :, :noisy] for name, part in picked.items() if name.startswith("noisy")}
    return type(parts)(**{name: part.clone().requires_grad_() for name, part in picked.items()})


def bins() -> Tensor:
    """Values of the distribution: symmetric, denser at 0."""
    half = torch.linspace(0, 1, BINS // 2 + 1) ** 2 * 4
    return torch.cat([-half[1:].flip(0), half])
