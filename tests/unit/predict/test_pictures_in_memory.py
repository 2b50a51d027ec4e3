"""A picture gives the same pixels and boxes in every form: a file, bytes, a file object, PIL, numpy and torch."""

import io
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from small_data import picture
from small_weights import untrained

from yolofleet.config.schema.verbs import PredictConfig
from yolofleet.data.images.decode import read_image
from yolofleet.inference.predict.pictures import pixels_of
from yolofleet.inference.predict.predictor import Predictor
from yolofleet.support.errors import DataError

BGR = picture(64, 48)
GREY = cv2.cvtColor(BGR, cv2.COLOR_BGR2GRAY)
DEEP = GREY.astype(np.uint16) * 256 + 77
ALPHA = np.dstack([BGR, np.full((48, 64), 9, np.uint8)])
WAYS = ("path", "bytes", "bytearray", "file", "unwound", "pil", "numpy", "tensor", "batch")
STORED = {  # kind -> suffix, pixels as OpenCV writes them
    "colour": (".png", BGR),
    "grey": (".png", GREY),
    "16 bits": (".png", DEEP),
    "16 bits, tiff": (".tif", DEEP),
    "16 bits, colour": (".tif", np.dstack([DEEP] * 3)),
    "alpha": (".png", ALPHA),
    "jpeg": (".jpg", BGR),
    "webp": (".webp", BGR),
    "bmp": (".bmp", BGR),
}


def stored_by_pil(pil, kind):
    """Bytes of a file that OpenCV cannot write."""
    rgb, out = pil.Image.fromarray(np.ascontiguousarray(BGR[..., ::-1])), io.BytesIO()
    if kind.startswith("turned"):
        _, form, orientation = kind.split()
        exif = pil.Image.Exif()
        exif[0x0112] = int(orientation)
        rgb.save(out, form, exif=exif)
    else:
        mode, form = kind.split()
        rgb.convert(mode).save(out, form)
    return out.getvalue()


def given(way, path):
    """The picture of a file in another form; None if that form does not exist for it."""
    if way == "path":
        return path
    if way in ("bytes", "bytearray"):
        return path.read_bytes() if way == "bytes" else bytearray(path.read_bytes())
    if way == "file":
        return io.BytesIO(path.read_bytes())
    if way == "unwound":  # as after image.save(file)
        file = io.BytesIO()
        file.write(path.read_bytes())
        return file
    if way == "pil":
        return pytest.importorskip("PIL.Image").open(path)
    array: Any = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
    if way == "numpy":
        return array
    array = array[..., None] if array.ndim == 2 else array
    array = array[..., [2, 1, 0, 3][: array.shape[2]]] if array.shape[2] > 1 else array
    tensor = torch.from_numpy((array >> 8 if array.dtype == np.uint16 else array).astype(np.uint8)).movedim(
        -1, 0
    )
    return tensor if way == "tensor" else tensor[None].float() / 255


@pytest.fixture(scope="module")
def predictor():
    return Predictor(untrained(3), PredictConfig(img=64, device="cpu", conf=0.001, max_det=20))


@pytest.mark.parametrize("way", WAYS)
def test_boxes_are_those_of_the_file_in_every_form(predictor, tmp_path, way):
    assert cv2.imwrite(str(tmp_path / "a.png"), BGR)
    (result,), (of_path,) = (
        predictor.predict(one) for one in (given(way, tmp_path / "a.png"), tmp_path / "a.png")
    )
    assert len(of_path) and np.allclose(result.boxes_xyxy_px, of_path.boxes_xyxy_px, atol=0.5)


def check_equal(way, path):
    found, expected = pixels_of(given(way, path), "a"), read_image(path)
    assert found.shape == expected.shape
    assert np.abs(found.astype(int) - expected).max() <= 1  # decoders round CMYK in two ways


@pytest.mark.parametrize("way", WAYS[1:])
@pytest.mark.parametrize("kind", STORED)
def test_every_kind_of_picture_has_equal_pixels_in_every_form(tmp_path, kind, way):
    suffix, pixels = STORED[kind]
    if kind == "16 bits, colour" and way == "pil":
        pytest.skip("PIL opens no colours of 16 bits")
    path = tmp_path / f"a{suffix}"
    assert cv2.imwrite(str(path), pixels)
    check_equal(way, path)


TURNED = [f"turned {form} {n}" for form in ("JPEG", "PNG", "WEBP", "TIFF") for n in (2, 3, 6, 8)]
MODES = ["1 PNG", "P PNG", "P GIF", "LA PNG", "RGBA WEBP", "CMYK JPEG", "L JPEG", "CMYK TIFF", "RGBA TIFF"]


