"""What a person calls a data set -> a checked ``DatasetSpec``. No image or label file is opened here.

Tried in this order: ``shapes`` or ``shapes:N``; a YAML, COCO JSON or CrowdHuman .odgt file; a folder (a YAML in it,
Pascal VOC, COCO, Objects365, CrowdHuman); the name of a YAML in the folder ``data``; the name of a description that comes with yolofleet (``coco128``, ``coco``, ``voc``). Nothing is
downloaded, and nothing that a description says is executed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from yolofleet import __version__
from yolofleet.config.yaml_lines import read_yaml
from yolofleet.datasets import cocojson, odgt, vocxml
from yolofleet.errors import ConfigError, DataError, StorageError, YolofleetError
from yolofleet.files.atomic import whole_folder
from yolofleet.files.caches import cache_root
from yolofleet.files.foreign import read_foreign
from yolofleet.text import nearest, shown

SPLITS = ("train", "val", "test")
SHAPES_IMAGES = 256
_SHAPES = re.compile(r"shapes(?::(\d{1,7}))?")
_BUILT_IN = Path(__file__).resolve().parent.parent / "config" / "datasets"
_ANNOTATIONS: dict[str, Literal["coco", "odgt"]] = {".json": "coco", ".odgt": "odgt"}
_KEYS = ("path", *SPLITS, "names", "nc", "download")


@dataclass(frozen=True)
class SplitSource:
    """Where images and labels of a split, or of a part of it, come from.

    Attributes:
        kind: yolo (a folder, or a .txt list of images), coco (a JSON file), voc (an ImageSets/Main list) or odgt
            (CrowdHuman's file).
        path: that folder or file.
        image_roots: coco, odgt: folders that may hold the images, best first.
    """

    kind: Literal["yolo", "coco", "voc", "odgt"]
    path: Path
    image_roots: tuple[Path, ...] = ()


@dataclass(frozen=True)
class DatasetSpec:
    """
    Attributes:
        name: short, for folders and tables.
        names: of the classes, by number.
        splits: those whose files are there.
        origin: the file or folder that the description was read from.
        root: paths in messages are relative to it.
        category_ids: COCO's category of each class; None where the data set is not COCO.
        missing: why a split that was named is not in ``splits``.
        notes: what a person should know and is no error.
    """

    name: str
    names: tuple[str, ...]
    splits: dict[str, tuple[SplitSource, ...]]
    origin: str
    root: Path
    category_ids: tuple[int, ...] | None = None
    missing: dict[str, YolofleetError] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def sources(self, split: str) -> tuple[SplitSource, ...]:
        """Raises the error that was met when the split's files were looked for, or ConfigError."""
        if split in self.missing:
            raise self.missing[split]
        if split not in self.splits:
            has = ", ".join(self.splits) or "none"
            raise ConfigError(
                f"data set {self.name} has no split {split!r} (it has: {has})",
                source=self.origin,
                hint=f"{split}: images/{split}"
                if self.origin.endswith((".yaml", ".yml"))
                else f"add a list or annotations of the {split} images",
            )
        return self.splits[split]


def is_generated(data: str) -> bool:
    """Return whether ``data`` names the data set that yolofleet draws itself."""
    return _SHAPES.fullmatch(data) is not None


def load_dataset(data: str) -> DatasetSpec:
    """Checks a description and finds its files.

    A split whose files are missing is an error only when that split is asked for, unless none is there.

    Raises:
        ConfigError: no such description, or one that contradicts itself or lacks names.
        DataError: files that it names are missing or unreadable.
    """
    if not data:
        raise ConfigError("no data set given", hint="--data FILE.yaml, a folder, a COCO json, or 'shapes'")
    shapes = _SHAPES.fullmatch(data)
    if shapes:
        return _from_yaml(_shapes(int(shapes[1] or SHAPES_IMAGES)), name="shapes")
    try:
        path = _placed(data)
        if path.is_dir():
            return _from_folder(path)
        if path.is_file():
            if path.suffix.lower() in (".yaml", ".yml"):
                return _from_yaml(path, built_in=_copied(path))
            if path.suffix.lower() in _ANNOTATIONS:
                return _from_annotations(path)
            raise ConfigError(
                f"data set {data} is a {path.suffix or 'nameless'} file", hint="a .yaml, .json or .odgt file"
            )
    except (OSError, ValueError, RuntimeError) as error:  # NUL characters, unknown ~user, forbidden folders
        raise ConfigError(f"data set {data!r} cannot be opened: {error}") from None
    built_in = sorted(file.stem for file in _BUILT_IN.glob("*.yaml"))
    stem = path.name.removesuffix(".yaml")
    if _is_built_in_name(path):
        return _from_yaml(_BUILT_IN / f"{stem}.yaml", built_in=stem)
    ending = ".yaml" if path.suffix == ".yaml" else ""  # suggested as the person writes it
    names = [*_neighbours(path), *(name + ending for name in built_in), "shapes"]
    known = {Path(name).stem: name for name in names}
    near = nearest(stem, known)
    hint = f"{known[near]}?" if near else f"an existing path, or one of: shapes, {', '.join(built_in)}"
    raise ConfigError(f"data set {data} does not exist", source=f"looked in {Path.cwd()}", hint=hint)


def built_in_of(data: str) -> str:
    """Return the name of the description of ``data`` that comes with yolofleet; "" when it is a user's own."""
    try:
        path = _placed(data)
        if path.suffix.lower() in (".yaml", ".yml") and path.is_file():
            return _copied(path)
        return path.name.removesuffix(".yaml") if not path.exists() and _is_built_in_name(path) else ""
    except (OSError, ValueError, RuntimeError):  # load_dataset reports it
        return ""


def _placed(data: str) -> Path:
    """Return the path of ``data``; guides copy a file to data/mine.yaml and then say --data mine.yaml."""
    path = Path(data).expanduser()
    kept = Path("data", path.name)
    is_kept = path.suffix == ".yaml" and path.parent == Path() and not path.exists() and kept.is_file()
    return kept if is_kept else path


def _is_built_in_name(path: Path) -> bool:
    """Return whether ``coco128``, ``coco128.yaml`` or ``data/coco128.yaml`` names a built-in description."""
    return (
        path.parent.name in ("", "data") and (_BUILT_IN / f"{path.name.removesuffix('.yaml')}.yaml").is_file()
    )


def _copied(path: Path) -> str:
    """Return the name of the built-in description that a file is a copy of; "" if it is not a copy."""
    for built_in in sorted(_BUILT_IN.glob("*.yaml")):
        content = built_in.read_bytes()
        if path.stat().st_size == len(content) and read_foreign(path, limit_bytes=len(content)) == content:
            return built_in.stem
    return ""


def _neighbours(path: Path) -> list[str]:
    try:
        files = sorted(path.parent.iterdir())[:1000]
    except OSError:
        return []
    return [
        str(path.parent / file.name)
        for file in files
        if file.is_dir() or file.suffix in (".yaml", ".yml", *_ANNOTATIONS)
    ]


# YAML


class _Description:
    """A YAML file's values, and where each stands."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content = read_yaml(path)

    def get(self, key: str) -> Any:
        return self.content[key].value if key in self.content else None

    def at(self, key: str) -> str:
        """``file:line``."""
        return f"{self.path}:{self.content[key].line}" if key in self.content else str(self.path)

    def texts(self, key: str) -> list[str]:
        """A value that is one string or a list of strings; absent and empty are []."""
        value = self.get(key)
        values = value if isinstance(value, list) else [] if value is None else [value]
        for item in values:
            if not isinstance(item, str):
                raise ConfigError(
                    f"{key} is {shown(item)}, not a path or a list of paths", source=self.at(key)
                )
        return [item for item in values if item]


def _from_yaml(path: Path, *, name: str = "", built_in: str = "") -> DatasetSpec:
    """Read a YAML description.

    Args:
        name: of the data set, if not the file's.
        built_in: the description that comes with yolofleet and that this file is, or is a copy of.
    """
    file = _Description(path)
    _check_keys(file)
    notes: list[str] = []
    if "download" in file.content:
        notes.append("its download: is not executed; yolofleet never runs what a data set says")
    bases = _bases(file, is_built_in=bool(built_in))

    splits: dict[str, tuple[SplitSource, ...]] = {}
    missing: dict[str, YolofleetError] = {}
    for split in SPLITS:
        try:
            found = tuple(_source(entry, split, bases, file) for entry in file.texts(split))
        except DataError as error:
            if built_in:
                error.hint = f"yolofleet data download {built_in}, or --download; {error.hint}"
            missing[split] = error
            continue
        if found:
            splits[split] = found
    if not splits:
        raise next(iter(missing.values()), None) or ConfigError(
            "names no images: neither train, val nor test", source=str(path), hint="train: images/train"
        )
    return _named(
        DatasetSpec(
            name=name or (path.absolute().parent.name if path.stem in ("data", "dataset") else path.stem),
            names=_given_names(file),
            splits=splits,
            origin=str(path),
            root=bases[0],
            missing=missing,
            notes=tuple(notes),
        ),
        file,
    )


def _check_keys(file: _Description) -> None:
    """A key that is nearly one of ours, where ours is not given, is a slip; other keys are other programs'."""
    for key in file.content:
        near = get_close_matches(key, _KEYS, 1, cutoff=0.75)
        if near and key not in _KEYS and near[0] not in file.content:
            raise ConfigError(
                f"unknown key {shown(key)}", source=file.at(key), hint=f"did you mean {near[0]}?"
            )


def _bases(file: _Description, *, is_built_in: bool) -> list[Path]:
    """Folders that relative entries may start from: ``path`` first, if it exists anywhere."""
    here = file.path.absolute().parent
    texts = file.texts("path")
    if len(texts) > 1:
        raise ConfigError("path names more than one folder", source=file.at("path"))
    base = Path(texts[0]).expanduser() if texts else Path()
    if is_built_in:  # relative to where the person works, or to a data folder beside it
        return [Path.cwd() / base, Path.cwd().parent / base]
    tried = list(dict.fromkeys([here / base, Path.cwd() / base]))
    there = [folder for folder in tried if folder.is_dir()]
    return list(dict.fromkeys([*(there or tried[:1]), here, Path.cwd()]))


def _source(entry: str, split: str, bases: Sequence[Path], file: _Description) -> SplitSource:
    """Raises DataError when nothing is there."""
    relative = Path(entry).expanduser()
    tried = [base / relative for base in bases]
    if relative.parts[:1] == ("..",):  # Roboflow writes ../train/images for train/images
        tried += [base / Path(*relative.parts[1:]) for base in bases]
    tried = list(dict.fromkeys(Path(os.path.normpath(path)) for path in tried))
    place = file.at(split)
    try:
        path = next((path for path in tried if path.exists()), None)
    except (OSError, ValueError) as error:
        raise DataError(f"{split} {entry!r} is not a usable path: {error}", source=place) from None
    if path is None:
        near = nearest(tried[0].name, _names_in(tried[0].parent))
        what = f"{split} images {entry} do not exist"
        hint = f"{tried[0].parent / near}?" if near else "looked for " + ", ".join(map(str, tried[:3]))
        raise DataError(what, source=place, hint=hint)
    if path.is_dir():
        is_voc = (path / "Annotations").is_dir() and (path / "ImageSets" / "Main").is_dir()
        return SplitSource("voc", _voc_listing(path, split)) if is_voc else SplitSource("yolo", path)
    if path.suffix.lower() in _ANNOTATIONS:
        return SplitSource(_ANNOTATIONS[path.suffix.lower()], path, _image_roots(path, bases[:1]))
    if path.suffix.lower() == ".txt":
        return SplitSource("voc" if vocxml.is_voc_listing(path) else "yolo", path)
    raise DataError(f"{split} {path} is neither a folder nor a .txt, .json or .odgt file", source=place)


def _names_in(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir())[:1000]
    except (OSError, ValueError):
        return []


def _given_names(file: _Description) -> tuple[str, ...]:
    """Class names of the description, () when it has none."""
    given, place = file.get("names"), file.at("names")
    if isinstance(given, dict):
        numbers = [int(key) if key.isdecimal() and len(key) < 10 else -1 for key in given]
        if sorted(numbers) != list(range(len(numbers))):
            what = f"names has the numbers {_some(given)}, not 0..{len(given) - 1}"
            raise ConfigError(what, source=place, hint="number them from 0")
        ordered = sorted(zip(numbers, given.values(), strict=True), key=lambda item: item[0])
        given = [name.value for _, name in ordered]
    if given is not None and not isinstance(given, list):
        raise ConfigError(f"names is {shown(given)}", source=place, hint="a list, or numbers with names")
    for number, name in enumerate(given or ()):
        if isinstance(name, bool) or not isinstance(name, str | int | float) or name == "":
            hint = "write it in quotes" if isinstance(name, bool) else None
            raise ConfigError(f"names[{number}] is {shown(name)}, not a name", source=place, hint=hint)
    names = tuple(map(str, given or ()))
    count = file.get("nc")
    if count is not None and (type(count) is not int or count < 1):
        raise ConfigError(f"nc is {shown(count)}, not a number of classes", source=file.at("nc"))
    if names and count is not None and count != len(names):
        what = f"nc is {count} but names has {len(names)}: {_some(names)}"
        raise ConfigError(what, source=file.at("nc"), hint="correct one of them, or leave nc out")
    return names


def _some(values: Iterable[Any]) -> str:
    listed = [str(value)[:40] for value in values]
    return ", ".join(listed[:8]) + (f", ... ({len(listed)})" if len(listed) > 8 else "")


# COCO, Objects365, CrowdHuman and VOC


def _from_annotations(path: Path) -> DatasetSpec:
    def source(file: Path) -> tuple[SplitSource, ...]:
        return (SplitSource(_ANNOTATIONS[file.suffix.lower()], file, _image_roots(file, ())),)

    other = path.with_name(path.name.replace("train", "val"))
    if other != path and other.is_file():
        splits, note = {"train": source(path), "val": source(other)}, f"{other.name} is val"
    else:
        splits, note = {"train": source(path), "val": source(path)}, f"{path.name} is both train and val"
    folder = path.absolute().parent
    root = folder.parent if folder.name == "annotations" else folder
    return _named(DatasetSpec(path.stem, (), splits, str(path), root, notes=(note,)), None)


def _image_roots(path: Path, bases: Sequence[Path]) -> tuple[Path, ...]:
    part = re.sub(r"^(instances|image_info|person_keypoints|zhiyuan_objv2|annotation)_", "", path.stem)
    parent = path.absolute().parent  # part: e.g. train2017
    below = [
        Path(),
        *(Path(name) for name in ("images", "Images", part)),
        Path("images") / part,
        Path(part) / "images",
    ]
    return tuple(dict.fromkeys(root / folder for root in (parent, parent.parent, *bases) for folder in below))


def _from_folder(folder: Path) -> DatasetSpec:
    usual = [folder / name for name in ("data.yaml", "data.yml", "dataset.yaml", "dataset.yml")]
    others = sorted([*folder.glob("*.yaml"), *folder.glob("*.yml")])
    found = [path for path in usual if path.is_file()] or [path for path in others if _may_describe(path)]
    if found and (found[0] in usual or len(found) == 1):
        return _from_yaml(found[0])
    if len(found) > 1:
        raise ConfigError(
            f"folder {folder} has {len(found)} YAML files: {_some(path.name for path in found)}",
            hint="name one of them",
        )
    name, root = folder.resolve().name, folder.absolute()
    splits: dict[str, tuple[SplitSource, ...]] = {}
    missing: dict[str, YolofleetError] = {}
    if (folder / "Annotations").is_dir() and (folder / "JPEGImages").is_dir():
        for split in SPLITS:
            try:
                splits[split] = (SplitSource("voc", _voc_listing(root, split)),)
            except DataError as error:
                if split != "test":  # VOC2012 comes without one
                    missing[split] = error
        if not splits:
            raise missing["train"]
        return _named(DatasetSpec(name, (), splits, str(folder), root, missing=missing), None)
    for split in SPLITS:
        files = [
            *folder.glob(f"annotations/instances_{split}*.json"),
            *folder.glob(f"{split}*/_annotations.coco.json"),
            *(
                f
                for f in (folder / b / f"zhiyuan_objv2_{split}.json" for b in ("", "annotations", split))
                if f.is_file()
            ),
            *folder.glob(f"annotation_{split}.odgt"),
        ]
        if files:
            splits[split] = tuple(
                SplitSource(_ANNOTATIONS[file.suffix], file.absolute(), _image_roots(file, [root]))
                for file in sorted(files)
            )
    if splits:
        return _named(DatasetSpec(name, (), splits, str(folder), root), None)
    raise ConfigError(
        f"folder {folder} is no data set that I know",
        hint="a data.yaml in it (train, val, names), Pascal VOC (Annotations, JPEGImages, ImageSets), "
        "COCO (annotations/instances_*.json) or CrowdHuman (annotation_train.odgt)",
    )


def _may_describe(path: Path) -> bool:
    """Whether a YAML file could be a data set's: ``environment.yml`` and other programs' files are not."""
    try:
        content = read_yaml(path)
    except ConfigError:
        return True  # a slip in it is reported when it is read as a data set
    return not content or not {*SPLITS, "names"}.isdisjoint(content)


def _voc_listing(root: Path, split: str) -> Path:
    """train is train.txt, or trainval.txt where there is no train.txt; val is val.txt, else test.txt."""
    folder = root / "ImageSets" / "Main"
    choices = {"train": ("train", "trainval"), "val": ("val", "test"), "test": ("test",)}[split]
    for choice in choices:
        if (folder / f"{choice}.txt").is_file():
            return folder / f"{choice}.txt"
    raise DataError(
        f"VOC folder {root} has no list of its {split} images",
        hint=f"write {folder / choices[0]}.txt, a file name without .jpg on each line",
    )


def _named(spec: DatasetSpec, file: _Description | None) -> DatasetSpec:
    """Class names from the description, else from the annotations; COCO's category of each."""
    sources = [source for group in spec.splits.values() for source in group]
    if any(source.kind == "odgt" for source in sources):
        if any(source.kind != "odgt" for source in sources):
            raise ConfigError("CrowdHuman's files and others cannot be mixed", source=spec.origin)
        place = file.at("names") if file else spec.origin
        return replace(spec, names=odgt.chosen_names(spec.names, place))
    coco = [source for source in sources if source.kind == "coco"]
    voc = [source for source in sources if source.kind == "voc"]
    categories: dict[int, str] = {}
    for path in dict.fromkeys(source.path for source in coco):
        for number, name in cocojson.load_table(path).categories:
            if categories.setdefault(number, name) != name:
                raise ConfigError(
                    f"category {number} is {categories[number]!r} and {name!r}", source=str(path)
                )
    names, category_ids = spec.names, None
    if not names and coco:
        names = tuple(name for _, name in sorted(categories.items()))
        category_ids = tuple(sorted(categories))
    elif coco:
        category_ids = _ids_of_names(names, categories, file)
    if not names and voc:
        roots = dict.fromkeys(vocxml.voc_root(source.path) for source in voc)
        names = tuple(sorted({name for root in roots for name in vocxml.class_names(root)}))
    if not names:
        what = "has no class names" + (
            f", only nc: {shown(file.get('nc'))}" if file and "nc" in file.content else ""
        )
        raise ConfigError(f"data set {spec.name} {what}", source=spec.origin, hint="names: [cat, dog]")
    return replace(spec, names=names, category_ids=category_ids)


def _ids_of_names(
    names: tuple[str, ...], categories: dict[int, str], file: _Description | None
) -> tuple[int, ...]:
    by_name = {name: number for number, name in sorted(categories.items(), reverse=True)}
    for name in by_name:
        if name not in names:
            near = nearest(name, names)
            raise ConfigError(
                f"category {name!r} of the annotations is not in names ({_some(names)})",
                source=file.at("names") if file else None,
                hint=f"nearest: {near}" if near else "leave names out to take the annotations' own",
            )
    return tuple(by_name.get(name, -1) for name in names)


# shapes


def _shapes(images: int) -> Path:
    """The YAML of the generated data set; made once per machine, whole or not at all."""
    from yolofleet.datasets.shapes import make_shapes

    if images < 2:
        raise ConfigError(f"shapes:{images} is too small", hint="shapes:2 or more images")
    folder = cache_root() / "datasets" / f"shapes-{images}-{__version__}"
    if not (folder / "data.yaml").is_file():
        try:
            with whole_folder(folder) as made:
                make_shapes(made, images=images, seed=0)
        except OSError as error:
            if not (folder / "data.yaml").is_file():  # else another process was faster
                raise StorageError(
                    f"{folder} cannot be written: {error.strerror}",
                    hint="set YOLOFLEET_CACHE to a folder with space",
                ) from None
    return folder / "data.yaml"
