"""The metadata of an exported file: stored inside the file if the format allows it, else beside it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from yolofleet import __version__
from yolofleet.storage.atomic import write_text
from yolofleet.storage.foreign import read_foreign_text
from yolofleet.support.errors import CheckpointError

KEY = "yolofleet"  # name of the entry with the metadata, in every format
VERSION = 1
MAX_TEXT = 16 * 2**20  # characters
MAX_CLASSES = 100_000
MAX_SIDE_PX = 100_000
MAX_BATCH = 4096
MAX_PIXELS = 2**27  # of all images of a batch: 1.5 GiB as float32
IMAGES, DECODED, BOXES, ROWS = "images", "decoded", "boxes", "rows"  # names of the input and of the outputs
COMPUTES = {  # by the last output
    DECODED: "images [N, 3, H, W] float32 RGB in 0..1 -> decoded [N, K, 5 + C] float32: cx, cy, w, h in pixels of the "
    "input, objectness, class probabilities; score = objectness x probability",
    BOXES: "images [N, 3, H, W] float32 RGB in 0..1 -> boxes [N, max_det, 6] float32: x1, y1, x2, y2 in pixels of the "
    "input, score, class; best first, then rows of zeros",
    ROWS: "images [N, 3, H, W] float32 RGB in 0..1 -> rows [N, K, 6] float32: x1, y1, x2, y2 in pixels of the input, best "
    "score, its class",
}
COMPUTES["prototypes"] = (
    f"{COMPUTES[DECODED]}; coefficients [N, K, D] and prototypes [N, D, H / 4, W / 4]: inside a mask, within its box, their product "
    "is above 0"
)
NO_NMS = "; boxes need no suppression, so only the scores choose among them"


def printable(text: str) -> str:
    """Return at most 200 characters of a text from a file, without control characters."""
    return "".join(c if c.isprintable() else "?" for c in text[:200])


# checked in files, see `ExportMetadata.from_json`
Word = Annotated[str, AfterValidator(printable)]
Share = Annotated[float, Field(ge=0, le=1)]
Side = Annotated[int, Field(ge=1, le=MAX_SIDE_PX)]
Stride = Annotated[int, Field(ge=1, le=4096)]


@dataclass(frozen=True)
class Suppression:
    """Settings of non-maximum suppression (NMS) inside a file, as of ``data.geometry.nms.detections``.

    Each prediction counts for its best class only.
    """

    conf: Share
    iou: Share
    max_det: Annotated[int, Field(ge=1, le=1_000_000)]
    agnostic: bool


@dataclass(frozen=True)
class ExportMetadata:
    """The metadata of an exported file.

    Attributes:
        family, model: of the network; family "unknown" for a file of another program.
        strides: of the levels, pixels.
        size_hw: height and width of the input images, pixels; None: any multiples of the largest stride.
        sides_px: the smallest and the largest side that a file of any size was verified with; None: a fixed size, or unknown.
        batch: images per call; None: any number.
        half: the file computes in 16 bits; inputs and outputs are float32.
        trained_px: image size in training, pixels; None: unknown.
        assumed: what the reader of the weights assumed, see ``WeightsHeader.assumed``.
        int8: its convolutions compute in 8 bits, except for the last ones; inputs and outputs are float32.
        nms: suppression inside the file; None: the output is all decoded predictions.
        task: what the network finds. outputs: names of decoded predictions, before suppression.
        needs_nms: boxes of decoded predictions need suppression, see ``Detector``.
    """

    family: Word
    model: Word
    names: Annotated[tuple[Word, ...], Field(min_length=1, max_length=MAX_CLASSES)]
    strides: Annotated[tuple[Stride, ...], Field(min_length=1, max_length=16)]
    size_hw: tuple[Side, Side] | None
    batch: Annotated[int, Field(ge=1, le=MAX_BATCH)] | None
    half: bool = False
    nms: Suppression | None = None
    # files of earlier versions do not have these
    int8: bool = False
    trained_px: Side | None = None
    needs_nms: bool = True
    assumed: Annotated[dict[Word, Word], Field(max_length=8)] = field(default_factory=dict)
    sides_px: tuple[Side, Side] | None = None
    task: Word = "boxes"
    outputs: Annotated[tuple[Word, ...], Field(min_length=1, max_length=16)] = (DECODED,)
    version: int = VERSION

    @property
    def stride(self) -> int:
        """The largest stride, pixels; image sides are multiples of it."""
        return max(self.strides)

    def to_dict(self) -> dict[str, Any]:
        """Return the values for JSON."""
        computes = COMPUTES.get(
            BOXES if self.nms else self.outputs[-1], f"decoded predictions of {self.task}"
        )
        computes += "" if self.needs_nms else NO_NMS
        return {"yolofleet": __version__, **asdict(self), "computes": computes}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str | None, *, source: str, kind: str = "a file") -> ExportMetadata:
        """Return checked metadata from the JSON text of a file.

        Args:
            text: None or "": the file has none.
            kind: of the file, for that error.
        Raises:
            CheckpointError: the text is not as :meth:`to_json` writes it.
        """
        if not text:
            raise CheckpointError(
                f"{source} is {kind} without metadata of yolofleet, so its output format is unknown",
                hint="export the weights with yolofleet export",
            )
        if len(text) > MAX_TEXT:
            raise CheckpointError(
                f"{source}: its metadata has {len(text):,} characters, expected at most {MAX_TEXT:,}"
            )
        try:
            metadata = _ADAPTER.validate_json(text, strict=True)
        except ValidationError as problem:
            first = problem.errors(include_input=False, include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise CheckpointError(
                f"{source} has invalid metadata: {where} {first['msg'][:100]}", hint="export it again"
            ) from None
        if metadata.version != VERSION:
            raise CheckpointError(
                f"{source} has metadata of an unknown version", hint="export it again with this version"
            )
        if (metadata.batch or 1) * prod(metadata.size_hw or (1,)) > MAX_PIXELS:
            raise CheckpointError(
                f"{source} has invalid metadata: images of more than {MAX_PIXELS:,} pixels at once",
                hint="export it again",
            )
        return metadata


_ADAPTER = TypeAdapter(ExportMetadata)


# -- the file beside an export whose format cannot store metadata


def metadata_file_of(path: Path) -> Path:
    """Return the path of the metadata of an exported file or folder."""
    return path / f"{KEY}.json" if path.is_dir() else path.with_name(path.name + ".json")


def write_metadata_file(path: Path, metadata: ExportMetadata) -> None:
    """Write the metadata of the exported file or folder ``path``."""
    write_text(metadata_file_of(path), metadata.to_json() + "\n")


def read_metadata_file(path: Path) -> ExportMetadata:
    """Return the metadata of the exported file or folder ``path``. Raise CheckpointError if its file is missing or invalid."""
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
