import numpy as np
import pytest
import torch

from yolofleet.data.geometry.letterbox import GREY, letterbox


def test_an_image_that_fits_comes_back_itself():
    image = np.zeros((64, 64, 3), np.uint8)
    out, box = letterbox(image, 64)
    assert out is image
    assert (box.scale_xy, box.pad_left, box.pad_top) == ((1.0, 1.0), 0.0, 0.0)


def test_odd_padding_puts_the_spare_pixel_below():
    # 5 high in 8: 3 rows are missing, 1 above and 2 below
    out, box = letterbox(np.zeros((5, 8, 3), np.uint8), 8)
    assert (out[:1] == GREY).all() and (out[1:6] == 0).all() and (out[6:] == GREY).all()
    assert box.pad_top == 1


def test_boxes_go_back_to_the_native_image_of_a_resized_copy():
    # native 400 x 200 was read at half size (200 x 100) and is padded to 200 x 120: ratio 1/2, 10 rows above
    _, box = letterbox(np.zeros((100, 200, 3), np.uint8), (120, 200), enlarge=False, native_hw=(200, 400))
    expected = np.array([[20, 0, 400, 80]], np.float32)  # (10, 0, 210, 50): clipped above and on the right
    given = np.array([[10, 0, 210, 50]], np.float32)
    np.testing.assert_array_equal(box.to_native(given), expected)
    np.testing.assert_array_equal(box.to_native(torch.from_numpy(given)).numpy(), expected)
    np.testing.assert_array_equal(given, [[10, 0, 210, 50]])


@pytest.mark.parametrize(("native_hw", "cached_hw"), [((643, 960), (172, 256)), ((960, 643), (256, 172))])
def test_the_edges_of_an_image_go_back_to_its_edges(native_hw, cached_hw):
    """A cached image and a resized one have whole pixels: 643 x 960 px in 256 are 171.5 x 256."""
    height, width = native_hw
    whole = np.array([[0, 0, width, height]], np.float64)
    for read, native in ((cached_hw, native_hw), (native_hw, None)):
        out, box = letterbox(np.zeros((*read, 3), np.uint8), 256, stride=32, native_hw=native)
        filled = np.argwhere(out[..., 0] == 0)
        (top, left), (bottom, right) = filled.min(0), filled.max(0) + 1
        found = box.to_native(np.array([[left, top, right, bottom]], np.float64))
        np.testing.assert_allclose(found, whole, atol=1e-9)


def test_a_very_thin_image_keeps_one_pixel():
    out, _ = letterbox(np.zeros((1, 4000, 3), np.uint8), 64, stride=32)
    assert out.shape == (32, 64, 3)
