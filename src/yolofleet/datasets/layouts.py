"""Recognise data sets without a YAML description by the names of their files and folders."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from yolofleet.datasets.other_formats import refuse_other_format
from yolofleet.datasets.spec import SPLITS, DatasetSpec, SplitSource, with_class_names
from yolofleet.datasets.yolotxt import YoloFiles
from yolofleet.errors import ConfigError, DataError, YolofleetError

# the split that a folder of this name holds
_FOLDERS = {"train": "train", "validation": "val", "valid": "val", "val": "val", "test": "test"}

# a path near the top of a folder: a description, or labels, also those that `refuse_other_format` names
_DESCRIBES = re.compile(r"[^/]+\.ya?ml|([^/]+/){0,2}[^/]+\.(json|ndjson|csv|xml)", re.IGNORECASE)


def from_annotations(path: Path) -> DatasetSpec:
    """Return the data set of one annotation file; a file named alike with val instead of train is its val split."""
    other, notes = path.with_name(path.name.replace("train", "val")), tuple[str, ...]()
    if other != path and other.is_file():
        notes = (f"{other.name} is val",)
    else:
        other = path
    splits: dict[str, tuple[SplitSource, ...]] = {
        "train": (annotation_source(path),),
        "val": (annotation_source(other),),
    }
    folder = path.absolute().parent
    root = folder.parent if folder.name == "annotations" else folder
    spec = DatasetSpec(path.stem, (), splits, str(path), root, notes=notes)
    try:
        return with_class_names(spec, names_at=str(path))
    except DataError:
        refuse_other_format(path)
        raise


def annotation_source(path: Path, *folders: Path) -> SplitSource:
    """Return a COCO file with the folders that may hold its images.

    Args:
        folders: where to look beside the file's own folder and its parent.
    """
    part = re.sub(r"^(instances|image_info|person_keypoints|zhiyuan_objv2)_", "", path.stem)
    parent = path.absolute().parent
    below = ("", "images", "Images", part, f"images/{part}", f"{part}/images")  # part: for example train2017
    roots = dict.fromkeys(root / name for root in (parent, parent.parent, *folders) for name in below)
    return SplitSource("coco", path, tuple(roots))


def from_folder(folder: Path) -> DatasetSpec:
    """Return the data set in a folder of Pascal VOC, COCO, Objects365 or labelme.

    Raises:
        ConfigError: the folder has none of these layouts.
        DataError: a VOC folder without lists of images.
    """
    name, root = folder.resolve().name, folder.absolute()
    splits: dict[str, tuple[SplitSource, ...]] = {}
    missing: dict[str, YolofleetError] = {}
    if (folder / "Annotations").is_dir() and (folder / "JPEGImages").is_dir():
        for split in SPLITS:
            try:
                splits[split] = (SplitSource("voc", voc_listing(root, split)),)
            except DataError as error:
                if split != "test":  # VOC2012 has no list of test images
                    missing[split] = error
        if not splits:
            raise missing["train"]
        spec = DatasetSpec(name, (), splits, str(folder), root, missing=missing)
        return with_class_names(spec, names_at=str(folder))
    for split in SPLITS:
        objects365 = (folder / place / f"zhiyuan_objv2_{split}.json" for place in ("", "annotations", split))
        files = [
            *folder.glob(f"annotations/instances_{split}*.json"),
            *folder.glob(f"{split}*/_annotations.coco.json"),
            *(file for file in objects365 if file.is_file()),
        ]
        if files:
            splits[split] = tuple(annotation_source(file.absolute(), root) for file in sorted(files))
    if splits:
        return with_class_names(DatasetSpec(name, (), splits, str(folder), root), names_at=str(folder))
    from yolofleet.datasets.labelme import has_files

    if has_files(root, YoloFiles(root)):
        for part, split in _FOLDERS.items():
            for place in (root / "images" / part, root / part):
                if place.is_dir():
                    splits[split] = (SplitSource("labelme", place),)
        if not splits:
            splits = dict.fromkeys(("train", "val"), (SplitSource("labelme", root),))
        spec = DatasetSpec(name, (), splits, str(folder), root)
        return with_class_names(spec, names_at=str(folder))
    refuse_other_format(root)
    raise _unknown(str(folder))


def check_layout(folder: str, files: Iterable[str]) -> None:
    """Raise ConfigError if no file in the list of a folder can describe a data set or hold the labels of other formats."""
    if not any(map(_DESCRIBES.fullmatch, files)):
        raise _unknown(folder)


def _unknown(folder: str) -> ConfigError:
    return ConfigError(
        f"folder {folder} is not a data set in a known layout",
        hint="a data.yaml in it (train, val, names), Pascal VOC (Annotations, JPEGImages, ImageSets), "
        "COCO (annotations/instances_*.json) or labelme (a .json for each image)",
    )


def voc_listing(root: Path, split: str) -> Path:
    """Return the list of a split of a VOC folder. Raises DataError if there is none.

    train is train.txt, or trainval.txt if there is no train.txt; val is val.txt, or test.txt.
    """
    folder = root / "ImageSets" / "Main"
    choices: Sequence[str] = {"train": ("train", "trainval"), "val": ("val", "test"), "test": ("test",)}[
        split
    ]
    for choice in choices:
        if (folder / f"{choice}.txt").is_file():
            return folder / f"{choice}.txt"
    raise DataError(
        f"VOC folder {root} has no list of its {split} images",
        hint=f"write {folder / choices[0]}.txt, a file name without .jpg on each line",
    )
