"""The metadata of an exported file: stored inside the file if the format allows it, else beside it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from yolofleet import __version__
from yolofleet.errors import CheckpointError
from yolofleet.files.atomic import write_text
from yolofleet.files.foreign import read_foreign_text

KEY = "yolofleet"  # name of the entry with the metadata, in every format
VERSION = 1
MAX_TEXT = 16 * 2**20  # characters
MAX_CLASSES = 100_000
MAX_SIDE_PX = 100_000
MAX_BATCH = 4096
MAX_PIXELS = 2**27  # of all images of a batch: 1.5 GiB as float32
IMAGES, DECODED, BOXES = "images", "decoded", "boxes"  # names of the input and of the outputs
COMPUTES = {
    DECODED: "images [N, 3, H, W] float32 RGB in 0..1 -> decoded [N, K, 5 + C] float32: cx, cy, w, h in pixels of the "
    "input, objectness, class probabilities; score = objectness x probability",
    BOXES: "images [N, 3, H, W] float32 RGB in 0..1 -> boxes [N, max_det, 6] float32: x1, y1, x2, y2 in pixels of the "
    "input, score, class; best first, then rows of zeros",
}


@dataclass(frozen=True)
class Suppression:
    """Settings of non-maximum suppression (NMS) inside a file, as of ``geometry.nms.detections``.

    Each prediction counts for its best class only.
    """

    conf: float
    iou: float
    max_det: int
    agnostic: bool


@dataclass(frozen=True)
class ExportMetadata:
    """The metadata of an exported file.

    Attributes:
        family, model: of the network; family "unknown" for a file of another program.
        names: class names.
        strides: of the levels, pixels.
        size_hw: height and width of the input images, pixels; None: any multiples of the largest stride.
        batch: images per call; None: any number.
        half: the file computes in 16 bits; inputs and outputs are float32.
        int8: its convolutions compute in 8 bits, except for the last ones; inputs and outputs are float32.
        nms: suppression inside the file; None: the output is all decoded predictions.
    """

    family: str
    model: str
    names: tuple[str, ...]
    strides: tuple[int, ...]
    size_hw: tuple[int, int] | None
    batch: int | None
    half: bool = False
    nms: Suppression | None = None
    int8: bool = False

    @property
    def output(self) -> str:
        return DECODED if self.nms is None else BOXES

    @property
    def stride(self) -> int:
        """The largest stride, pixels; image sides are multiples of it."""
        return max(self.strides)

    def to_json(self) -> str:
        values = {
            "version": VERSION,
            "yolofleet": __version__,
            **asdict(self),
            "computes": COMPUTES[self.output],
        }
        return json.dumps(values, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str, *, source: str) -> ExportMetadata:
        """Return checked metadata from the JSON text of a file.

        Raises:
            CheckpointError: the text is not as :meth:`to_json` writes it.
        """
        if len(text) > MAX_TEXT:
            raise CheckpointError(
                f"{source}: its metadata has {len(text):,} characters, expected at most {MAX_TEXT:,}"
            )
        try:
            values = json.loads(text)
            if values["version"] != VERSION:
                raise CheckpointError(
                    f"{source} has metadata of an unknown version",
                    hint="export it again with this version",
                )
            nms, size, batch = values["nms"], values["size_hw"], values["batch"]
            metadata = cls(
                family=_word(values["family"]),
                model=_word(values["model"]),
                names=class_names(values["names"]),
                strides=tuple(_whole(s, 4096) for s in values["strides"]),
                size_hw=None
                if size is None
                else (_whole(size[0], MAX_SIDE_PX), _whole(size[1], MAX_SIDE_PX)),
                batch=None if batch is None else _whole(batch, MAX_BATCH),
                half=values["half"] is True,
                nms=None if nms is None else _suppression(nms),
                int8=values.get("int8") is True,  # files of earlier versions do not have it
            )
            if not 1 <= len(metadata.strides) <= 16:
                raise ValueError(f"{len(metadata.strides)} strides")
            if (metadata.batch or 1) * prod(metadata.size_hw or (1,)) > MAX_PIXELS:
                raise ValueError(f"images of more than {MAX_PIXELS:,} pixels at once")
            return metadata
        except (ValueError, TypeError, KeyError, IndexError, RecursionError) as problem:
            raise CheckpointError(
                f"{source} has invalid metadata: {str(problem)[:100]}", hint="export it again"
            ) from None


def class_names(values: Any) -> tuple[str, ...]:
    """Return the names without control characters.

    Raises:
        ValueError, TypeError: ``values`` is not a list of 1 to 100,000 strings.
    """
    if not isinstance(values, (list, tuple)) or not 1 <= len(values) <= MAX_CLASSES:
        raise ValueError("expected a list of class names")
    return tuple(_word(name) for name in values)


def _word(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {str(value)[:40]}")
    return "".join(c if c.isprintable() else "?" for c in value[:200])


def _whole(value: Any, most: int) -> int:
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f"expected a whole number from 1 to {most:,}, got {str(value)[:40]}")
    return value


def _unit(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= 1:
        raise ValueError(f"expected a threshold from 0 to 1, got {str(value)[:40]}")
    return float(value)


def _suppression(values: Any) -> Suppression:
    return Suppression(
        _unit(values["conf"]),
        _unit(values["iou"]),
        _whole(values["max_det"], 1_000_000),
        values["agnostic"] is True,
    )


# -- the file beside an export whose format cannot store metadata


def metadata_file_of(path: Path) -> Path:
    """Return the path of the metadata of an exported file or folder."""
    return path / f"{KEY}.json" if path.is_dir() else path.with_name(path.name + ".json")


def write_metadata_file(path: Path, metadata: ExportMetadata) -> None:
    """Write the metadata of the exported file or folder ``path``."""
    write_text(metadata_file_of(path), metadata.to_json() + "\n")


def read_metadata_file(path: Path) -> ExportMetadata:
    """Return the metadata of the exported file or folder ``path``.

    Raises:
        CheckpointError: the metadata file is missing or invalid.
    """
    file = metadata_file_of(path)
    try:
        text = read_foreign_text(file, limit_bytes=4 * MAX_TEXT, encoding="utf-8")
    except (OSError, ValueError) as problem:
        words = getattr(problem, "strerror", None) or "it is not text in UTF-8"
        raise CheckpointError(
            f"{path} has no metadata: cannot read {file}: {words}",
            hint="copy both files together, or export the weights with yolofleet export",
        ) from None
    return ExportMetadata.from_json(text, source=str(file))
