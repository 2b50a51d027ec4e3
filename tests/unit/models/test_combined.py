"""Several networks and views as one network, with stand-ins whose answers are known."""

from typing import Any, cast

import pytest
import torch

from yolofleet.data.geometry.boxes import Decoded
from yolofleet.data.geometry.nms import detections
from yolofleet.families.networks.combined import CombinedNetwork, View, _seen, _without_level
from yolofleet.support.errors import ConfigError


class Corner:
    """Finds the brightest pixel: a box of 8 pixels around its centre, once per cell of each level."""

    strides, training, pads_to_square, anchors_px, needs_nms = (8, 16, 32), False, False, None, True
    assumed: dict[str, str] = {}
    task = "boxes"

    def __init__(self, names=("a", "b"), score=0.9):
        self.names, self.nc, self.score = names, len(names), score
        self.shapes = []

    def __call__(self, images):
        self.shapes.append(tuple(images.shape[2:]))
        return images

    def decode(self, images):
        n, _, h, w = images.shape
        places = images.sum(1).flatten(1).argmax(1)
        rows = torch.zeros(n, h * w * 21 // 1024, 5 + self.nc)
        rows[..., 0] = (places % w + 0.5)[:, None]
        rows[..., 1] = (places // w + 0.5)[:, None]
        rows[..., 2:4] = 8
        rows[..., 4], rows[..., 5] = 1, self.score
        return Decoded(rows)


def image(x, y, size_hw=(64, 96)):
    images = torch.zeros(1, 3, *size_hw)
    images[..., y - 2 : y + 3, x - 2 : x + 3] = torch.linspace(0.1, 0.5, 5)  # brightest at its right
    images[..., y, x] = 1
    return images


def test_boxes_of_every_view_come_back_to_the_image():
    network = Corner()
    combined = CombinedNetwork([network], augment=True, merge="wbf")  # type: ignore[list-item]
    views = combined.decode(combined(image(70, 20)))
    # 0.83: 53 x 79 -> 64 x 96; 0.67: 42 x 64 -> 64 x 64
    assert network.shapes == [(64, 96), (64, 96), (64, 64)]
    assert len(views) == 3
    for boxes in views:
        x, y, w, _ = boxes.boxes[0, 0].tolist()
        assert x == pytest.approx(70.5, abs=1.5) and y == pytest.approx(20.5, abs=1.5)
        assert w == pytest.approx(8, abs=5)


def test_levels_that_another_view_sees_better_are_left_out():
    rows = torch.arange(21.0).view(1, 21, 1)  # 16, 4 and 1 cells of strides 8, 16 and 32
    assert _without_level(rows, (8, 16, 32), 32).flatten().tolist() == list(range(20))
    assert _without_level(rows, (32, 16, 8), 32).flatten().tolist() == list(range(1, 21))
    combined = CombinedNetwork([Corner()], augment=True)  # type: ignore[list-item]
    joined = cast(Decoded, combined.decode(combined(image(70, 20)))).rows
    # 6 cells of stride 32, and 64 of stride 8 in the last view
    assert joined.shape[1] == (126 - 6) + 126 + (84 - 64)


def test_a_view_is_mirrored_made_smaller_and_padded_with_grey():
    seen = _seen(torch.zeros(1, 3, 64, 96), View(0.5, flip=True), 32)
    assert seen.shape == (1, 3, 32, 64)
    assert seen[0, 0, 0, 47] == 0 and seen[0, 0, 0, 48] == pytest.approx(114 / 255)


def test_an_ensemble_joins_averages_or_fuses():
    two = [Corner(score=0.9), Corner(score=0.5)]
    images = image(40, 30)
    settings: dict[str, Any] = {"conf": 0.1, "iou": 0.5, "max_det": 10, "multi_label": False}
    scores = {}
    for merge in ("nms", "mean", "wbf"):
        combined = CombinedNetwork(two, merge=merge)  # type: ignore[arg-type]
        (boxes,), _ = detections(combined.decode(combined(images)), **settings)
        assert len(boxes) == 1 and boxes[0, :4].tolist() == [36.5, 26.5, 44.5, 34.5]
        scores[merge] = float(boxes[0, 4])
    assert scores == pytest.approx({"nms": 0.9, "mean": 0.7, "wbf": 0.7})


def test_a_box_of_one_of_two_networks_has_half_its_score_after_fusion():
    combined = CombinedNetwork([Corner(score=0.8), Corner(score=0.05)], merge="wbf")  # type: ignore[list-item]
    decoded = combined.decode(combined(image(40, 30)))
    (boxes,), _ = detections(decoded, conf=0.1, iou=0.5, max_det=10, multi_label=False)
    assert boxes[:, 4].tolist() == pytest.approx([0.4])


def test_networks_of_other_classes_or_for_a_mean_of_another_shape_are_refused():
    with pytest.raises(ConfigError, match=r"number 2 has 3"):
        CombinedNetwork([Corner(), Corner(("a", "b", "c"))])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="2 with other names"):
        CombinedNetwork([Corner(), Corner(("a", "c"))])  # type: ignore[list-item]
    assert CombinedNetwork([Corner(("0", "1")), Corner()]).names == ("a", "b")  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="number 1 has 3"):
        CombinedNetwork([Corner(("0", "1", "2")), Corner()])  # type: ignore[list-item]
    other = Corner()
    other.strides = (16, 32)  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="--merge mean"):
        CombinedNetwork([Corner(), other], merge="mean")  # type: ignore[list-item]
    sets = [Corner(), Corner()]
    for one in sets:
        one.needs_nms = False  # prediction k of one network has nothing to do with prediction k of another
    assert CombinedNetwork(sets).needs_nms  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="predictions that belong to no cell"):
        CombinedNetwork(sets, merge="mean")  # type: ignore[arg-type]