@pytest.mark.parametrize("way", ["bytes", "file", "pil"])
@pytest.mark.parametrize("kind", [*TURNED, *MODES])
def test_rotated_pictures_and_modes_of_pil_have_equal_pixels(tmp_path, kind, way):
    pil = pytest.importorskip("PIL")
    pytest.importorskip("PIL.Image")
    path = tmp_path / f"a.{kind.split()[1].lower()}".replace("jpeg", "jpg").replace(".gif", ".png")
    path.write_bytes(stored_by_pil(pil, kind))
    check_equal(way, path)
    if kind.startswith("turned") and kind[-1] in "68":
        assert read_image(path).shape == (64, 48, 3)


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (BGR, BGR),
        (BGR[None], BGR),
        (GREY, None),
        (GREY[..., None], None),
        (DEEP, None),
        (DEEP.astype(">u2"), None),
        (GREY.astype(np.float64) / 255, None),
        (BGR.astype(np.float32) / 255, BGR),
        (ALPHA, BGR),
        (BGR[:, ::-1][:, ::-1], BGR),
        (GREY > 127, np.dstack([np.where(GREY > 127, 255, 0)] * 3)),
        (torch.from_numpy(GREY), None),
        (torch.from_numpy(GREY)[None], None),
        (torch.from_numpy(GREY)[None, None], None),
        (torch.from_numpy(BGR[..., ::-1].copy()).movedim(-1, 0), BGR),
        (torch.from_numpy(BGR[..., ::-1].copy()).movedim(-1, 0)[None].double() / 255, BGR),
        (torch.from_numpy(ALPHA[..., [2, 1, 0, 3]].copy()).movedim(-1, 0), BGR),
        (memoryview(cv2.imencode(".png", BGR)[1].tobytes()), BGR),
    ],
)
def test_arrays_and_tensors_whose_meaning_is_clear_are_pictures(form, expected):
    expected = np.dstack([GREY] * 3) if expected is None else expected
    found = pixels_of(form, "image 0")
    assert found.dtype == np.uint8 and found.flags.c_contiguous and np.array_equal(found, expected)


def test_pil_images_of_16_and_32_bits_keep_their_upper_8_bits_or_are_refused():
    image = pytest.importorskip("PIL.Image")
    grey = np.dstack([GREY] * 3)
    assert np.array_equal(pixels_of(image.fromarray(DEEP), "a"), grey)
    assert np.array_equal(pixels_of(image.fromarray(DEEP.astype(np.int32)), "a"), grey)
    assert np.array_equal(pixels_of(image.fromarray(GREY.astype(np.float32) / 255), "a"), grey)
    for wrong, words in (
        (image.new("RGB", (0, 5)), "has the shape"),
        (image.fromarray(GREY.astype(np.int32)), "mode I"),
        (image.fromarray(GREY.astype(np.float32)), "outside of 0..1"),
    ):
        with pytest.raises(DataError, match=words):
            pixels_of(wrong, "a")


def test_a_pil_image_that_is_cut_off_is_refused(tmp_path):
    image = pytest.importorskip("PIL.Image")
    data = cv2.imencode(".png", picture(200, 150))[1].tobytes()
    with pytest.raises(DataError, match="image 0 cannot be decoded"):
        pixels_of(image.open(io.BytesIO(data[: len(data) // 2])), "image 0")


@pytest.mark.parametrize(
    ("wrong", "words", "hint"),
    [
        (torch.zeros(40, 60, 3), r"\[40, 60, 3\], expected \[3, H, W\]", "permute"),
        (np.zeros((3, 40, 60), np.uint8), r"\[3, 40, 60\], expected \(H, W, 3\)", "transpose"),
        (torch.zeros(2, 3, 8, 8), r"\[2, 3, 8, 8\]", "list(batch)"),
        (np.zeros((2, 8, 8, 3), np.uint8), r"\[2, 8, 8, 3\]", "list(batch)"),
        (torch.full((3, 8, 8), 200.0), "outside of 0..1", "divide by 255"),
        (torch.full((3, 8, 8), float("nan")), "outside of 0..1", "divide by 255"),
        (np.full((8, 8, 3), 200.0), "outside of 0..1", "divide by 255"),
        (torch.zeros(3, 8, 8, dtype=torch.int64), "int64, expected uint8", "float in 0..1"),
        (np.zeros((8, 8, 3), np.int32), "int32, expected uint8", "float in 0..1"),
        (np.zeros((0, 8, 3), np.uint8), "shape", ""),
        (np.zeros((), np.uint8), "shape", ""),
        (b"no picture", "not in a known image format", "viewer"),
        (b"", "empty", "viewer"),
        (io.StringIO("a"), "reads as str, expected bytes", "binary"),
        (io.BytesIO(), "empty", "viewer"),
        (5, "is a int", "PIL image"),
        ((each for each in [BGR]), "is a generator", "a list of these"),
    ],
)
def test_something_else_in_memory_is_refused_with_a_hint_about_pictures(wrong, words, hint):
    with pytest.raises(DataError, match=words) as caught:
        pixels_of(wrong, "image 0")
    assert hint in caught.value.render() and "data check" not in caught.value.render()
