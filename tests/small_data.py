"""Small data sets that tests write for themselves."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import cv2
import numpy as np

ODD_NAMES = ("plain", "with space", 'it\'s "quoted"', "Übung-猫", "a.b.c")


def picture(width: int, height: int, seed: int = 0) -> np.ndarray:
    """uint8 [height, width, 3], smooth, with something to see."""
    noise = np.random.default_rng(seed).integers(0, 256, (max(2, height // 8), max(2, width // 8), 3))
    return cv2.resize(noise.astype(np.uint8), (width, height), interpolation=cv2.INTER_LINEAR)


def encoded(image: np.ndarray, suffix: str = ".jpg") -> bytes:
    done, data = cv2.imencode(suffix, image)
    assert done
    return data.tobytes()


def write_picture(path: Path, width: int = 64, height: int = 48, seed: int = 0) -> Path:
    """The format is that of the suffix; the name may be any."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoded(picture(width, height, seed), path.suffix))
    return path


def exif(orientation: int, order: str = "<") -> bytes:
    """A TIFF structure with one tag, as EXIF data is."""
    mark = b"II" if order == "<" else b"MM"
    head = mark + struct.pack(order + "HI", 42, 8)
    return head + struct.pack(order + "HHHIHHI", 1, 0x0112, 3, 1, orientation, 0, 0)


def with_exif_jpeg(data: bytes, orientation: int, order: str = "<") -> bytes:
    body = b"Exif\0\0" + exif(orientation, order)
    return data[:2] + b"\xff\xe1" + struct.pack(">H", len(body) + 2) + body + data[2:]


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def with_exif_png(data: bytes, orientation: int) -> bytes:
    return data[:33] + png_chunk(b"eXIf", exif(orientation)) + data[33:]  # behind IHDR


def with_exif_webp(data: bytes, orientation: int, size_wh: tuple[int, int]) -> bytes:
    """``data`` is a simple WebP file; becomes an extended one."""
    width, height = (side - 1 for side in size_wh)
    wide = bytes([8, 0, 0, 0]) + width.to_bytes(3, "little") + height.to_bytes(3, "little")
    body = exif(orientation)
    chunks = b"VP8X" + struct.pack("<I", 10) + wide + data[12:]
    chunks += b"EXIF" + struct.pack("<I", len(body)) + body
    return b"RIFF" + struct.pack("<I", len(chunks) + 4) + b"WEBP" + chunks


def yolo_set(root: Path, labels: dict[str, str | None], *, names: str = "[cat, dog, 'bird']") -> Path:
    """A YAML, and ``images/train/<name>.jpg`` of 64 x 48 pixels with these label texts; None: no label file.

    Returns:
        the YAML.
    """
    for number, (name, text) in enumerate(labels.items()):
        write_picture(root / "images" / "train" / f"{name}.jpg", seed=number)
        if text is not None:
            path = root / "labels" / "train" / f"{name}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    yaml = root / "data.yaml"
    root.mkdir(parents=True, exist_ok=True)
    yaml.write_text(f"train: images/train\nval: images/train\nnames: {names}\n", encoding="utf-8")
    return yaml


def voc_object(name: str, corners: Sequence[object], more: str = "") -> str:
    """An object of an annotation of Pascal VOC; corners are xmin, ymin, xmax, ymax."""
    tags = zip(("xmin", "ymin", "xmax", "ymax"), corners, strict=True)
    box = "".join(f"<{tag}>{value}</{tag}>" for tag, value in tags)
    return f"<object><name>{name}</name>{more}<bndbox>{box}</bndbox></object>"


def voc_set(root: Path, objects: Mapping[str, str | None], **lists: Iterable[str]) -> Path:
    """A folder of Pascal VOC: images of 64 x 48 pixels with these objects, None without an annotation; lists of their names
    by split, of all in train and val if none is given."""
    for number, (name, text) in enumerate(objects.items()):
        write_picture(root / "JPEGImages" / f"{name}.jpg", seed=number)
        path = root / "Annotations" / f"{name}.xml"
        path.parent.mkdir(exist_ok=True)
        if text is not None:
            path.write_text(f"<annotation>{text}</annotation>", encoding="utf-8")
    for split, names in (lists or {"train": objects, "val": objects}).items():
        path = root / "ImageSets" / "Main" / f"{split}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{name}\n" for name in names))
    return root
