"""Data sets as on the Hugging Face hub, in a local folder: ``metadata.jsonl`` beside images, or Parquet files with them.

They are converted to COCO's annotations in the cache folder, once for each state of the files. The images of Parquet files are
written there, too. Nothing is downloaded, and pyarrow executes nothing that a file contains. Parquet files are read without the
package ``datasets``, because that would keep a second copy in a cache of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from yolofleet.data.datasets.annotations import number_of
from yolofleet.data.datasets.reader import class_list, list_lines, stamp
from yolofleet.data.datasets.spec import SPLITS, DatasetSpec, SplitSource
from yolofleet.data.images.header import ImageHeader, header_of_file, read_header
from yolofleet.support.errors import ConfigError, DataError, install_hint
from yolofleet.support.files.atomic import in_turn, whole_folder, writing
from yolofleet.support.files.caches import cache_folder
from yolofleet.support.files.foreign import read_foreign
from yolofleet.support.text import shown

_FORMAT = 1
_SPLIT = re.compile(r"(?i)(?<![a-z])(train|val|test)")  # also of validation
_CATEGORIES = ("category", "categories", "label", "labels", "category_id")


def from_hub_folder(root: Path) -> DatasetSpec | None:
    """Return the data set of a folder of the hub, without its class names; None if it has no such files.

    Raises:
        ConfigError: pyarrow is missing. DataError: other columns, or it is not clear what the boxes mean.
    """
    places = ("metadata.jsonl", "*/metadata.jsonl"), ("*.parquet", "*/*.parquet", "*/*/*.parquet")
    kinds = ([file for place in kind for file in sorted(root.glob(place))] for kind in places)
    files: dict[str, list[Path]] = {}
    for file in next(filter(None, kinds), []):
        match = _SPLIT.search(file.relative_to(root).as_posix())
        files.setdefault(match[1].lower() if match else "train", []).append(file)
    if not files:
        return None
    every = [(str(file), stamp(str(file))) for part in files.values() for file in part]
    names = root / "classes.txt"
    key = json.dumps([_FORMAT, str(root.resolve()), every, stamp(str(names))])
    folder = cache_folder("datasets") / f"hub-{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}"
    with in_turn(folder.with_suffix(".lock")):
        if not folder.is_dir():
            with writing(folder), whole_folder(folder) as made:
                _Conversion(root, made).run(files)
    note = json.loads(read_foreign(folder / "note.json", limit_bytes=1 << 16))
    splits: dict[str, tuple[SplitSource, ...]] = {
        split: (SplitSource("coco", folder / f"{split}.json", (folder, root)),)
        for split in SPLITS
        if split in files
    }
    return DatasetSpec(root.resolve().name, (), splits, str(root), root, notes=(note,))


class _Conversion:
    """Writes COCO's annotations of each split of ``root``, and a note about what was assumed, into ``folder``."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.folder = root, folder
        self.names = list(class_list(root / "classes.txt", root))
        self.sizes: list[tuple[int, int]] = []  # of the image of each box, pixels; 0 if it cannot be read

    def run(self, files: Mapping[str, Sequence[Path]]) -> None:
        tables: dict[str, dict[str, list[dict[str, Any]]]] = {}
        for split, part in files.items():
            table = tables[split] = {"images": [], "annotations": []}
            for file in part:
                rows = self._parquet(file, split) if file.suffix == ".parquet" else self._jsonl(file)
                for name, header, objects in rows:
                    at = {"image_id": len(table["images"])}
                    table["images"].append({"id": at["image_id"], "file_name": name})
                    table["annotations"] += [{**at, "bbox": b, "category_id": c} for b, c in objects]
                    self.sizes += [header.size_wh if header else (0, 0)] * len(objects)
        labels = [label for table in tables.values() for label in table["annotations"]]
        used = {label["category_id"] for label in labels}
        has_names = any(isinstance(category, str) for category in used)
        ids = sorted(map(str, used)) if has_names else sorted({*used, *range(len(self.names))}, key=number_of)
        named: dict[Any, str] = dict(enumerate([] if has_names else self.names))
        are_corners = self._are_corners([label["bbox"] for label in labels])
        for number, label in enumerate(labels):
            label["id"] = number + 1
            label["category_id"] = str(label["category_id"]) if has_names else label["category_id"]
            if are_corners and isinstance(label["bbox"], list) and len(label["bbox"]) == 4:
                x1, y1, x2, y2 = map(number_of, label["bbox"])
                label["bbox"] = [x1, y1, x2 - x1, y2 - y1]
        note = f"boxes are taken as {'x1, y1, x2, y2' if are_corners else 'x, y, width, height'}"
        if not (has_names or named):
            note += "; classes are named by their numbers: a classes.txt in the folder names them"
        (self.folder / "note.json").write_text(json.dumps(note), encoding="ascii")
        categories = [{"id": one, "name": named.get(one, str(one))} for one in ids]
        for split, table in tables.items():
            text = json.dumps({**table, "categories": categories})
            (self.folder / f"{split}.json").write_text(text, encoding="ascii")

    def _are_corners(self, boxes: Sequence[Any]) -> bool:
        """Return whether boxes are x1, y1, x2, y2 and not x, y, width, height; both are usual. Raises DataError.

        Only one of them lets all boxes lie in their images with a width and a height. The second is documented for the hub,
        so it is taken if both do.
        """
        rows = [
            (*map(number_of, box), *(1.01 * side + 1 for side in size))
            for box, size in zip(boxes, self.sizes, strict=True)
            if isinstance(box, list) and len(box) == 4 and all(size)
        ]
        x, y, a, b, width, height = np.array(rows, np.float64).reshape(-1, 6).T
        as_sides = int(((x + a > width) | (y + b > height)).sum())
        as_corners = int(((a < x) | (b < y) | (a > width) | (b > height)).sum())
        if min(as_sides, as_corners) * 100 > len(rows):
            what = f"of {len(rows)} boxes, {as_sides} do not fit their images as x, y, width, height in pixels, and {as_corners} not as x1, y1, x2, y2"
            raise DataError(
                what, source=str(self.root), hint="convert the labels to COCO or YOLO (docs/data.md)"
            )
        return as_corners < as_sides

    def _jsonl(self, file: Path) -> Iterator[_Row]:
        for number, line in enumerate(list_lines(file), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                image = file.parent / row["file_name"]
            except (ValueError, TypeError, LookupError, RecursionError):
                raise DataError(f"{file}:{number} is not a JSON object with file_name") from None
            header = None  # the reader reports an image that cannot be read
            with suppress(OSError, ValueError):
                header = header_of_file(str(image))
            yield os.path.relpath(image, self.root), header, _objects(row, f"{file}:{number}")

    def _parquet(self, file: Path, split: str) -> Iterator[_Row]:
        """Yield the rows, and write their images."""
        try:
            import pyarrow.parquet as parquet
        except ImportError:
            hint = f"{install_hint('parquet')}, or convert it to COCO or YOLO"
            raise ConfigError(f"{file} is a Parquet file, which pyarrow reads", hint=hint) from None
        (self.folder / split).mkdir(exist_ok=True)
        number = 0
        try:
            opened = parquet.ParquetFile(file)
            about = (opened.schema_arrow.metadata or {}).get(b"huggingface", b"{}")
            self.names = next(_class_names(json.loads(about)), self.names)
            for batch in opened.iter_batches(batch_size=16, columns=["image", "objects"]):
                for row in batch.to_pylist():
                    number += 1
                    data = row["image"]["bytes"]
                    name = f"{split}/{file.stem}-{number:08d}.jpg"  # decoders look at the content
                    (self.folder / name).write_bytes(data)
                    yield name, read_header(data), _objects(row, f"{file}, row {number}")
        except (OSError, ValueError, TypeError, LookupError) as error:  # ArrowInvalid is a ValueError
            what = f"{file} cannot be read as rows with image and objects: {type(error).__name__} {str(error).partition(chr(10))[0]}"
            raise DataError(what, hint="convert it to COCO or YOLO (docs/data.md)") from None


_Row = tuple[
    str, ImageHeader | None, list[tuple[Any, Any]]
]  # file name, header, (box, category) of each object


def _objects(row: Mapping[str, Any], place: str) -> list[tuple[Any, Any]]:
    """Return box and category of each object: a table of two columns, or a list of tables. Raises DataError."""
    given: Any = row.get("objects")
    found: list[tuple[Any, Any]] = []
    try:
        for part in given if isinstance(given, list) else [given]:
            key = next(name for name in _CATEGORIES if name in part)
            columns = ([part["bbox"]], [part[key]]) if isinstance(given, list) else (part["bbox"], part[key])
            found += zip(*columns, strict=True)
    except (TypeError, LookupError, StopIteration, ValueError):
        what = f"{place}: objects is {shown(given)}, without a bbox and a category of each object"
        raise DataError(what, hint="objects: {bbox: [[x, y, width, height]], categories: [0]}") from None
    if bad := [category for _, category in found if type(category) not in (int, str)]:
        raise DataError(
            f"{place}: category {shown(bad[0])} is neither a number nor a name", hint="correct it"
        )
    return found


def _class_names(features: Any) -> Iterator[list[str]]:
    """Yield the names of the ClassLabel features below a value of the file's metadata."""
    if isinstance(features, dict):
        if features.get("_type") == "ClassLabel" and isinstance(features.get("names"), list):
            yield list(map(str, features["names"]))
        features = list(features.values())
    for value in features if isinstance(features, list) else ():
        yield from _class_names(value)
