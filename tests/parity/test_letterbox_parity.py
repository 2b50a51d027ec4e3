"""Letterboxing against numbers and pixels of YOLOv5 v7.0."""

import json

import numpy as np
import pytest
from conditioning import compare, perturbed
from reference import parity

from yolofleet.data.geometry.letterbox import Letterbox, letterbox
from yolofleet.inference.export.exporter import size_of

CASES = json.loads(parity("letterbox/cases.json").read_text())


def test_shapes_ratios_and_borders_are_the_originals():
    for case in CASES["letterbox"]:
        options = case["kw"]
        size = options["new_shape"] if isinstance(options["new_shape"], int) else tuple(options["new_shape"])
        out, box = letterbox(
            np.zeros((*case["in_hw"], 3), np.uint8),
            size,
            stride=options.get("stride", 32) if options["auto"] else None,
            enlarge=options.get("scaleup", True),
        )
        filled = np.argwhere(out[..., 0] == 0)
        top, left = filled.min(0)
        bottom, right = np.array(out.shape[:2]) - 1 - filled.max(0)
        assert list(out.shape[:2]) == case["out_hw"] == list(box.size_hw), case
        # the original has one ratio for both sides, and borders that end in .5, although the image has whole pixels
        (out_h, out_w), (height, width) = case["out_hw"], case["in_hw"]
        assert box.scale_xy == ((out_w - left - right) / width, (out_h - top - bottom) / height), case
        assert [box.pad_left, box.pad_top] == np.floor(case["pad_dw_dh"]).tolist() == [left, top], case
        assert (top, bottom, left, right) == tuple(case[s] for s in ("top", "bottom", "left", "right")), case


def test_sizes_are_rounded_up_to_the_stride_as_the_originals():
    for side, stride, rounded in CASES["check_img_size"]:
        assert size_of([side], stride) == (rounded, rounded)


@pytest.mark.parametrize(("number", "enlarge"), [(0, True), (1, True), (2, False)])
def test_pixels_are_the_originals(number, enlarge):
    pixels = np.load(parity("letterbox/pixels.npz"))
    out, _ = letterbox(pixels[f"in{number}"], 64, enlarge=enlarge)
    compare(out, pixels[f"out{number}"])


def test_boxes_go_back_as_the_originals():
    for case in CASES["scale_boxes"]:
        (out_h, out_w), (height, width) = case["model_hw"], case["image_hw"]
        if case["ratio_pad"]:
            (ratio, _), (pad_left, pad_top) = case["ratio_pad"]
        else:  # the original infers them from the two shapes
            ratio = min(out_h / height, out_w / width)
            pad_left, pad_top = (out_w - width * ratio) / 2, (out_h - height * ratio) / 2
        box = Letterbox((ratio, ratio), pad_left, pad_top, (out_h, out_w), (height, width))
        native = box.to_native(perturbed(np.array(case["boxes_in"], np.float32)))
        compare(native, case["boxes_out"], atol=2e-3)  # px, of up to 640
