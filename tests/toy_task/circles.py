"""A task in one file, circles for boxes: --recipe-class circles.py:Circular --model circles-n. A label is the largest in its box.

N images, Q predictions of an image, C classes, W channels, n labels, M matches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from yolofleet import TrainingRecipe
from yolofleet.data.geometry.shapes import Shapes
from yolofleet.families.family import Family
from yolofleet.families.networks.blocks import Conv
from yolofleet.families.networks.detector import Detector
from yolofleet.tasks.task import Difference, Found, Metrics, Task

QUERIES, WIDTH = 8, 16


@dataclass(frozen=True)
class Circles(Shapes):
    """Labels with float32 ``radii`` [n] as fractions of the width of the image."""

    radii: np.ndarray

    def mapped(self, places, view, look):
        scaled = self.radii * places[:, 0] * view.scale / view.shown_hw[1]
        return super(Circles, replace(self, radii=scaled.astype(np.float32))).mapped(places, view, look)

    def letterboxed(self, size_wh, back):
        scaled = self.radii * size_wh[0] * back.scale_xy[0] / back.size_hw[1]
        return super(Circles, replace(self, radii=scaled.astype(np.float32))).letterboxed(size_wh, back)

    def circles(self, width: float, height: float) -> np.ndarray:
        return np.column_stack([self.boxes[:, :2] * [width, height], self.radii * width]).astype(np.float32)


class Decoded(NamedTuple):
    circles: Tensor  # [N, Q, 3] cx, cy, radius in pixels of the input
    scores: Tensor  # [N, Q, C]


@dataclass(frozen=True)
class FoundCircles(Found):
    circles: np.ndarray  # [n, 3] pixels

    def native(self, back):
        return replace(self, circles=(self.circles - [back.pad_left, back.pad_top, 0]) / back.scale_xy[0])


class CircleTask(Task):
    name, decoded = "circles", Decoded
    nothing = FoundCircles(np.zeros(0, int), np.zeros(0, int), np.zeros(0, np.float32), np.zeros((0, 3)))
    columns, of_class = {"metrics/overlap": "overlap"}, {"overlap": "overlap"}
    fitness_of = {"overlap": 1.0}

    def labels(self, index, image):
        found, (width, height) = index.labels(image), index.sizes_wh[image]
        radii = np.minimum(found.boxes[:, 2] * width, found.boxes[:, 3] * height) / 2 / width
        return Circles(found.image, found.classes, found.boxes, radii.astype(np.float32))

    def made_up(self, objects):
        return Circles(radii=np.full(objects, 0.25, np.float32), **vars(super().made_up(objects)))

    def found(self, decoded, limits):
        best, classes = (part.cpu().numpy() for part in decoded.scores.max(2))
        order = np.argsort(-best, axis=1, kind="stable")[:, : limits.max_det]
        kept = [rows[score[rows] > limits.conf] for rows, score in zip(order, best, strict=True)]
        circles = decoded.circles.cpu().numpy()
        return [FoundCircles(0 * k, classes[i, k], best[i, k], circles[i, k]) for i, k in enumerate(kept)], 0

    def judged(self, index, images, results, classes):
        """The overlap of each label with the best circle of its class: 1 - distance / sum of the radii, or 0."""
        rows = []
        for image in images.tolist():
            labels, mine = self.labels(index, image), results.rows(results.image == image)
            for label, c in zip(labels.circles(*index.sizes_wh[image]), labels.classes, strict=True):
                of_class = mine.circles[mine.classes == c]
                away = np.hypot(*(of_class[:, :2] - label[:2]).T) / (of_class[:, 2] + label[2])
                rows.append((image, c, max(0.0, 1 - away.min(initial=1.0))))
        return {"overlaps": np.array(rows, np.float64).reshape(-1, 3)}

    def metrics(self, parts, names):
        overlaps = np.concatenate([part["overlaps"] for part in parts])
        image, class_idx, value = overlaps[np.argsort(overlaps[:, 0], kind="stable")].T
        of_class = {}
        for number, name in enumerate(names):
            mine, images = value[class_idx == number], np.unique(image[class_idx == number])
            overlap = float(mine.mean()) if len(mine) else -1.0
            of_class[name] = {"overlap": overlap, "images": len(images), "labels": len(mine)}
        return Metrics({"overlap": float(value.mean()) if len(value) else -1.0}, of_class)

    def difference(self, ours, theirs, size_hw, *, in_order):
        place, score = (float((mine - other).abs().max()) for mine, other in zip(ours, theirs, strict=True))
        return Difference(place, score, len(ours.scores) * QUERIES)

    def draw(self, image, found, names, **style):
        drawn = image.copy()
        for x, y, radius in found.circles.round().astype(int).tolist():
            cv2.circle(drawn, (x, y), max(radius, 1), (0, 0, 255), 1)
        return drawn

    def to_json(self, found, names):
        rows = zip(found.classes.tolist(), found.scores.tolist(), found.circles.tolist(), strict=True)
        return [{"class": c, "name": names[c], "score": s, "circle_px": circle} for c, s, circle in rows]


@dataclass(frozen=True)
class CircleDescription:
    name: str = "circles-n"
    family = "circles"

    def to_dict(self) -> dict[str, Any]:
        return {"family": self.family, "name": self.name}

    @classmethod
    def from_dict(cls, values: Any, *, source: str = "") -> CircleDescription:
        return cls()


class CircleNetwork(Detector):
    """Raw predictions: circles in fractions of sides [N, Q, 3], class logits [N, Q, C], sides in pixels [N, 3]."""

    task, strides, backbone_groups, pads_to_square, needs_nms = "circles", (16,), 1, True, False

    def __init__(self, description: CircleDescription, nc: int) -> None:
        super().__init__(description, nc)
        self.backbone = nn.Sequential(*(Conv(3 if i == 0 else WIDTH, WIDTH, 3, 2) for i in range(4)))
        self.circles, self.classes = nn.Linear(WIDTH, QUERIES * 3), nn.Linear(WIDTH, QUERIES * nc)

    def forward(self, images):
        seen = self.backbone(images).mean((2, 3))  # [N, W]
        height, width = images.shape[2:]
        sides = torch.tensor([width, height, width], device=images.device).expand(len(images), 3)
        circles, logits = (layer(seen).unflatten(1, (QUERIES, -1)) for layer in (self.circles, self.classes))
        return [circles.sigmoid(), logits, sides]

    def decode(self, raws):
        return Decoded(raws[0].float() * raws[2][:, None], raws[1].float().sigmoid())

    @torch.no_grad()
    def initialise(self, generator):
        self.draw_weights(generator)
        self.circles.bias.normal_(0, 1, generator=generator)

    def freeze_groups(self):
        return ["backbone.", "circles.", "classes."]


class CircleLoss:
    """Label k of an image belongs to prediction k: enough for a test."""

    terms, times_images, predicted_divisor = ("cls", "circle"), False, False
    gains = torch.tensor([1.0, 5.0])

    def at(self, progress):
        return self

    def match(self, labels, images, size_hw, keys=()):
        query = np.concatenate(
            [np.arange(n) for n in np.bincount(labels.image, minlength=images)] or [np.zeros(0)]
        )
        few = query < QUERIES
        columns = labels.image, query.astype(int), labels.classes, labels.circles(1, 1)
        return Targets(*(column[few] for column in columns))

    def sums(self, raws, targets):
        circles, logits = raws[0].float(), raws[1].float()
        wanted = torch.zeros_like(logits)
        wanted[targets.image, targets.query, targets.classes] = 1
        away = (circles[targets.image, targets.query] - torch.from_numpy(targets.circles)).abs().sum()
        return torch.stack([F.binary_cross_entropy_with_logits(logits, wanted, reduction="sum"), away])


@dataclass(frozen=True)
class Targets:
    image: np.ndarray  # int64 [M], as the next two
    query: np.ndarray
    classes: np.ndarray
    circles: np.ndarray  # float32 [M, 3]
    counts = property(lambda self: np.full(2, len(self.image), np.int64))


class Circular(TrainingRecipe):
    family = Family(
        name="circles",
        task=CircleTask(),
        from_dict=CircleDescription.from_dict,
        network=CircleNetwork,
        loss=lambda model, recipe, img: CircleLoss(),
        preset_names=lambda: ["circles-n"],
        preset=lambda name: CircleDescription(name),
    )
