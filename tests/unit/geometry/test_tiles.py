"""Tiles of large images: where they lie, and how their boxes become one list."""

import numpy as np
import pytest
import torch

from yolofleet.config.schema.verbs import PredictConfig
from yolofleet.data.geometry.boxes import Decoded
from yolofleet.data.geometry.tiles import check_tiles, merged_tiles, tiles
from yolofleet.families.build import build_model
from yolofleet.families.networks.description import describe
from yolofleet.inference.predict.predictor import Predictor
from yolofleet.support.errors import ConfigError


def test_tiles_cover_the_image_and_overlap():
    assert tiles(100, 100, 128, 0.2) == []
    # width 200, side 100, step 80: three tiles that begin at 0, 50 and 100
    assert [place[0] for place in tiles(100, 200, 100, 0.2)] == [0, 50, 100]
    for overlap in (0.0, 0.2, 0.5):
        covered = np.zeros((301, 517), int)
        for x1, y1, x2, y2 in tiles(301, 517, 96, overlap):
            assert (x2 - x1, y2 - y1) == (96, 96)
            covered[y1:y2, x1:x2] += 1
        assert covered.min() >= 1


def test_more_tiles_than_the_limit_are_an_error_that_names_the_image():
    check_tiles(100 * 32, 100 * 32, 32, 0.0, source="a.png")  # 10,000
    with pytest.raises(ConfigError, match="3200 x 3201 pixels into 10,100 tiles; the limit is 10,000"):
        check_tiles(3201, 3200, 32, 0.0, source="a.png")
    predictor = Predictor(Bright(), PredictConfig(img=64, device="cpu"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="into 11,236 tiles") as caught:
        predictor.predict(np.zeros((1700, 1700, 3), np.uint8), tile=32, overlap=0.5)
    assert caught.value.source == "image 0"


WHOLE, LEFT, RIGHT = (0, 0, 200, 100), (0, 0, 120, 100), (80, 0, 200, 100)


def part(place, *table):
    values = np.array(table, np.float32).reshape(-1, 6)
    return values[:, :4], values[:, 4], values[:, 5].astype(np.int64), place


@pytest.mark.parametrize("fuse", [False, True])
def test_a_box_that_a_border_cuts_gives_way_to_the_whole_one(fuse):
    parts = [
        part(WHOLE, (100, 10, 150, 60, 0.5, 0)),
        part(LEFT, (100, 10, 120, 60, 0.9, 0), (10, 10, 30, 30, 0.8, 1)),  # the first is cut at x = 120
        part(RIGHT, (20, 10, 70, 60, 0.6, 0)),
    ]
    boxes, scores, classes = merged_tiles(parts, iou=0.5, max_det=10, agnostic=False, fuse=fuse)
    assert classes.tolist() == [1, 0]
    assert boxes.round().tolist() == [[10, 10, 30, 30], [100, 10, 150, 60]]
    assert scores.tolist() == pytest.approx([0.8, 0.55 if fuse else 0.6])


def test_a_cut_box_without_a_whole_one_stays():
    parts = [part(WHOLE), part(LEFT, (100, 10, 120, 60, 0.9, 0)), part(RIGHT)]
    boxes, _, _ = merged_tiles(parts, iou=0.5, max_det=10, agnostic=False, fuse=False)
    assert boxes.tolist() == [[100, 10, 120, 60]]


class Bright(torch.nn.Module):
    """Finds the extent of what is bright, unless it is smaller than 6 pixels of its input."""

    task = "boxes"
    pads_to_square, needs_nms, names, strides, training, nc = False, True, ("spot",), (8, 16, 32), False, 1

    def forward(self, images):
        return images

    def decode(self, images):
        rows = []
        for picture in images[:, 0] > 0.7:
            y, x = (picture.any(axis).nonzero()[:, 0] for axis in (1, 0))
            if len(x) < 6:
                rows.append(torch.zeros(1, 6))
                continue
            x1, x2, y1, y2 = x.min(), x.max() + 1, y.min(), y.max() + 1
            rows.append(torch.tensor([[(x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1, 1.0, 0.9]]))
        return Decoded(torch.stack(rows))


def test_a_small_object_of_a_large_image_is_found_on_a_tile():
    picture = np.zeros((400, 600, 3), np.uint8)
    picture[301:321, 501:521] = 255  # 2 pixels at img 64
    predictor = Predictor(Bright(), PredictConfig(img=64, device="cpu"))  # type: ignore[arg-type]
    assert len(predictor.predict(picture)[0]) == 0
    (found,) = predictor.predict(picture, tile=128)
    assert len(found) == 1 and found.boxes_xyxy_px[0] == pytest.approx([501, 301, 521, 321], abs=3)


def test_a_call_with_tiles_is_refused_for_masks_as_the_command_is():
    """Boxes of tiles can be merged, and masks not."""
    model = build_model(describe("yolov5n-seg"), 2, seed=0)
    model.names = ("a", "b")
    predictor = Predictor(model, PredictConfig(img=64, device="cpu"))
    with pytest.raises(ConfigError, match="--tile"):
        predictor.predict(np.zeros((96, 96, 3), np.uint8), tile=64)
