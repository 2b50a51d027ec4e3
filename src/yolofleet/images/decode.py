"""An image file -> pixels: the only place that decodes images."""

from __future__ import annotations

import os

import cv2
import numpy as np

from yolofleet.errors import DataError
from yolofleet.files.foreign import read_foreign
from yolofleet.images.header import MAX_PIXELS, read_header, scans_fault

# OpenCV writes a warning on standard error for each odd file; ours name the file, so its own are left out.
if hasattr(cv2, "setLogLevel"):
    cv2.setLogLevel(0)
else:
    cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)

MAX_FILE_BYTES = 1 << 30
_HINT = "look at the file with a picture viewer; replace it or take it out of the data set"


def read_image(path: str | os.PathLike[str]) -> np.ndarray:
    """An image in a format of ``header``, as a picture viewer shows it.

    Grey, palette, CMYK and 16-bit images become 8-bit BGR, alpha is dropped, EXIF rotation is applied (by us,
    so that it is the same for every format and OpenCV version).

    Returns:
        uint8 [H, W, 3] BGR, contiguous, own memory.
    Raises:
        DataError: missing, unreadable, cut off, of no known format or beyond ``MAX_PIXELS``.
    """
    try:
        data = read_foreign(path, limit_bytes=MAX_FILE_BYTES)
    except (OSError, ValueError, MemoryError) as error:
        raise unreadable(path, error) from None
    return decode_image(data, os.fspath(path))


def decode_image(data: bytes, path: str) -> np.ndarray:
    """The same for bytes in memory; ``path`` is for messages."""
    if not data:
        raise DataError(f"image {path} is empty (0 bytes)", hint=_HINT)
    header = read_header(data)
    if header is None:  # OpenCV may know it, but nothing would bound the memory that it takes
        raise DataError(f"image {path} is of no known image format", hint=_HINT)
    fault = header.fault or scans_fault(header, data)
    if fault:
        raise DataError(f"image {path} {fault}", hint=_HINT)
    ours = not header.rotated_by_decoder
    flags = cv2.IMREAD_COLOR | (cv2.IMREAD_IGNORE_ORIENTATION if ours else 0)
    try:
        image = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
    except (cv2.error, MemoryError):
        image = None
    if image is None:
        raise DataError(f"image {path} cannot be decoded", hint=_HINT)
    if image.shape[0] * image.shape[1] > MAX_PIXELS:
        raise DataError(f"image {path} has {image.shape[1]} x {image.shape[0]} pixels", hint=_HINT)
    return _upright(image, header.orientation) if ours else image


def unreadable(path: str | os.PathLike[str], error: Exception) -> DataError:
    """The error of an image or label file that the system does not let us read."""
    if isinstance(error, FileNotFoundError):
        return DataError(f"image {path} does not exist", hint="has it been moved, or a disk not mounted?")
    reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
    return DataError(f"image {path} cannot be read: {reason}")


def _upright(image: np.ndarray, orientation: int) -> np.ndarray:
    """Source: EXIF 2.3, tag 0x0112. Checked against OpenCV's own rotation in test_decode.py."""
    if orientation == 2:
        return cv2.flip(image, 1)
    if orientation == 3:
        return cv2.rotate(image, cv2.ROTATE_180)
    if orientation == 4:
        return cv2.flip(image, 0)
    if orientation == 5:
        return cv2.transpose(image)
    if orientation == 6:
        return cv2.rotate(image, cv2.ROTATE_90_CLOCKWISE)
    if orientation == 7:
        return cv2.rotate(cv2.transpose(image), cv2.ROTATE_180)
    if orientation == 8:
        return cv2.rotate(image, cv2.ROTATE_90_COUNTERCLOCKWISE)
    return image
