"""A part of a JPEG, decoded by the extension, against the same part of the whole image from OpenCV: equal bytes."""

from functools import partial
from pathlib import Path

import cv2
import numpy as np
import pytest
from label_rows import index_of
from small_data import encoded, with_exif_jpeg

from yolofleet.data.geometry.view import Part
from yolofleet.data.images import decode
from yolofleet.data.images.decode import decode_image
from yolofleet.data.input.cache import ImageCache
from yolofleet.support.errors import DataError

compiled = pytest.mark.skipif(not decode.COMPILED, reason="installed without a C compiler")
SAMPLINGS = {"4:4:4": 0x111111, "4:2:2": 0x211111, "4:2:0": 0x221111, "4:4:0": 0x121111, "4:1:1": 0x411111}
SIZES_WH = [(1, 1), (3, 2), (5, 40), (17, 16), (64, 48), (101, 75)]


def noisy(width: int, height: int, seed: int = 0) -> np.ndarray:
    """A picture with flat areas, edges and noise: uint8 [height, width, 3]."""
    rng = np.random.default_rng(seed)
    image = cv2.resize(rng.integers(0, 256, (4, 5, 3), np.uint8), (width, height))
    image = image + rng.normal(0, 30, image.shape) * (np.arange(width) > width / 2)[:, None]
    image[height // 3 : height // 2] = rng.integers(0, 256, 3)
    return np.clip(image, 0, 255).astype(np.uint8)


def as_jpeg(image: np.ndarray, sampling: str = "4:2:0", quality: int = 90, **flags: int) -> bytes:
    options = [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, SAMPLINGS[sampling], cv2.IMWRITE_JPEG_QUALITY, quality]
    for name, value in flags.items():
        options += [getattr(cv2, f"IMWRITE_JPEG_{name.upper()}"), value]
    done, data = cv2.imencode(".jpg", image, options)
    assert done
    return data.tobytes()


def boxes(width: int, height: int, count: int = 4) -> list[Part]:
    """The whole image, one pixel of each corner, and random parts."""
    rng = np.random.default_rng(width * height)
    found = [(0, 0, width, height), (0, 0, 1, 1), (width - 1, height - 1, width, height)]
    for _ in range(count):
        (x1, x2), (y1, y2) = (
            np.sort(rng.choice(side + 1, 2, replace=False)).tolist() for side in (width, height)
        )
        found.append((x1, y1, x2, y2))
    return found


def shown(box: Part, width: int, height: int) -> Part:
    assert width > 0 and height > 0
    return box


def check_parts(data: bytes, expect_ours: bool = True) -> None:
    """Compare some parts of a JPEG, at each reduction."""
    for reduction, flags in decode._REDUCED.items():
        whole = cv2.imdecode(np.frombuffer(data, np.uint8), flags | cv2.IMREAD_IGNORE_ORIENTATION)
        assert whole is not None
        for x1, y1, x2, y2 in boxes(*whole.shape[1::-1]):
            part = np.full_like(whole, 7)
            bytes_read = decode._jpeg.decode(data, reduction, (x1, y1, x2, y2), part)
            assert (0 < bytes_read <= len(data)) if expect_ours else bytes_read == 0
            if expect_ours:
                assert np.array_equal(part[y1:y2, x1:x2], whole[y1:y2, x1:x2]), (reduction, x1, y1, x2, y2)
                part[y1:y2, x1:x2] = 7
            assert (part == 7).all()  # it writes nothing outside


@compiled
@pytest.mark.parametrize("size_wh", SIZES_WH)
@pytest.mark.parametrize("sampling", ["4:4:4", "4:2:2", "4:2:0", "4:4:0"])
def test_parts_have_the_bytes_of_the_whole_image(sampling, size_wh):
    assert decode.parts_are_exact()
    check_parts(as_jpeg(noisy(*size_wh), sampling))


@compiled
@pytest.mark.parametrize("quality", [1, 30, 75, 100])
def test_parts_of_any_quality(quality):
    check_parts(as_jpeg(noisy(90, 70), "4:2:0", quality))
    check_parts(as_jpeg(noisy(90, 70), "4:4:4", quality, optimize=1))


@compiled
@pytest.mark.parametrize("interval", [1, 3, 7])
def test_parts_of_a_file_with_restart_markers(interval):
    check_parts(as_jpeg(noisy(101, 75), "4:2:0", rst_interval=interval))


@compiled
def test_parts_of_a_grey_file():
    check_parts(as_jpeg(noisy(61, 45)[..., :1].copy()))


@compiled
def test_other_kinds_are_left_to_opencv():
    check_parts(as_jpeg(noisy(61, 45), progressive=1), expect_ours=False)
    check_parts(as_jpeg(noisy(61, 45), "4:1:1"), expect_ours=False)
    data = bytearray(as_jpeg(noisy(61, 45)))
    adobe = b"\xff\xee\0\x0eAdobe\0\x64\0\0\0\0\0"  # the colours are RGB
    at = data.index(b"\xff\xdb")
    data[2:at] = adobe
    check_parts(bytes(data), expect_ours=False)


@compiled
def test_blocks_beyond_the_range_of_pictures_are_left_to_opencv():
    """There, implementations of libjpeg-turbo differ: those with vector instructions saturate, and others do not."""
    data = bytearray(as_jpeg(noisy(61, 45), "4:4:4", 30))
    at = data.index(b"\xff\xdb")
    data[at + 5 : at + 69] = b"\xff" * 64
    assert decode._jpeg.decode(bytes(data), 1, (0, 0, 61, 45), np.zeros((45, 61, 3), np.uint8)) == 0


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("reduction", [1, 2, 8])
def test_a_part_of_a_rotated_picture(orientation, reduction):
    data = with_exif_jpeg(as_jpeg(noisy(61, 45)), orientation)
    whole = decode_image(data, "a", reduction=reduction)
    for x1, y1, x2, y2 in boxes(*whole.shape[1::-1]):
        part = decode_image(data, "a", reduction=reduction, seen=(x1, y1, x2, y2))
        assert part.shape == whole.shape
        assert np.array_equal(part[y1:y2, x1:x2], whole[y1:y2, x1:x2])


@compiled
def test_less_of_the_file_is_read_if_the_part_is_at_the_top():
    data = as_jpeg(noisy(320, 240), rst_interval=4)
    out = np.zeros((240, 320, 3), np.uint8)
    top, bottom = (decode._jpeg.decode(data, 1, (0, y, 320, y + 40), out) for y in (0, 200))
    assert top < 0.4 * bottom


@pytest.mark.parametrize("suffix", [".png", ".bmp", ".webp"])
def test_other_formats_are_decoded_whole(suffix):
    image = noisy(40, 30)
    assert np.array_equal(
        decode_image(encoded(image, suffix), "a", seen=(1, 1, 2, 2)),
        decode_image(encoded(image, suffix), "a"),
    )


def test_a_part_beyond_the_picture_is_cut_to_it():
    data = as_jpeg(noisy(40, 30))
    whole = decode_image(data, "a")
    assert np.array_equal(decode_image(data, "a", seen=(-9, -9, 99, 99)), whole)
    assert decode_image(data, "a", seen=(50, 50, 50, 50)).shape == whole.shape  # nothing of it


@compiled
@pytest.mark.parametrize("sampling", ["4:4:4", "4:2:0"])
def test_damage_gives_the_error_or_the_pixels_of_the_whole_image(sampling):
    rng = np.random.default_rng(5)
    image, part = noisy(80, 60), (10, 20, 50, 44)
    x1, y1, x2, y2 = part
    good = as_jpeg(image, sampling, rst_interval=4), as_jpeg(image, sampling)
    outcomes = {"error": 0, "ours": 0, "opencv": 0}
    for trial in range(1500):
        data = bytearray(good[trial % 2])
        for _ in range(rng.integers(1, 4)):
            at = int(rng.integers(2, len(data) - 2))
            kind = rng.integers(5)
            if kind == 0:
                data[at] = rng.integers(256)
            elif kind == 1:
                data[at : at + 2] = bytes([0xFF, rng.integers(256)])
            elif kind == 2:
                del data[at : min(at + int(rng.integers(1, 40)), len(data) - 2)]
            elif kind == 3:
                data[at:at] = rng.integers(0, 256, int(rng.integers(1, 9)), np.uint8).tobytes()
            else:
                data[at] ^= 1 << int(rng.integers(8))
        whole, error = None, None
        try:
            whole = decode_image(bytes(data), "a")
        except DataError as problem:
            error = problem
        try:
            found = decode_image(bytes(data), "a", seen=part)
        except DataError as problem:
            assert error is not None and problem.what == error.what
            outcomes["error"] += 1
            continue
        assert whole is not None and found.shape == whole.shape, error
        assert np.array_equal(found[y1:y2, x1:x2], whole[y1:y2, x1:x2])
        outcomes["opencv" if np.array_equal(found, whole) else "ours"] += 1
    assert min(outcomes.values()) > 20, outcomes


@compiled
@pytest.mark.parametrize("kind", ["grey", "4:2:0"])
def test_a_part_is_refused_whenever_the_whole_image_is(kind):
    """Every value of every byte of the frame, the scan and the restart interval, and some of each table."""
    image = noisy(17, 16)
    good = as_jpeg(image[..., :1].copy() if kind == "grey" else image, "4:2:0", rst_interval=1)
    verdicts = {"refused": 0, "read": 0}
    for at in range(2, good.index(b"\xff\xda") + 14):
        segment = max(
            good.rfind(bytes([0xFF, mark]), 0, at + 1) for mark in (0xC0, 0xDA, 0xDD, 0xE0, 0xC4, 0xDB)
        )
        is_table = good[segment + 1] in (0xC4, 0xDB)
        for value in (0, 1, 17, 63, 128, 255) if is_table else range(256):
            data = good[:at] + bytes([value]) + good[at + 1 :]
            found = []
            for seen in (None, (0, 0, 8, 8)):
                try:
                    decode_image(data, "a", seen=seen)
                    found.append("")
                except DataError as problem:
                    found.append(problem.what)
            assert found[0] == found[1], (at - segment, data[segment : segment + 20].hex())
            verdicts["refused" if found[0] else "read"] += 1
    assert min(verdicts.values()) > 1000, verdicts


@pytest.mark.parametrize(
    "values", [(0, (0, 0, 1, 1)), (1, (0, 0, 0, 1)), (1, (0, 0, 9, 1)), (3, (0, 0, 1, 1))]
)
@compiled
def test_wrong_arguments_are_refused(values):
    reduction, part = values
    with pytest.raises(ValueError, match="wrong reduction, or pixels"):
        decode._jpeg.decode(as_jpeg(noisy(8, 8)), reduction, part, np.zeros((8, 8, 3), np.uint8))


@pytest.mark.parametrize("img", [40, 64, 90, 160])
@pytest.mark.parametrize("size_wh", [(160, 120), (150, 101), (63, 160)])
def test_a_part_of_an_image_at_training_size_has_the_bytes_of_the_whole(tmp_path: Path, img, size_wh):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.jpg").write_bytes(with_exif_jpeg(as_jpeg(noisy(*size_wh)), 6))
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels" / "a.txt").write_text("0 0.5 0.5 0.5 0.5\n")
    (tmp_path / "data.yaml").write_text("train: images\nval: images\nnames: [a]\n")
    index = index_of(tmp_path / "data.yaml")
    cache = ImageCache(index, img, "none", quick=True)
    whole = cache.get(0)
    for box in boxes(*whole.shape[1::-1]):
        part, (x1, y1, x2, y2) = cache.get(0, partial(shown, box)), box
        assert np.array_equal(part[y1:y2, x1:x2], whole[y1:y2, x1:x2])


def test_another_decoder_in_opencv_switches_parts_off(monkeypatch):
    """A host whose OpenCV rounds in another way decodes whole images, so a cache changes no pixels there either."""
    real = cv2.imdecode
    decode.parts_are_exact.cache_clear()
    with monkeypatch.context() as changed:
        changed.setattr(decode.cv2, "imdecode", lambda data, flags: np.asarray(real(data, flags)) // 2 * 2)
        assert not decode.parts_are_exact()
        data = as_jpeg(noisy(40, 30))
        assert np.array_equal(decode_image(data, "a", seen=(0, 0, 1, 1)), decode_image(data, "a"))
    decode.parts_are_exact.cache_clear()
