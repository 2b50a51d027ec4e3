"""Recognise data sets without a YAML description by the names of their files and folders, and formats that are not read."""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path

from yolofleet.data.datasets.reader import ABSENT, class_list, is_inside, list_lines, spellings
from yolofleet.data.datasets.spec import (
    FORMATS,
    DatasetSpec,
    Splits,
    SplitSource,
    format_of,
    kind_of_files,
    source_of_file,
    with_class_names,
)
from yolofleet.data.datasets.yolorows import RAW_ROWS
from yolofleet.data.datasets.yolotxt import YoloFiles, walk
from yolofleet.data.images.header import IMAGE_SUFFIXES
from yolofleet.storage.foreign import open_foreign
from yolofleet.support.errors import ConfigError, DataError, YolofleetError
from yolofleet.support.text import listed

# the split that a folder of this name holds
_FOLDERS = {"train": "train", "validation": "val", "valid": "val", "val": "val", "test": "test"}


def from_annotations(path: Path) -> DatasetSpec:
    """Return the data set of one annotation file; a file named alike with val instead of train is its val split."""
    val = path.with_name(path.name.replace("train", "val"))
    has_val = val != path and val.is_file()
    train, other = source_of_file(path), source_of_file(val if has_val else path)
    assert train and other, path
    splits: Splits = {"train": (train,), "val": (other,)}
    notes = (f"{val.name} is val",) if has_val else ()
    folder = path.absolute().parent
    root = folder.parent if folder.name == "annotations" else folder
    spec = DatasetSpec(path.stem, (), splits, str(path), root, notes=notes)
    try:
        return with_class_names(spec, names_at=str(path))
    except DataError:
        refuse_other_format(path)
        raise


def from_folder(folder: Path, within: Path | None = None) -> DatasetSpec:
    """Return the data set in a folder of Pascal VOC, COCO, Objects365 or labelme, or as on the Hugging Face hub.

    Raises:
        ConfigError: the folder has none of these layouts.
        DataError: a VOC folder without lists of images.
    """
    name, root = folder.resolve().name, folder.absolute()

    def described(splits: Splits, missing: dict[str, YolofleetError] | None = None) -> DatasetSpec:
        found = DatasetSpec(name, (), splits, str(folder), root, missing=missing or {}, within=within)
        return with_class_names(found, names_at=str(folder))

    for kind in FORMATS:
        splits, missing = format_of(kind).in_folder(root)
        if splits:
            return described(splits, missing)
    labelled = YoloFiles(root)
    if any(about != ABSENT for about in labelled.label_stamps) and (found := _with_names_file(root, name)):
        return found
    if kind := kind_of_files(root, labelled):
        parts = _parts(root, "{}", "images/{}") or dict.fromkeys(("train", "val"), _all_images(root) or root)
        return described({split: (SplitSource(kind, part),) for split, part in parts.items()})
    from yolofleet.data.datasets import huggingface

    if (found := huggingface.from_hub_folder(root)) is not None:
        return with_class_names(found, names_at=str(folder))
    refuse_other_format(root)
    hint = "a data.yaml in it (train, val, names), Pascal VOC (Annotations, JPEGImages, ImageSets), "
    hint += "COCO (annotations/instances_*.json) or labelme (a .json for each image)"
    whole = _all_images(root)
    places = (root, root / "annotations")
    if files := [file for at in places for file in sorted(at.glob("*.json")) if _may_be_coco(file)]:
        shown = listed([str(file.relative_to(root)) for file in files], most=8)
        hint = f"name the file of the labels with --data, or in {root / 'data.yaml'} one for each of train: and val: ({shown})"
    elif parts := _parts(root) or ({"train": whole} if whole else {}):
        names = {split: str(part.relative_to(root)) for split, part in parts.items()}
        names = {**names, **{split: "FOLDER" for split in ("train", "val") if split not in names}}
        lines = "  ".join(f"{split}: {part}" for split, part in names.items())
        hint = f"write {root / 'data.yaml'} with the lines  {lines}  names: [FIRST, SECOND]"
    raise ConfigError(f"folder {folder} is not a data set in a known layout", hint=hint)


def _may_be_coco(file: Path) -> bool:
    """Return whether the first and last 64 KiB of a file have keys of COCO."""
    try:
        with open_foreign(file) as opened:
            text = opened.read(1 << 16)
            opened.seek(max(0, file.stat().st_size - (1 << 16)))
            text += opened.read(1 << 16)
    except OSError:
        return False
    return sum(key in text for key in (b'"images"', b'"annotations"', b'"categories"')) > 1


def _parts(root: Path, *places: str) -> dict[str, Path]:
    """Return the folders of a folder that hold a split: the first one of ``places``, where {} is the name of a split."""
    found: dict[str, Path] = {}
    for name, split in _FOLDERS.items():
        for place in places or ("images/{}", "{}/images", "{}"):
            if (part := root / place.format(name)).is_dir():
                found.setdefault(split, part)
    return found


