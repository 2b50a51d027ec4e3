"""Pictures that are no files: objects in memory, and the content of an address."""

from __future__ import annotations

import http.client
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch

from yolofleet.data.images.decode import decode_image, upright
from yolofleet.data.images.header import IMAGE_SUFFIXES
from yolofleet.inference.predict.frames import Item
from yolofleet.storage.request import Refused, Transient, open_url
from yolofleet.support.errors import DataError
from yolofleet.support.text import size_text

MAX_PICTURE_BYTES = 64 << 20  # of a picture from the network
WAIT_S = 20.0  # longest wait for a server


def pixels_of(picture: Any, name: str) -> np.ndarray:
    """Return a picture in memory as uint8 [H, W, 3] BGR, by the rules of :func:`decode_image`: of 16 bits the upper 8, no alpha.

    Args:
        picture: the bytes of an image file, or a file object; a PIL image, rotated by its EXIF; a numpy array (H, W),
            (H, W, 1), (H, W, 3) BGR or (H, W, 4) BGRA, as of OpenCV; or a torch tensor [1, H, W], [3, H, W] RGB or
            [4, H, W] RGBA. A batch of one is allowed. Values are uint8, uint16, bool or float in 0..1.

    Raises:
        DataError: it is something else.
    """
    orientation, is_rgb, expected, to_last = 1, True, "[3, H, W] in RGB order", "permute(2, 0, 1)"
    pil = sys.modules.get("PIL.Image")  # without it, nobody has made a PIL image
    if isinstance(picture, (bytes, bytearray, memoryview)):
        return decode_image(bytes(picture), name)
    if callable(getattr(picture, "read", None)):
        return decode_image(_content_of(picture, name), name)
    if isinstance(picture, torch.Tensor):
        values = picture.detach().cpu()
        values = values.float() if values.is_floating_point() else values
        array = (values if values.ndim < 3 else values.movedim(-3, -1)).numpy()
    elif pil is not None and isinstance(picture, pil.Image):
        array, orientation = _array_of_pil(picture, name)
    elif isinstance(picture, np.ndarray):
        array, is_rgb, expected, to_last = picture, False, "(H, W, 3) in BGR order", "transpose(1, 2, 0)"
    else:
        raise DataError(
            f"{name} is a {type(picture).__name__}",
            hint="a path, a numpy array, a torch tensor, a PIL image, the bytes of an image file, or a list of these",
        )
    array = array[0] if array.ndim == 4 and len(array) == 1 else array
    array = array[..., None] if array.ndim == 2 else array
    if array.ndim != 3 or array.shape[2] not in (1, 3, 4) or not array.size:
        hint = "give a list of pictures: list(batch)" if array.ndim == 4 else f"is it {to_last}?"
        shape = [*getattr(picture, "shape", array.shape)]
        raise DataError(f"{name} has the shape {shape}, expected {expected}", hint=hint)
    array = _in_8_bits(array, name)
    array = np.repeat(array, 3, axis=2) if array.shape[2] == 1 else array
    return upright(np.ascontiguousarray(array[..., 2::-1] if is_rgb else array[..., :3]), orientation)


def _content_of(file: Any, name: str) -> bytes:
    """Return the bytes of a file object. Raise DataError if it cannot be read, or has no bytes."""
    try:
        content = file.read()
        if not content:  # just written, and not rewound
            file.seek(0)
            content = file.read()
    except (OSError, ValueError) as problem:
        raise DataError(f"{name} cannot be read: {problem}", hint="give an open file, or its path") from None
    if not isinstance(content, bytes):
        what = f"{name} reads as {type(content).__name__}, expected bytes"
        raise DataError(what, hint='open it in binary mode: open(path, "rb")')
    return content


def _array_of_pil(picture: Any, name: str) -> tuple[np.ndarray, int]:
    """Return the values of a PIL image, [H, W] or [H, W, 3] RGB, and its EXIF orientation."""
    try:
        picture.load()  # PIL rotates TIFF files here
        orientation = picture.getexif().get(0x0112, 1)
        is_deep = picture.mode in ("F", "I") or picture.mode.startswith("I;16")
        array = np.asarray(picture if is_deep else picture.convert("RGB"))
    except (OSError, ValueError, SyntaxError) as problem:
        raise DataError(f"{name} cannot be decoded: {problem}", hint="open it in an image viewer") from None
    if picture.mode == "I":  # PIL opens some files of 16 bits so
        if not (array.min() >= 0 and 255 < array.max() < 1 << 16):
            what = f"{name} has mode I and values from {array.min()} to {array.max()}, expected 16 bits"
            raise DataError(what, hint='convert("L"), if its values are 0 to 255')
        array = array.astype(np.uint16)
    return array, orientation if orientation in range(1, 9) else 1


def _in_8_bits(array: np.ndarray, name: str) -> np.ndarray:
    """Return values as uint8. Raise DataError if their range is unknown."""
    if array.dtype == np.uint8:
        return array
    if array.dtype == np.bool_:
        return array.astype(np.uint8) * 255
    if array.dtype.kind == "u" and array.dtype.itemsize == 2:
        return (array >> 8).astype(np.uint8)
    if array.dtype.kind != "f":
        raise DataError(f"{name} is {array.dtype}, expected uint8", hint="or uint16, or a float in 0..1")
    if not 0 <= array.min() <= array.max() <= 1:
        raise DataError(f"{name} has values outside of 0..1", hint="divide by 255, or give uint8")
    return np.rint(array.astype(np.float32) * 255).astype(np.uint8)


def picture_at(item: Item) -> bytes | None:
    """Return the picture at an http(s) url; None if there is something else, which FFmpeg then reads.

    Redirects lead to http and https only. FFmpeg has the same rule for what it opens for an http url.

    Raises:
        DataError: there is no answer, or the picture is larger than ``MAX_PICTURE_BYTES``.
    """
    if urlsplit(item.address).username is not None:  # urllib would send the password on after a redirect
        return None
    try:
        with open_url(item.address, {}, WAIT_S) as response:
            suffix = Path(urlsplit(item.address).path).suffix.lower()
            kind = response.headers.get_content_type()
            if not (
                kind.startswith("image/")
                or (suffix in IMAGE_SUFFIXES and kind != "multipart/x-mixed-replace")
            ):
                return None
            content: bytes = response.read(MAX_PICTURE_BYTES + 1)
    except (Refused, Transient, OSError, http.client.HTTPException) as problem:
        raise DataError(
            f"cannot read {item.name}: {problem}", hint="check the address, and the network"
        ) from None
    if len(content) > MAX_PICTURE_BYTES:
        raise DataError(f"the picture at {item.name} has more than {size_text(MAX_PICTURE_BYTES)}")
    return content
