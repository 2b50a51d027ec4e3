"""Find the data set that ``--data`` names and check its description. No image and no label file is opened here.

A name is tried in this order:

1. ``shapes`` or ``shapes:N``, the generated data set;
2. an address such as ``s3://bucket/coco/data.yaml``: a file or a folder of a store, which gets a mirror on this machine;
3. a file: YAML or COCO JSON; ``mine.yaml`` is also looked for in the folder ``data``;
4. a folder: shards, a YAML in it, Pascal VOC, COCO, Objects365 or labelme;
5. a description that comes with yolofleet: ``coco128``, ``coco`` or ``voc``.

Nothing else is downloaded, and nothing that a description contains is executed.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from yolofleet import __version__
from yolofleet.data.datasets.built_in import (
    BUILT_IN,
    NAMED,
    YAML,
    built_in_names,
    copied_from,
    is_built_in_name,
    path_of,
)
from yolofleet.data.datasets.description import read_description
from yolofleet.data.datasets.spec import SPLITS, DatasetSpec, source_of_file
from yolofleet.storage.atomic import storage_error, whole_folder
from yolofleet.storage.caches import INDEX, cache_folder
from yolofleet.storage.yaml_lines import read_yaml
from yolofleet.support.errors import ConfigError
from yolofleet.support.text import listed, nearest

__all__ = ["DatasetSpec", "generated_images", "is_generated", "load_dataset"]

SHAPES_IMAGES = 256
_SHAPES = re.compile(r"shapes(?::(\d{1,7}))?")


def is_generated(data: str) -> bool:
    """Return whether ``data`` names the data set that yolofleet draws itself."""
    return generated_images(data) is not None


def generated_images(data: str) -> int | None:
    """Return the number of training images of the data set that yolofleet draws itself; None for another data set."""
    shapes = _SHAPES.fullmatch(data)
    return int(shapes[1] or SHAPES_IMAGES) if shapes else None


def load_dataset(data: str) -> DatasetSpec:
    """Check a description and find its files.

    A split whose files are missing is an error only when that split is used, or if no split has files.

    Raises:
        ConfigError: there is no such description, or it contradicts itself or lacks class names.
        DataError: files that it names are missing or unreadable.
    """
    if not data:
        raise ConfigError("no data set given", hint="--data FILE.yaml, a folder, a COCO json, or 'shapes'")
    if (images := generated_images(data)) is not None:
        return read_description(_made_shapes(images), name="shapes")
    if "://" in data:
        return _mirrored(data)
    try:
        path = path_of(data)
        if path.is_dir() and (path / INDEX).is_file():
            return replace(_mirrored(f"file://{path.resolve()}"), origin=data)
        if path.is_dir() or path.is_file():
            return _from_path(path)
    except (OSError, ValueError, RuntimeError) as error:  # NUL characters, unknown ~user, forbidden folders
        raise ConfigError(f"data set {data!r} cannot be opened: {error}") from None
    stem = path.name.removesuffix(".yaml")
    if is_built_in_name(path):
        return read_description(BUILT_IN / f"{stem}.yaml", built_in=stem)
    built_in = built_in_names()
    ending = ".yaml" if path.suffix == ".yaml" else ""  # suggest names in the form that the person typed
    names = [*_neighbours(path), *(name + ending for name in built_in), "shapes"]
    known = {Path(name).stem: name for name in names}
    near = _elsewhere(path) or known.get(nearest(stem, known) or "")
    hint = f"did you mean {near}?" if near else f"an existing path, or one of: shapes, {', '.join(built_in)}"
    raise ConfigError(f"data set {data} does not exist", source=f"looked in {Path.cwd()}", hint=hint)


def _from_path(path: Path, within: Path | None = None) -> DatasetSpec:
    """Return the data set of a file or folder; see :func:`load_dataset`."""
    suffix = path.suffix.lower()
    if path.is_dir():
        if (description := _description_in(path)) is not None:
            return read_description(description, within=within)
    elif suffix in YAML:
        return read_description(path, built_in="" if within else copied_from(path), within=within)
    # only data sets without a YAML description need these modules
    from yolofleet.data.datasets.layouts import from_annotations, from_folder, refuse_other_format

    if path.is_dir():
        return from_folder(path, within)
    if source_of_file(path):
        return from_annotations(path)
    refuse_other_format(path)
    kind = f"a {path.suffix} file" if path.suffix else "a file without a suffix"
    raise ConfigError(f"data set {path} is {kind}", hint=_OTHER.get(suffix, "a .yaml or .json file"))


def _mirrored(address: str) -> DatasetSpec:
    """Return the data set at an address; its files are those of a mirror on this machine."""
    from yolofleet.storage.mirror import local_path
    from yolofleet.storage.mirrored import mirror_of
    from yolofleet.storage.object_store import without_secrets

    path = local_path(address)
    mirror = mirror_of(str(path))
    assert mirror is not None
    spec = _from_path(path, within=mirror.tree)
    shown = without_secrets(address)
    folder = shown.removesuffix("/").removesuffix(path.name if path.is_file() else "").rstrip("/")
    is_usual = path.is_dir() or path.stem in ("data", "dataset")
    return replace(
        spec, name=folder.rpartition("/")[2] if is_usual else path.stem, origin=shown, within=mirror.tree
    )


_OTHER = {
    **dict.fromkeys(
        (".avi", ".mkv", ".mov", ".mp4", ".webm"),
        "a video has no labels: ffmpeg -i VIDEO frames/%05d.jpg writes its frames; label them, and name their folder",
    ),
    ".txt": "name this list in a YAML: train: LIST.txt, val: LIST.txt and names: [cat, dog]",
}


def _elsewhere(path: Path) -> str | None:
    """Return the path of an existing file of that name in a folder with a similar name."""
    with suppress(OSError):
        homes = [home.name for home in path.parent.parent.iterdir() if (home / path.name).exists()]
        if near := nearest(path.parent.name, homes):
            return str(path.parent.with_name(near) / path.name)
    return None


def _neighbours(path: Path) -> list[str]:
    """Return the data sets beside a path that does not exist, for a suggestion."""
    try:
        files = sorted(path.parent.iterdir())[:1000]
    except OSError:
        return []
    return [str(path.parent / file.name) for file in files if file.is_dir() or file.suffix in NAMED]


def _description_in(folder: Path) -> Path | None:
    """Return the YAML description in a folder, None if there is none. Raise ConfigError if several could be it."""
    usual = [folder / name for name in ("data.yaml", "data.yml", "dataset.yaml", "dataset.yml")]
    others = sorted([*folder.glob("*.yaml"), *folder.glob("*.yml")])
    found = [path for path in usual if path.is_file()] or [path for path in others if _may_describe(path)]
    if len(found) > 1 and found[0] not in usual:
        what = f"folder {folder} has {len(found)} YAML files: {listed([path.name for path in found], most=8)}"
        raise ConfigError(what, hint="name one of them")
    return found[0] if found else None


def _may_describe(path: Path) -> bool:
    """Return whether a YAML file could describe a data set, unlike ``environment.yml`` and other programs' files."""
    try:
        content = read_yaml(path)
    except ConfigError:
        return True  # reading it as a data set will report the mistake
    return not content or not {*SPLITS, "names"}.isdisjoint(content)


def _made_shapes(images: int) -> Path:
    """Return the YAML of the generated data set, made once per machine, completely or not at all."""
    if images < 2:
        raise ConfigError(f"shapes:{images} is too small", hint="shapes:2 or more images")
    folder = cache_folder("datasets") / f"shapes-{images}-{__version__}"
    if not (folder / "data.yaml").is_file():
        from yolofleet.data.datasets.shapes import make_shapes

        try:
            with whole_folder(folder) as made:
                make_shapes(made, images=images, seed=0)
        except OSError as error:
            if not (folder / "data.yaml").is_file():  # else another process has made it meanwhile
                raise storage_error(error, folder) from None
    return folder / "data.yaml"
