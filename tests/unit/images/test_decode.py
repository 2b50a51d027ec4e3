import os
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
from hostile import before_frame
from label_rows import index_of
from small_data import encoded, picture, with_exif_jpeg, with_exif_png, with_exif_webp, yolo_set
from walks import sampled

from yolofleet.data.datasets.check import decode_all
from yolofleet.data.images.decode import decode_image, read_image
from yolofleet.data.images.header import IMAGE_SUFFIXES, MAX_PIXELS, header_of_file, read_header
from yolofleet.support.errors import DataError


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path / "cache"))


def header(data):
    return read_header(data)


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".bmp", ".webp", ".tif"])
@pytest.mark.parametrize("size_wh", [(61, 37), (1, 1), (300, 2)])
def test_the_header_says_the_size_that_decoding_gives(suffix, size_wh):
    data = encoded(picture(*size_wh), suffix)
    assert header(data).size_wh == size_wh
    assert header(data).problem is None
    assert decode_image(data, "a").shape == (size_wh[1], size_wh[0], 3)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_jpeg_is_turned_as_opencv_turns_it(orientation, order):
    data = with_exif_jpeg(encoded(picture(40, 24)), orientation, order)
    theirs = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    ours = decode_image(data, "a")
    assert theirs is not None and np.array_equal(ours, theirs)
    assert header(data).size_wh == (ours.shape[1], ours.shape[0])


@pytest.mark.parametrize("orientation", [3, 5, 6, 8])
def test_png_and_webp_are_turned_like_jpeg(orientation):
    image = picture(40, 24)
    upright = decode_image(encoded(image, ".png"), "a")
    expected = {3: lambda i: i[::-1, ::-1], 5: lambda i: i.transpose(1, 0, 2)}
    expected |= {6: lambda i: np.rot90(i, -1), 8: lambda i: np.rot90(i)}
    turned = decode_image(with_exif_png(encoded(image, ".png"), orientation), "a")
    assert np.array_equal(turned, expected[orientation](upright))
    webp = with_exif_webp(encoded(image, ".webp"), orientation, (40, 24))
    assert header(webp).size_wh == (turned.shape[1], turned.shape[0])
    assert decode_image(webp, "a").shape == turned.shape


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_an_orientation_that_does_not_exist_is_no_orientation(orientation):
    data = with_exif_jpeg(encoded(picture(40, 24)), orientation)
    assert header(data).size_wh == (40, 24)
    assert decode_image(data, "a").shape == (24, 40, 3)


@pytest.mark.parametrize("suffix", [".png", ".tif"])
@pytest.mark.parametrize("channels", [1, 3])
def test_sixteen_bits_become_the_upper_eight(suffix, channels):
    deep = np.random.default_rng(0).integers(0, 65536, (20, 30, channels), np.uint16)
    image = decode_image(encoded(deep, suffix), "a")
    assert image.dtype == np.uint8
    assert np.abs(image.astype(int) - (deep >> 8)).max() <= 1  # grey is repeated by broadcasting


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"<!DOCTYPE html><html>404 not found</html>", "is an HTML page"),
        (b"\n<HTML><head>", "is an HTML page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "git lfs pull"),
        (b"\0\0\0\x20ftypavif" + bytes(50), "is an AVIF image"),
        (b"\0\0\0\x18ftypheic" + bytes(50), "is a HEIC image"),
        (b"\0\0\0\x18ftypmif1" + bytes(50), "is a HEIC image"),
        (b"\0\0\0\x0cJXL \r\n\x87\n", "is a JPEG XL image"),
        (b"%PDF-1.4", "another kind"),
        (b'{"error": "not found"}', "another kind"),
        (b"<?xml version='1.0'?><Error/>", "another kind"),
        (bytes(4096), "zero bytes"),
    ],
)
def test_a_file_that_is_no_image_says_what_it_is(tmp_path, data, what):
    with pytest.raises(DataError, match=what):
        decode_image(data, "a.jpg")
    yolo_set(tmp_path, {"a": "0 .5 .5 .1 .1", "b": "0 .5 .5 .1 .1"})
    (tmp_path / "images" / "train" / "b.jpg").write_bytes(data)
    (problem,) = index_of(tmp_path).problems
    assert problem.path == "images/train/b.jpg" and what in problem.what


def check_and_decode_agree(tmp_path, name, data):
    """The index has the image exactly if it decodes. Return the index, and the error of decoding."""
    yolo_set(tmp_path, {"a": "0 .5 .5 .1 .1", "b": "0 .5 .5 .1 .1"})
    path = tmp_path / "images" / "train" / name
    path.write_bytes(data)
    index = index_of(tmp_path)
    try:
        read_image(path)
    except DataError as error:
        (problem,) = index.problems
        assert problem.kind == "image-unreadable" and problem.what in error.what
        return index, error.what
    assert len(index) == 3 and index.problems == ()
    return index, None


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int32])
@pytest.mark.parametrize("channels", [1, 3])
def test_check_refuses_a_tiff_that_a_training_cannot_read(tmp_path, kind, channels):
    data = encoded(np.dstack([picture(30, 20)[:, :, :1].astype(kind)] * channels), ".tif")
    _, fault = check_and_decode_agree(tmp_path, "c.tif", data)
    assert fault is None or f"{channels} channels of {8 * kind().itemsize} bits" in fault


