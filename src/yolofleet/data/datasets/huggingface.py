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

from yolofleet.data.datasets.annotations import number_of
from yolofleet.data.datasets.reader import class_list, list_lines, stamp
from yolofleet.data.datasets.spec import SPLITS, DatasetSpec, SplitSource
from yolofleet.data.images.header import ImageHeader, header_of_file, read_header
from yolofleet.storage.atomic import in_turn, whole_folder, writing
from yolofleet.storage.caches import cache_folder
from yolofleet.storage.foreign import read_foreign
from yolofleet.support.errors import ConfigError, DataError, install_hint
from yolofleet.support.text import listed, shown, size_text

_FORMAT = 2
_MOST_TIMES, _ANY_FILE_BYTES = 100, 1 << 26  # content of a Parquet file, by its size; allowed for any
_SPLIT = re.compile(r"(?i)(?<![a-z])(train|val|test)")  # also of validation
_CATEGORIES = ("category", "categories", "label", "labels", "category_id")


def from_hub_folder(root: Path) -> DatasetSpec | None:
    """Return the data set of a folder of the hub, without its class names; None if it has no such files.

    Raises:
        ConfigError: pyarrow is missing. DataError: other columns.
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
    return DatasetSpec(root.resolve().name, (), splits, str(root), root, notes=(note,) if note else ())


class _Conversion:
    """Writes COCO's annotations of each split of ``root``, and a note about what was assumed, into ``folder``."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.folder = root, folder
        self.names = list(class_list(root / "classes.txt", root))
        self.file_of_names: Path | None = None  # the Parquet file that ``names`` are from

    def run(self, files: Mapping[str, Sequence[Path]]) -> None:
        tables: dict[str, dict[str, list[dict[str, Any]]]] = {}
        for split, part in files.items():
            table = tables[split] = {"images": [], "annotations": []}
            for file in part:
                rows = self._parquet(file, split) if file.suffix == ".parquet" else self._jsonl(file)
                for name, header, objects in rows:
                    at = {"image_id": len(table["images"])}
                    width, height = header.size_wh if header else (0, 0)
                    size = {"width": width, "height": height}  # show which corners or sides the boxes are
                    table["images"].append({"id": at["image_id"], "file_name": name, **size})
                    table["annotations"] += [{**at, "bbox": b, "category_id": c} for b, c in objects]
        labels = [label for table in tables.values() for label in table["annotations"]]
        used = {label["category_id"] for label in labels}
        has_names = any(isinstance(category, str) for category in used)
        ids = sorted(map(str, used)) if has_names else sorted({*used, *range(len(self.names))}, key=number_of)
        named: dict[Any, str] = dict(enumerate([] if has_names else self.names))
        for number, label in enumerate(labels):
            label["id"] = number + 1
            label["category_id"] = str(label["category_id"]) if has_names else label["category_id"]
        note = "classes are named by their numbers: a classes.txt in the folder names them"
        note = "" if has_names or named else note
        (self.folder / "note.json").write_text(json.dumps(note), encoding="ascii")
        categories = [{"id": one, "name": named.get(one, str(one))} for one in ids]
        for split, table in tables.items():
            text = json.dumps({**table, "categories": categories})
            (self.folder / f"{split}.json").write_text(text, encoding="ascii")

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
        number, written = 0, 0
        # two configurations of a data set may have files of one name
        folder = f"{split}/{file.relative_to(self.root).with_suffix('').as_posix()}"
        try:
            opened = parquet.ParquetFile(file)
            most = _MOST_TIMES * file.stat().st_size + _ANY_FILE_BYTES
            groups = [opened.metadata.row_group(at) for at in range(opened.metadata.num_row_groups)]
            self._check_size(sum(group.total_byte_size for group in groups), most, file)
            about = (opened.schema_arrow.metadata or {}).get(b"huggingface", b"{}")
            self._take_names(next(_class_names(json.loads(about)), []), file)
            (self.folder / folder).mkdir(parents=True)
            for batch in opened.iter_batches(batch_size=1, columns=["image", "objects"]):
                for row in batch.to_pylist():
                    number += 1
                    data = row["image"]["bytes"]
                    self._check_size(written := written + len(data), most, file)  # equal rows are stored once
                    name = f"{folder}/{number:08d}.jpg"  # decoders look at the content
                    (self.folder / name).write_bytes(data)
                    yield name, read_header(data), _objects(row, f"{file}, row {number}")
        except (OSError, ValueError, TypeError, LookupError) as error:  # ArrowInvalid is a ValueError
            what = f"{file} cannot be read as rows with image and objects: {type(error).__name__} {str(error).partition(chr(10))[0]}"
            raise DataError(what, hint="convert it to COCO or YOLO (docs/data.md)") from None

    def _check_size(self, size_bytes: int, most_bytes: int, file: Path) -> None:
        """Raise DataError if a file has more content than images, which hardly shrink, can have."""
        if size_bytes > most_bytes:
            what = f"{file} has {size_text(size_bytes)} of content in {size_text(file.stat().st_size)}"
            raise DataError(what, hint=f"images are compressed already: the limit is {size_text(most_bytes)}")

    def _take_names(self, names: list[str], file: Path) -> None:
        """Take the class names of a Parquet file. Raise DataError if another file numbers other names."""
        if names and self.file_of_names and names != self.names:
            what = f"{file} has the classes {listed(names, most=8)}; {self.file_of_names} has {listed(self.names, most=8)}"
            hint = "name the folder of one configuration with --data; yolofleet data merge joins several"
            raise DataError(what, hint=hint)
        if names:
            self.names, self.file_of_names = names, file


# file name, header, (box, category) of each object
_Row = tuple[str, ImageHeader | None, list[tuple[Any, Any]]]


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