def _all_images(root: Path) -> Path | None:
    """Return the folder that has all images if no folder has the name of a split."""
    places = [place for place in (root / "images", root / "Images", root) if place.is_dir()]
    is_image = (
        place for place in places for path in place.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES
    )
    return next(is_image, None)


def _with_names_file(root: Path, name: str) -> DatasetSpec | None:
    """Return the data set in a folder with a list of class names, as darknet, CVAT and Label Studio write it; else None.

    The lists of images are those of darknet's ``.data`` file. If there is none, the folders tell the splits apart, or all
    images are both train and val, as with one COCO file.
    """
    stated: dict[str, str] = {}
    for file in sorted(root.glob("*.data"))[:1]:
        pairs = (line.partition("=") for line in list_lines(file))
        stated = {key.strip(): value.strip() for key, _, value in pairs}

    def existing(*options: str) -> Path | None:
        paths = (root / part for option in options if option for part in spellings(option))
        return next((path for path in paths if path.is_file() and is_inside(path, root)), None)

    usual = ("classes.txt", "obj.names", "labels/classes.txt", "train/_darknet.labels")
    names_file = existing(stated.get("names", ""), *usual)
    if names_file is None:
        return None
    lists = {"train": existing(stated.get("train", "")), "val": existing(stated.get("valid", ""))}
    places = {split: path for split, path in lists.items() if path} or _parts(root)
    if not places and (whole := _all_images(root)):
        places = {"train": whole, "val": whole}
    if not places:
        return None
    names = class_list(names_file, root)
    splits: Splits = {split: (SplitSource("yolo", path),) for split, path in places.items()}
    shown = ", ".join(f"{split}: {path.relative_to(root)}" for split, path in places.items())
    notes = (f"no data.yaml: names from {names_file.name}; {shown}",)
    spec = DatasetSpec(name, names, splits, str(root), root, notes=notes)
    return with_class_names(spec, names_at=str(names_file))


_HEAD_BYTES = 1 << 16
_MOST_FILES = 5  # so many files of each suffix show what a folder holds
_COCO = "export COCO there"
_UNREAD = (  # formats that are not read, or not as one file: what only files of this format have in their first 64 KiB, the format, what to do
    (rb'"_via_\w+"|"shape_attributes"|region_shape_attributes', "VIA's project or CSV", _COCO),
    (rb'"schema_ref"|"slots"\s*:\s*\[', "V7's Darwin JSON", _COCO),
    (rb'"classTitle"|"projectType"', "Supervisely's JSON", "export COCO, YOLO or Pascal VOC there"),
    (rb'"data_row"', "Labelbox's NDJSON", "convert it to COCO"),
    (rb'"dm_format_version"|"categories"\s*:\s*\{', "Datumaro's JSON", "datum convert -f coco"),
    (rb'\A\W*\{(?=[^{}]*"image_id")(?=[^{}]*"score")', "COCO's list of detections", "name the annotations"),
    (rb'"coordinates"\s*:\s*\{', "CreateML's JSON", "export COCO, YOLO or Pascal VOC instead"),
    (rb'"original_width"', "Label Studio's JSON", "export YOLO or COCO there"),
    (
        rb"<annotations>\s*<version>",
        "XML of CVAT for images or video",
        "export COCO or Ultralytics YOLO there",
    ),
    (rb'"gtboxes"', "CrowdHuman's .odgt", "convert it to COCO"),
    (rb'"box2d"', "BDD100K's JSON", "convert it to COCO"),
    (rb'(?s)"instances"\s*:\s*\[.*"className"', "SuperAnnotate's JSON", _COCO),
    (rb"\A(PK\x03\x04|\x1f\x8b|Rar!|7z\xbc)", "an archive", "unpack it, and name the folder"),
    (rb"(?i)\A[^\n{<]*,[^\n]*(x_?min|x1|bbox)", "a CSV table", "convert it to COCO or YOLO"),
    *(
        (signs, f"{form} text", f"column {mean}: convert it to COCO or YOLO")
        for signs, form, mean in RAW_ROWS
    ),
    (rb'"shapes"\s*:\s*\[', "labelme's JSON of one image", "name the folder of the files"),
)


def refuse_other_format(path: Path) -> None:
    """Raise ConfigError if a file, or one of the first label files in a folder, has a format that is known but not read."""
    suffixes = (".json", ".ndjson", ".csv", ".xml", ".odgt", ".txt")
    files = [file for suffix in suffixes for file, _ in islice(walk(str(path), (suffix,)), _MOST_FILES)] if path.is_dir() else [str(path)]  # fmt: skip
    for file in files:
        try:
            with open_foreign(file) as opened:
                head = opened.read(_HEAD_BYTES)
        except OSError:
            continue
        for signs, form, way_out in _UNREAD:
            if re.search(signs, head):
                hint = f"{way_out}; docs/label-tools.md has more"
                raise ConfigError(f"{path} cannot be read: {Path(file).name} is {form}", hint=hint)
