import numpy as np
import pytest
import torch

from yolofleet.data.geometry.boxes import clip_xyxy, cxcywh_from_xyxy, xyxy_from_cxcywh

# centre (5, 4), 4 wide, 2 high
CXCYWH, XYXY = [[5.0, 4.0, 4.0, 2.0]], [[3.0, 3.0, 7.0, 5.0]]


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_formats_convert_both_ways(make):
    assert xyxy_from_cxcywh(make(CXCYWH)).tolist() == XYXY
    assert cxcywh_from_xyxy(make(XYXY)).tolist() == CXCYWH


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_clipping_keeps_corners_in_the_image_and_the_input_as_it_was(make):
    given = make([[-1.0, 2.0, 9.0, 12.0]])
    assert clip_xyxy(given, (10, 8)).tolist() == [[0.0, 2.0, 8.0, 10.0]]
    assert given.tolist() == [[-1.0, 2.0, 9.0, 12.0]]


@pytest.mark.parametrize("none", [np.zeros((0, 4), np.float32), torch.zeros(0, 4)], ids=["array", "tensor"])
def test_no_boxes_are_no_boxes(none):
    assert (
        xyxy_from_cxcywh(none).shape
        == cxcywh_from_xyxy(none).shape
        == clip_xyxy(none, (4, 4)).shape
        == (0, 4)
    )
