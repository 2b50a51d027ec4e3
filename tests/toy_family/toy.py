"""A model family in one file: a set of boxes without suppression. --recipe-class toy.py:Toy --model toy-n

N images, Q predictions of an image, G labels of the image that has most, C classes, W channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from yolofleet import TrainingRecipe
from yolofleet.config.schema import Recipe, setting
from yolofleet.data.geometry.boxes import Decoded
from yolofleet.families.family import Family
from yolofleet.families.networks.blocks import Conv
from yolofleet.families.networks.checked import Checker
from yolofleet.families.networks.detector import Detector
from yolofleet.support.random_numbers import generator

QUERIES, NOISE, SIZES = 8, 0.1, {"toy-n": 16, "toy-s": 32}


class ToyHyperparameters(Recipe):
    toy_gain: float = setting(1.0, "gain of the distance of boxes with noise", ge=0)


@dataclass(frozen=True)
class ToyDescription:
    name: str
    width: int
    family = "toy"

    def to_dict(self) -> dict[str, Any]:
        return {"family": self.family, "name": self.name, "width": self.width}

    @classmethod
    def from_dict(cls, values: Any, *, source: str = "model description") -> ToyDescription:
        check = Checker(source)
        check.keys(values, ("family", "name", "width"))
        return cls(check.name(values["name"]), int(check.number("width", values["width"], 1, 1024)))


class ToyNetwork(Detector):
    """Raw predictions: boxes cx, cy, w, h in 0..1 [N, Q, 4]; class logits [N, Q, C]; sides of the images, pixels [N, 4].

    In training it gets boxes of labels with noise, and also returns them without it [N, G, 4].
    """

    strides, backbone_groups, pads_to_square, needs_nms, reads_targets = (16,), 1, True, False, True

    def __init__(self, description: ToyDescription, nc: int) -> None:
        super().__init__(description, nc)
        width = description.width
        self.backbone = nn.Sequential(*(Conv(3 if i == 0 else width, width, 3, 2) for i in range(4)))
        self.boxes, self.classes = nn.Linear(width, QUERIES * 4), nn.Linear(width, QUERIES * nc)
        self.denoise = nn.Linear(width + 4, 4)

    def forward(self, images, targets=None):
        seen = self.backbone(images).mean((2, 3))  # [N, W]
        height, width = images.shape[2:]
        sides = torch.tensor([width, height] * 2, device=images.device).expand(len(images), 4)
        boxes, logits = (layer(seen).unflatten(1, (QUERIES, -1)) for layer in (self.boxes, self.classes))
        raws = [boxes.sigmoid(), logits, sides]
        if targets is not None:
            noisy = torch.from_numpy(targets.noisy).to(seen)  # [N, G, 4]
            seen = seen[:, None].expand(-1, noisy.shape[1], -1)  # [N, G, W]
            raws.append(self.denoise(torch.cat([seen, noisy], 2)))
        return raws

    def decode(self, raws):
        boxes, scores = raws[0].float() * raws[2][:, None], raws[1].float().sigmoid()
        return Decoded.of(boxes, scores)

    @torch.no_grad()
    def initialise(self, generator):
        self.draw_weights(generator)
        for layer in (self.boxes, self.classes, self.denoise):
            layer.weight.normal_(0, 0.1, generator=generator)
            layer.bias.normal_(0, 1, generator=generator)

    def freeze_groups(self):
        return ["backbone.", "boxes.", "classes.", "denoise."]


@dataclass(frozen=True)
class Targets:
    boxes: np.ndarray  # [N, G, 4] cx, cy, w, h in 0..1
    noisy: np.ndarray  # [N, G, 4]
    classes: np.ndarray  # [N, G]; -1 where an image has fewer labels
    counts: np.ndarray  # int64 [3]


class ToyLoss:
    terms, times_images, predicted_divisor = ("cls", "box", "denoise"), False, False

    def __init__(self, recipe):
        self.gains = torch.tensor([1.0, 5.0, recipe.toy_gain])

    def at(self, progress):
        return self

    def match(self, labels, images, size_hw, keys=()):
        of_image = [labels.rows(labels.image == i) for i in range(images)]
        most = max(1, *map(len, of_image))
        boxes, noise = np.zeros((2, images, most, 4), np.float32)
        classes = np.full((images, most), -1)
        for i, mine in enumerate(of_image):
            boxes[i, : len(mine)], classes[i, : len(mine)] = mine.boxes, mine.classes
            seed, epoch, position = keys[i] if keys else (0, 0, i)
            numbers = generator(seed, "denoise", epoch, position)
            noise[i, : len(mine)] = numbers.random((len(mine), 4)) * NOISE
        return Targets(boxes, boxes + noise, classes, np.full(3, len(labels), np.int64))

    def sums(self, raws, targets):
        boxes, logits = raws[0].float(), raws[1].float()
        wanted = torch.from_numpy(targets.boxes).to(boxes.device)
        classes = torch.from_numpy(targets.classes).to(boxes.device)
        image, query, label = matched(boxes, logits, wanted, classes)
        one_hot = torch.zeros_like(logits)
        one_hot[image, query, classes[image, label]] = 1
        cls = F.binary_cross_entropy_with_logits(logits, one_hot, reduction="sum")
        box = (boxes[image, query] - wanted[image, label]).abs().sum()
        denoised = raws[3].float() if len(raws) > 3 else wanted  # a validation has no noise
        denoise = ((denoised - wanted).abs() * (classes >= 0)[..., None]).sum()
        return torch.stack([cls, box, denoise])


@torch.no_grad()
def matched(boxes, logits, wanted, classes):
    """Return image, prediction and label of pairs, each prediction and each label once: the cheapest first."""
    named = classes.clamp(min=0)[:, None].expand(-1, boxes.shape[1], -1)
    chance = logits.sigmoid().gather(2, named)  # [N, Q, G]
    costs = (boxes[:, :, None] - wanted[:, None]).abs().sum(-1) - chance
    costs = costs.masked_fill((classes < 0)[:, None], np.inf).cpu().numpy()
    pairs = []
    for i, cost in enumerate(costs):
        while np.isfinite(cost).any():
            query, label = np.unravel_index(np.argmin(cost), cost.shape)
            pairs.append((i, query, label))
            cost[query], cost[:, label] = np.inf, np.inf
    return torch.tensor(pairs, dtype=torch.int64, device=boxes.device).reshape(-1, 3).unbind(1)


class Toy(TrainingRecipe):
    family = Family(
        name="toy",
        from_dict=ToyDescription.from_dict,
        network=ToyNetwork,
        loss=lambda model, recipe, img: ToyLoss(recipe),
        hyperparameters=ToyHyperparameters,
        preset_names=lambda: list(SIZES),
        preset=lambda name: ToyDescription(name, SIZES[name]),
    )
