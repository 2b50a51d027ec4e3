"""Shapes of validation images against YOLOv5 v7.0's rectangular loader (640 px, batch 16, half a stride of padding)."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conditioning import compare, perturbed
from reference import parity

from yolofleet.data.geometry.letterbox import letterbox
from yolofleet.inference.evaluate.batches import val_batches


@pytest.fixture(scope="module")
def recorded():
    return json.loads(parity("val_geometry/recorded.json").read_text())


def test_batches_of_the_original_are_as_large_as_the_largest_of_our_shapes(recorded):
    """Each of our images is padded by itself; the original pads a batch to what all of its images need."""
    sizes = np.array(recorded["shapes_wh"])
    index: Any = SimpleNamespace(sizes_wh=sizes)  # all that val_batches reads of a DataIndex
    batches = val_batches(index, recorded["img_size"], 1, recorded["stride"])
    shapes = np.empty_like(sizes)
    for batch in batches:
        shapes[list(batch.image_idx)] = batch.size_hw
    batch_of = np.array(recorded["batch_index"])
    largest = [shapes[batch_of == b].max(0).tolist() for b in range(len(recorded["batch_shapes_hw"]))]
    assert largest == recorded["batch_shapes_hw"]
    assert len(sizes) == len(recorded["files"]) == 254


def test_images_lie_in_the_batch_as_the_originals(recorded):
    for item in recorded["items"]:
        (height, width), ((ratio, _), (pad_left, pad_top)) = item["shapes"]
        _, out_h, out_w = item["img_chw"]
        out, box = letterbox(np.zeros((height, width, 3), np.uint8), (out_h, out_w), enlarge=False)
        assert out.shape == (out_h, out_w, 3)
        assert (box.scale_xy, box.pad_left, box.pad_top) == ((ratio, ratio), pad_left // 1, pad_top // 1)


def corners_of(boxes_cxcywh):
    middle, half = boxes_cxcywh[:, :2], boxes_cxcywh[:, 2:] / 2
    return np.concatenate([middle - half, middle + half], 1)


def test_labels_in_the_batch_lead_back_to_those_of_the_image(recorded):
    """The original's letterboxed labels, through our way back, are the labels of one image of that size."""
    with np.load(parity("anchors/labels.npz")) as sets:
        sizes, labels = sets["coco128.shapes_wh"], sets["coco128.labels_flat"]
    for item in recorded["items"]:
        (height, width), (_, (pad_left, pad_top)) = item["shapes"]
        _, out_h, out_w = item["img_chw"]
        _, box = letterbox(np.zeros((height, width, 3), np.uint8), (out_h, out_w), enlarge=False)
        box = replace(box, pad_left=pad_left, pad_top=pad_top)  # the original's may end in .5
        given = np.array(item["labels"])  # [n, 6] image, class, cx, cy, w, h of the batch's shape
        native = box.to_native(corners_of(perturbed(given[:, 2:])) * [out_w, out_h, out_w, out_h])
        native /= [width, height, width, height]
        distances = []
        for image in np.flatnonzero((sizes == [width, height]).all(1)):
            rows = labels[labels[:, 0] == image]
            if len(rows) == len(given):  # in another order
                apart = np.abs(corners_of(rows[:, 2:]).clip(0, 1)[:, None] - native).max(2)
                apart[rows[:, 1, None] != given[:, 1]] = np.inf
                distances.append(apart.min(0).max())
        assert len(given) == item["labels_n"]
        compare(min(distances), 0, atol=1e-5, name=item["file"])