def test_check_refuses_a_compression_that_a_training_cannot_read(tmp_path):
    data = bytearray(encoded(picture(30, 20), ".tif"))
    at = data.index(b"\x03\x01\x03\0\x01\0\0\0")  # the tag 259, one SHORT
    data[at + 8 : at + 10] = (50001).to_bytes(2, "little")  # WebP in TIFF
    _, fault = check_and_decode_agree(tmp_path, "c.tif", bytes(data))
    assert fault is None or "TIFF compression 50001" in fault


@pytest.mark.parametrize(("marker", "bits"), [(0xC3, 8), (0xC9, 8), (0xC1, 12)])
def test_check_refuses_a_jpeg_that_a_training_cannot_read(tmp_path, marker, bits):
    data = bytearray(encoded(picture(64, 48)))
    at = data.index(b"\xff\xc0")
    data[at + 1], data[at + 4] = marker, bits
    _, fault = check_and_decode_agree(tmp_path, "c.jpg", bytes(data))
    assert fault is None or "JPEG of a rare kind" in fault


def test_check_and_training_agree_about_a_gif(tmp_path):
    data = b"GIF89a\x01\0\x01\0\x80\0\0\xff\xff\xff\0\0\0!\xf9\x04\0\0\0\0\0,\0\0\0\0\x01\0\x01\0\0\x02\x02D\x01\0;"
    check_and_decode_agree(tmp_path, "c.jpg", data)


@pytest.mark.parametrize(
    ("suffix", "channels"), sampled([(".png", 1), (".png", 3), (".tif", 1), (".tif", 3)], 3)
)
def test_sixteen_bits_are_said_with_their_number_and_decode_finds_dark_ones(tmp_path, suffix, channels):
    deep = np.dstack([picture(30, 20)[:, :, :1].astype(np.uint16) * 16] * channels)  # 12 bits
    data = encoded(deep, suffix)
    index, _ = check_and_decode_agree(tmp_path, f"c{suffix}", data)
    (said,) = index.assumed
    assert said.startswith(f"images/train/c{suffix}: ") and "are used: 1; those of a 12-bit camera" in said
    (dark,) = decode_all(index)
    assert dark.kind == "image-dark" and Path(dark.path).name == f"c{suffix}"


def test_a_fourth_channel_of_a_tiff_is_said(tmp_path):
    data = encoded(np.dstack([picture(30, 20), np.full((20, 30), 128, np.uint8)]), ".tif")
    index, _ = check_and_decode_agree(tmp_path, "c.tif", data)
    (said,) = index.assumed
    assert "fourth channel" in said and said.endswith(": 1")


def test_grey_and_transparent_images_become_three_channels():
    grey = picture(30, 20)[:, :, 0]
    assert np.array_equal(decode_image(encoded(grey, ".png"), "a"), np.repeat(grey[:, :, None], 3, 2))
    alpha = np.dstack([picture(30, 20), np.zeros((20, 30), np.uint8)])
    assert np.array_equal(decode_image(encoded(alpha, ".png"), "a"), alpha[:, :, :3])


def test_the_content_decides_not_the_suffix(tmp_path):
    path = tmp_path / "a.jpg"
    path.write_bytes(encoded(picture(30, 20), ".png"))
    assert np.array_equal(read_image(path), picture(30, 20))


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".bmp", ".webp"])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_an_image_that_is_cut_off_is_noticed(suffix, share):
    data = encoded(picture(200, 150), suffix)
    data = data[: int(len(data) * share)]
    assert "cut off" in header(data).problem
    with pytest.raises(DataError, match="cut off"):
        decode_image(data, "a")


