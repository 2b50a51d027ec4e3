"""The YAML description of a data set, as YOLOv5 has it: path, train, val, test, names, nc."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from yolofleet.data.datasets.reader import is_in_main, is_inside, is_list_of_pairs, lists_of, spellings
from yolofleet.data.datasets.spec import SPLITS, DatasetSpec, SplitSource, source_of_file, with_class_names
from yolofleet.storage.yaml_lines import read_yaml
from yolofleet.support.errors import ConfigError, DataError, YolofleetError
from yolofleet.support.text import listed, nearest, screen_line, shown

_KEYS = ("path", *SPLITS, "names", "nc", "kpt_shape", "download")
_SPLIT_WORD = re.compile("(?i)train|val|test")


class _Description:
    """The values of a YAML file, and the line of each."""

    def __init__(self, path: Path, within: Path | None) -> None:
        self.path = path
        self.within = within
        self.content = read_yaml(path, as_typed=("names",))

    def get(self, key: str) -> Any:
        return self.content[key].value if key in self.content else None

    def at(self, key: str) -> str:
        """Return ``file:line`` of a key."""
        return f"{self.path}:{self.content[key].line}" if key in self.content else str(self.path)

    def texts(self, key: str) -> list[str]:
        """Return a value that is one string or a list of strings; [] if it is absent or empty."""
        value = self.get(key)
        values = value if isinstance(value, list) else [] if value is None else [value]
        for item in values:
            if not isinstance(item, str):
                raise ConfigError(
                    f"{key} is {shown(item)}, not a path or a list of paths", source=self.at(key)
                )
            if "://" in item:
                raise ConfigError(
                    f"{key} is the address {screen_line(item.rpartition('@')[2], limit=100)}; only an address that you type is read",
                    source=self.at(key),
                    hint="name its folder with --data, and use paths in the file",
                )
        return [item for item in values if item]

    def allows(self, path: Path) -> bool:
        """Return whether the file may name this path: one from a store must not name files of this machine."""
        return is_inside(path, self.within)


def read_description(
    path: Path, *, name: str = "", built_in: str = "", within: Path | None = None
) -> DatasetSpec:
    """Read a YAML description and find the files that it names.

    Args:
        name: of the data set; default: the file's.
        built_in: the description of this package that the file is, or is a copy of.
        within: a folder that the paths of the file must not leave.
    Raises:
        ConfigError: the file contradicts itself, or names no images or no classes.
        DataError: no split has its files.
    """
    file = _Description(path, within)
    _check_keys(file)
    notes: list[str] = []
    if "download" in file.content:
        notes.append("download: is not executed; yolofleet never runs code from a data set")
    bases = _bases(file, notes, is_built_in=bool(built_in))

    splits: dict[str, tuple[SplitSource, ...]] = {}
    missing: dict[str, YolofleetError] = {}
    for split in SPLITS:
        try:
            found = tuple(_source(entry, split, bases, file, notes) for entry in file.texts(split))
        except DataError as error:
            if built_in:
                error.hint = f"yolofleet data download {built_in}, or --download; {error.hint}"
            missing[split] = error
            continue
        if found:
            splits[split] = found
    if not splits:
        raise next(iter(missing.values()), None) or ConfigError(
            "names no images: train, val and test are missing", source=str(path), hint="train: images/train"
        )
    spec = DatasetSpec(
        name=name or (path.absolute().parent.name if path.stem in ("data", "dataset") else path.stem),
        names=_class_names(file),
        splits=splits,
        origin=str(path),
        root=bases[0],
        missing=missing,
        notes=tuple(notes),
        within=within,
        kpt_shape=_kpt_shape(file),
    )
    remark = f", only nc: {shown(file.get('nc'))}" if "nc" in file.content else ""
    return with_class_names(spec, names_at=file.at("names"), remark=remark)


def _check_keys(file: _Description) -> None:
    """Raise ConfigError for a key that resembles one of ours; other keys belong to other programs."""
    for key in file.content:
        near = get_close_matches(key, _KEYS, 1, cutoff=0.75)
        if near and key not in _KEYS and near[0] not in file.content:
            raise ConfigError(
                f"unknown key {shown(key)}", source=file.at(key), hint=f"did you mean {near[0]}?"
            )


def _bases(file: _Description, notes: list[str], *, is_built_in: bool) -> list[Path]:
    """Return the folders that relative entries may start from, ``path`` first; add a note if it does not exist."""
    here = file.path.absolute().parent
    texts = file.texts("path")
    if len(texts) > 1:
        raise ConfigError("path names more than one folder", source=file.at("path"))
    base = Path(texts[0]).expanduser() if texts else Path()
    if texts and "\\" in texts[0] and not (here / base).exists():
        base = Path(texts[0].replace("\\", "/"))
    if is_built_in:  # the package's folder holds no data, so look below the working folder and beside it
        return [Path.cwd() / base, Path.cwd().parent / base]
    tried = [folder for folder in dict.fromkeys([here / base, Path.cwd() / base]) if file.allows(folder)]
    if not tried:
        raise ConfigError(
            f"path {shown(texts[0])} leads out of the address of the data set",
            source=file.at("path"),
            hint="leave path out, or name a folder below the address",
        )
    existing = [folder for folder in tried if folder.is_dir()]
    if not existing:
        notes.append(f"path {texts[0]} does not exist; used the folder of {file.path.name}")
    bases = dict.fromkeys([*(existing or tried[:1]), here, Path.cwd()])
    return [folder for folder in bases if file.allows(folder)]


def _source(
    entry: str, split: str, bases: Sequence[Path], file: _Description, notes: list[str]
) -> SplitSource:
    """Return the source that an entry of a split names; note another name. Raise DataError if it does not exist."""
    relative = (Path(name).expanduser() for name in _spellings(entry))
    tried = [Path(os.path.normpath(base / path)) for path in relative for base in bases]
    place = file.at(split)
    as_stated = tried[: len(bases)]
    tried = [path for path in dict.fromkeys(tried) if file.allows(path)]
    if not tried:
        raise ConfigError(
            f"{split} {shown(entry)} leads out of the address of the data set",
            source=place,
            hint="a data set in a store names its own files only",
        )
    try:
        path = next((path for path in tried if path.exists()), None)
    except (OSError, ValueError) as error:
        raise DataError(f"{split} {entry!r} is not a usable path: {error}", source=place) from None
    if path is None:
        other_splits = [other for other in SPLITS if other != split]
        taken = {Path(text).name for other in other_splits for text in file.texts(other)}
        names = [
            name
            for name in _names_in(tried[0].parent)
            if name not in taken and not any(other in name.lower() for other in other_splits)
        ]
        near = nearest(tried[0].name, names)
        what = f"{split} images {entry} do not exist"
        hint = f"{tried[0].parent / near}?" if near else "looked for " + ", ".join(map(str, tried[:3]))
        raise DataError(what, source=place, hint=hint)
    if path not in as_stated and not entry.startswith("../"):
        notes.append(f"{split} {shown(entry)} does not exist; used {path}")
    if path.is_dir():
        if not lists_of(path):
            return SplitSource("yolo", path)
        from yolofleet.data.datasets.vocxml import voc_listing  # only VOC needs that module

        return SplitSource("voc", voc_listing(path, split))
    if path.suffix.lower() == ".txt":
        is_voc = is_in_main(path) or is_list_of_pairs(path)
        return SplitSource("voc" if is_voc else "yolo", path)
    if source := source_of_file(path, bases[0]):
        return source
    raise DataError(f"{split} {path} is neither a folder nor a .txt or .json file", source=place)


def _spellings(entry: str) -> Iterator[str]:
    """Yield an entry of a split, then what may be meant by it.

    First folders are left out only up to the last one with the name of a split, because ``images`` could be those of
    another split. Roboflow writes ``../train/images`` where ``train/images`` is meant.
    """
    parts = entry.replace("\\", "/").split("/")
    needed = max((at for at, part in enumerate(parts) if _SPLIT_WORD.search(part)), default=0)
    needed = 1 if parts[0] == ".." else needed
    for name in spellings(entry):
        if len(parts) - len(name.replace("\\", "/").split("/")) <= needed:
            yield name


def _kpt_shape(file: _Description) -> tuple[int, int] | None:
    """Return the numbers of key points and of their columns, None if rows have none. Raises ConfigError."""
    value = file.get("kpt_shape")
    if value is None:
        return None
    if isinstance(value, list) and [type(number) for number in value] == [int, int]:
        points, columns = value
        if 1 <= points <= 10_000 and columns in (2, 3):
            return points, columns
    raise ConfigError(
        f"kpt_shape is {value if isinstance(value, list) else shown(value)!s:.80}, not two numbers",
        source=file.at("kpt_shape"),
        hint="kpt_shape: [17, 3] for 17 key points with x, y and visibility; [17, 2] without visibility",
    )


def _names_in(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir())[:1000]
    except (OSError, ValueError):
        return []


def _class_names(file: _Description) -> tuple[str, ...]:
    """Return the class names of the description, () if it has none. Raise ConfigError for unusable ones."""
    given, place = file.get("names"), file.at("names")
    if isinstance(given, dict):
        numbers = [int(key) if key.isdecimal() and len(key) < 10 else -1 for key in given]
        if sorted(numbers) != list(range(len(numbers))):
            what = f"names has the numbers {listed(list(given), most=8)}, not 0..{len(given) - 1}"
            hint = "number them from 0 without gaps, as in the labels: 0: cat"
            raise ConfigError(what, source=place, hint=hint)
        ordered = sorted(zip(numbers, given.values(), strict=True), key=lambda item: item[0])
        given = [name.value for _, name in ordered]
    if given is not None and not isinstance(given, list):
        what = f"names is {shown(given)}, not a list or a table of numbers and names"
        is_file = re.search(r"(?i)\.(txt|names|ya?ml|json)$", str(given))
        hint = "write the names of that file as names: [cat, dog]" if is_file else "names: [cat, dog]"
        raise ConfigError(what, source=place, hint=hint)
    for number, name in enumerate(given or ()):
        if not isinstance(name, str) or not name.strip():
            what = f"names[{number}] is {shown(name)}, not a name"
            hint = "one text for each class; write words such as true, null and ~ in quotes"
            raise ConfigError(what, source=place, hint=hint)
    names = tuple(given or ())
    count = file.get("nc")
    if isinstance(count, float) and count.is_integer():
        count = int(count)
    if count is not None and (type(count) is not int or count < 1):
        hint = "write the number of names without quotes, as nc: 2, or leave nc out"
        raise ConfigError(f"nc is {shown(count)}, not a number of classes", source=file.at("nc"), hint=hint)
    if names and count is not None and count != len(names):
        what = f"nc is {count} but names has {len(names)}: {listed(names, most=8)}"
        raise ConfigError(what, source=file.at("nc"), hint="correct one of them, or leave nc out")
    return names
