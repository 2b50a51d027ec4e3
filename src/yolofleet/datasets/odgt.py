"""CrowdHuman's ``.odgt``: one JSON object a line, ``{"ID": ..., "gtboxes": [{"tag", "fbox", "vbox", "hbox", ...}]}``.

Each person has three boxes (x, y, w, h in pixels), and the class names choose among them: ``person`` is the full body
(clipped to the image), ``visible`` its visible part, ``head`` the head. Objects that are not persons (``mask``), and
those marked ``ignore``, become crowd regions, as in the benchmark (arXiv:1805.00123).
"""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from yolofleet.datasets.cocojson import CocoFiles, CocoTable, TableBuilder, load_table, number_of
from yolofleet.datasets.labels import ProblemLog, RawLabels
from yolofleet.errors import ConfigError, DataError
from yolofleet.files.foreign import open_foreign

BOXES = {"person": "fbox", "visible": "vbox", "head": "hbox"}
NAMES = tuple(BOXES)
_MAX_LINE_BYTES = 16 << 20
_HINT = "use CrowdHuman's annotation_train.odgt or annotation_val.odgt"


class OdgtFiles(CocoFiles):
    """Images and labels of one file, in its order. The id of an image is its line number."""

    def __init__(self, path: Path, roots: tuple[Path, ...], names: tuple[str, ...]) -> None:
        """Find the images; ``names`` are the classes, of ``NAMES``. Raises DataError if the file is not usable."""
        super().__init__(load_table(path, parse_odgt), roots, tuple(NAMES.index(name) for name in names))

    def rows(self, start: int, stop: int, sizes_wh: np.ndarray, log: ProblemLog) -> RawLabels:
        """Read the labels of images ``start:stop``: only boxes of the chosen classes, clipped to the image."""
        raw = super().rows(start, stop, sizes_wh, log)
        mine = raw.values[:, 0] >= 0
        values = raw.values[mine]
        low, high = values[:, 1:3] - values[:, 3:] / 2, values[:, 1:3] + values[:, 3:] / 2
        # False for NaN, too: such a box stays as it is, and the index reports it.
        inside = (high > np.maximum(low, 0)).all(1) & (low < 1).all(1)
        low, high = low[inside].clip(0, 1), high[inside].clip(0, 1)
        values[inside, 1:] = np.concatenate([(low + high) / 2, high - low], axis=1)
        return RawLabels(
            raw.image[mine],
            raw.mark[mine],
            values,
            raw.crowd[mine],
            raw.area_px[mine],
            int((np.bincount(raw.image[mine], minlength=stop - start) == 0).sum()),
        )

    def place(self, image: int, mark: int) -> tuple[str, int | None, str]:
        return self.table.path, int(self.table.image_ids[image]), f"object {mark}: "


def chosen_names(names: tuple[str, ...], source: str | None) -> tuple[str, ...]:
    """Return the class names of a data set; default: ``person``. Raises ConfigError for a name not in ``NAMES``."""
    for name in names:
        if name not in NAMES:
            raise ConfigError(f"CrowdHuman has no class {name!r:.60}", source=source, hint=", ".join(NAMES))
    return names or NAMES[:1]


def parse_odgt(path: str) -> CocoTable:
    """Parse all three boxes of every object; the category is the position in ``NAMES``. Raises DataError."""
    builder = TableBuilder()
    try:
        with open_foreign(path) as file:
            for number in itertools.count(1):
                line = file.readline(_MAX_LINE_BYTES)
                if not line:
                    break
                if line.strip(b" \t\r\n\xef\xbb\xbf"):
                    _add_line(builder, line, number, f"{path}:{number}")
    except (OSError, MemoryError) as error:
        raise DataError(f"annotations {path} cannot be read: {error}", hint=_HINT) from None
    return builder.table(path, dict(enumerate(NAMES)))


def _add_line(builder: TableBuilder, line: bytes, number: int, place: str) -> None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place} is not JSON: {error}", hint=_HINT) from None
    if not isinstance(entry, dict) or not isinstance(entry.get("ID"), str) or not entry["ID"]:
        raise DataError(f"{place} is not an object with an ID", hint=_HINT)
    objects = entry.get("gtboxes", [])
    if not isinstance(objects, list) or not all(isinstance(thing, dict) for thing in objects):
        raise DataError(f"{place} has a gtboxes that is not a list of objects", hint=_HINT)
    builder.add_image(number, f"{entry['ID']}.jpg", 0, 0)
    for at, thing in enumerate(objects, 1):
        is_person = thing.get("tag") == "person"
        for category, (name, key) in enumerate(BOXES.items()):
            ignored = _flag(thing, "head_attr" if name == "head" else "extra")
            box = _box(thing.get(key))
            builder.add_box(number, at, category, box, not is_person or ignored, math.nan)


def _flag(thing: dict[str, Any], key: str) -> bool:
    attributes = thing.get(key)
    return isinstance(attributes, dict) and bool(attributes.get("ignore"))


def _box(values: Any) -> list[float]:
    """Return x, y, w, h; NaN if there is no box, so that it is reported only if its class is chosen."""
    if not isinstance(values, list) or len(values) != 4:
        return [math.nan] * 4
    return [number_of(value) for value in values]