def test_a_jpeg_that_a_download_left_half_empty_is_cut_off():
    data = encoded(picture(200, 150))
    assert "cut off" in header(data[: len(data) // 2] + bytes(len(data) // 2)).problem


def test_a_jpeg_with_something_behind_its_end_is_whole():
    data = encoded(picture(200, 150)) + b"more" * 100
    assert header(data).problem is None
    assert decode_image(data, "a").shape == (150, 200, 3)


@pytest.mark.parametrize("reduction", [2, 4, 8])
@pytest.mark.parametrize("orientation", [1, 3, 6])
@pytest.mark.parametrize("size_wh", [(320, 240), (321, 239)])
def test_a_reduced_jpeg_is_near_an_area_resize(reduction, orientation, size_wh):
    coarse = np.random.default_rng(0).integers(0, 256, (9, 12, 3), np.uint8)
    image = cv2.resize(coarse, size_wh, interpolation=cv2.INTER_CUBIC)
    data = with_exif_jpeg(encoded(image), orientation)
    whole, reduced = decode_image(data, "a.jpg"), decode_image(data, "a.jpg", reduction=reduction)
    height, width = (-(-side // reduction) for side in whole.shape[:2])
    assert reduced.shape == (height, width, 3)
    if orientation == 1:  # a turned image has its incomplete blocks at other sides
        below, right = height * reduction - whole.shape[0], width * reduction - whole.shape[1]
        whole = cv2.copyMakeBorder(whole, 0, below, 0, right, cv2.BORDER_REPLICATE)
    if whole.shape[:2] == (height * reduction, width * reduction):
        resized = cv2.resize(whole, (width, height), interpolation=cv2.INTER_AREA)
        difference = np.abs(reduced.astype(int) - resized)
        assert difference.mean() < 1.5 and np.quantile(difference, 0.99) < 8


def test_only_jpegs_are_reduced():
    for suffix in (".png", ".webp", ".bmp"):
        assert decode_image(encoded(picture(60, 40), suffix), "a", reduction=2).shape == (40, 60, 3)


# -- what exists is read; tests/hostile.py has what is refused


@pytest.mark.parametrize("suffix", sorted(IMAGE_SUFFIXES | {".gif"}))
def test_every_suffix_that_is_accepted_is_read(tmp_path: Path, suffix: str) -> None:
    pixels = np.full((60, 80) if suffix in (".pbm", ".pgm") else (60, 80, 3), 200, np.uint8)
    written_as = {".dib": ".bmp", ".jfif": ".jpg", ".mpo": ".jpg"}.get(suffix, suffix)
    if not cv2.haveImageWriter(f"a{written_as}"):
        pytest.skip(f"this OpenCV writes no {written_as}")
    file = tmp_path / f"a{suffix}"
    file.write_bytes(cv2.imencode(written_as, pixels)[1].tobytes())
    header = header_of_file(str(file))
    assert header is not None and header.problem is None and header.size_wh == (80, 60)
    assert read_image(file).shape == (60, 80, 3)


def test_a_jpeg_with_bytes_before_its_frame_is_read(tmp_path: Path) -> None:
    """As libjpeg reads it: bytes that are no marker are skipped, and comments may be empty."""
    pixels = np.random.default_rng(0).integers(0, 255, (60, 80, 3), np.uint8)
    data = cv2.imencode(".jpg", pixels)[1].tobytes()
    file = tmp_path / "a.jpg"
    file.write_bytes(data)
    plain = read_image(file)
    for inserted in (b"\0\0", b"\xff\0", b"\xff" * 5000, b"\xff\xfe\0\2" * 9, b"\xff\xd0\xff\x01"):
        file.write_bytes(data[:20] + inserted + data[20:])  # behind JFIF's segment
        assert np.array_equal(read_image(file), plain)


@pytest.mark.long
def test_opencv_has_our_limit_of_pixels_before_it_is_loaded() -> None:
    """A second wall behind the headers. OpenCV reads the variable once, when it is loaded."""
    code = (
        "import yolofleet.data.geometry.letterbox, cv2, numpy as np\n"
        f"data = np.frombuffer({before_frame(b'', 23000)!r}, np.uint8)\n"
        "try:\n    print(cv2.imdecode(data, cv2.IMREAD_COLOR))\n"
        "except cv2.error as problem:\n    print(problem)\n"
    )
    clean = {name: text for name, text in os.environ.items() if not name.startswith("OPENCV_")}
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=clean, timeout=900
    )
    assert "CV_IO_MAX_IMAGE_PIXELS" in told.stdout + told.stderr
    value = "import os, yolofleet; print(os.environ['OPENCV_IO_MAX_IMAGE_PIXELS'])"
    told = subprocess.run(
        [sys.executable, "-c", value], capture_output=True, text=True, env=clean, timeout=900
    )
    assert int(told.stdout) == MAX_PIXELS


def test_a_blank_image_of_60_million_pixels_is_read(tmp_path: Path) -> None:
    """The bound must not refuse what exists: blank images compress best."""
    blank = np.zeros((6000, 10000), np.uint8)
    for suffix in (".jpg", ".png", ".webp"):
        _, data = cv2.imencode(suffix, blank)
        header = read_header(data.tobytes())
        assert header is not None and header.problem is None and header.size_wh == (10000, 6000)


def test_a_usual_progressive_jpeg_is_read(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (300, 400, 3), np.uint8)
    cv2.imwrite(str(tmp_path / "a.jpg"), pixels, [cv2.IMWRITE_JPEG_PROGRESSIVE, 1])
    assert read_image(tmp_path / "a.jpg").shape == (300, 400, 3)
