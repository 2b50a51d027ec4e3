"""Decode an image file into pixels. Nothing else in this package decodes images.

OpenCV decodes. If only a part of a JPEG is needed, ``_jpeg.c`` decodes that part, with the same bytes
(decision 53).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache

import cv2
import numpy as np

from yolofleet.data.geometry.view import Part
from yolofleet.data.images.header import MAX_PIXELS, ImageHeader, read_header, scans_problem
from yolofleet.storage.foreign import read_foreign
from yolofleet.support.errors import DataError
from yolofleet.support.system.proc import is_forked

_VERSION = 2  # of the extension; an older one, from before an update of the sources, is not used
try:
    from yolofleet.data.images import _jpeg
except ImportError:  # installed without a C compiler
    COMPILED = False
else:
    COMPILED = _jpeg.VERSION == _VERSION

# OpenCV prints a warning without a file name for each damaged file. Our errors name the file, so its log is off.
if hasattr(cv2, "setLogLevel"):
    cv2.setLogLevel(0)
else:
    cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)

MAX_FILE_BYTES = 1 << 30
_REDUCED = {
    1: cv2.IMREAD_COLOR,
    2: cv2.IMREAD_REDUCED_COLOR_2,
    4: cv2.IMREAD_REDUCED_COLOR_4,
    8: cv2.IMREAD_REDUCED_COLOR_8,
}
# width and height of an image at training size, pixels -> the part of it that a sample shows
Seen = Callable[[int, int], Part]
# EXIF orientation -> axis of cv2.flip (-1: both); from 5 on, rows become columns before
_FLIPS = {2: 1, 3: -1, 4: 0, 6: 1, 7: -1, 8: 0}
_HINT = "open the file in an image viewer; replace it or remove it from the data set"


def set_opencv_threads(count: int) -> None:
    """Set how many threads OpenCV uses here; with 1 it has none of its own, beside which a fork could hang.

    1 waits for OpenCV's threads: a forked process has none of them, and hangs. 0 crashes a process with a thread inside OpenCV.
    """
    if cv2.getNumThreads() != count:  # 1 where 0 is set
        cv2.setNumThreads(0 if count == 1 and is_forked() else count)


def read_image(
    path: str | os.PathLike[str], *, reduction: int = 1, seen: Part | None = None, follow: bool = True
) -> np.ndarray:
    """Return the pixels of an image file, as an image viewer shows them.

    Grey, palette, CMYK and 16-bit images become 8-bit BGR, and alpha is dropped. EXIF rotation is applied here and not
    by OpenCV, so that it is the same for every format and version.

    Args:
        reduction: 2, 4 or 8 decodes a JPEG at this fraction of its size, from fewer coefficients of its transform. That
            takes about half the time, and is close to an area resize. Other formats are decoded whole.
        seen: the part of the result that the caller needs, if not all. The pixels outside it are unspecified.
        follow: False: a symbolic link is an error.
    Returns:
        uint8 [H, W, 3] BGR, contiguous, own memory. Sides of a reduced image are rounded up.
    Raises:
        DataError: the file is missing, unreadable, cut off, not in a format of ``header`` or beyond ``MAX_PIXELS``.
    """
    try:
        data = read_foreign(path, limit_bytes=MAX_FILE_BYTES, follow=follow)
    except (OSError, ValueError, MemoryError) as error:
        raise unreadable(path, error) from None
    return decode_image(data, os.fspath(path), reduction=reduction, seen=seen)


def decode_image(data: bytes, path: str, *, reduction: int = 1, seen: Part | None = None) -> np.ndarray:
    """Return the pixels of an image in memory; see ``read_image``. ``path`` is for messages."""
    if not data:
        raise DataError(f"image {path} is empty (0 bytes)", hint=_HINT)
    header = read_header(data)
    if header is None:  # OpenCV may know the format, but nothing would limit the memory that it takes
        raise DataError(f"image {path} is not in a known image format", hint=_HINT)
    problem = header.problem or scans_problem(header, data)
    if problem:
        raise DataError(f"image {path} {problem}", hint=_HINT)
    if seen and header.frame_at and parts_are_exact():
        part = _decode_part(data, header, reduction, seen)
        if part is not None:
            return part
    ours = not header.rotated_by_decoder
    flags = _REDUCED[reduction if header.frame_at else 1] | (cv2.IMREAD_IGNORE_ORIENTATION if ours else 0)
    try:
        image = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
    except (cv2.error, MemoryError):
        image = None
    if image is None:
        why = f": it {header.rare}" if header.rare else ""
        raise DataError(f"image {path} cannot be decoded{why}", hint=_HINT)
    if image.shape[0] * image.shape[1] > MAX_PIXELS:
        raise DataError(f"image {path} has {image.shape[1]} x {image.shape[0]} pixels", hint=_HINT)
    return upright(image, header.orientation) if ours else image


def _decode_part(data: bytes, header: ImageHeader, reduction: int, seen: Part) -> np.ndarray | None:
    """Return a JPEG of which at least ``seen`` is decoded; None if it is of a kind that the extension leaves to OpenCV."""
    width, height = (-(-side // reduction) for side in header.stored_wh)
    orientation, (x1, y1, x2, y2) = header.orientation, seen
    if orientation >= 5:
        x1, y1, x2, y2 = y1, x1, y2, x2
    if orientation in (2, 3, 7, 8):
        x1, x2 = width - x2, width - x1
    if orientation in (3, 4, 6, 7):
        y1, y2 = height - y2, height - y1
    x1, y1 = min(max(x1, 0), width - 1), min(max(y1, 0), height - 1)
    stored = x1, y1, max(min(x2, width), x1 + 1), max(min(y2, height), y1 + 1)
    image = np.empty((height, width, 3), np.uint8)
    return upright(image, orientation) if _jpeg.decode(data, reduction, stored, image) else None


@cache
def parts_are_exact() -> bool:
    """Return whether the extension decodes to the bytes of this OpenCV.

    It does if OpenCV was built with libjpeg-turbo, as its packages are. Other libraries round in other ways.
    """
    if not COMPILED:
        return False
    y, x, channel = np.ogrid[:40, :56, :3]
    picture = ((x * (channel + 3) + y * y + 90 * ((x // 5 + y // 7) % 3)) % 256).astype(np.uint8)
    for sampling in (0x111111, 0x211111, 0x221111, 0x121111):
        _, encoded = cv2.imencode(".jpg", picture, [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, sampling])
        for reduction, flags in _REDUCED.items():
            whole = cv2.imdecode(encoded, flags)
            if whole is None:
                return False
            part = np.empty_like(whole)
            is_decoded = _jpeg.decode(encoded, reduction, (0, 0, *whole.shape[1::-1]), part)
            if not is_decoded or not np.array_equal(part, whole):
                return False
    return True


def unreadable(path: str | os.PathLike[str], error: Exception) -> DataError:
    """Return the error for an image that the operating system cannot read."""
    if isinstance(error, FileNotFoundError):
        return DataError(f"image {path} does not exist", hint="check the path, and that its disk is mounted")
    reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
    return DataError(f"image {path} cannot be read: {reason}")


def upright(image: np.ndarray, orientation: int) -> np.ndarray:
    """Rotate or mirror pixels by their EXIF orientation.

    Source: EXIF 2.3, tag 0x0112. Checked against OpenCV's own rotation in test_decode.py.
    """
    image = cv2.transpose(image) if orientation >= 5 else image
    return cv2.flip(image, _FLIPS[orientation]) if orientation in _FLIPS else image
