# Paths are strings here: a data set may have millions.
# ruff: noqa: PTH100, PTH120
"""Divide a data set into splits, or merge several, without moving or copying an image.

The result is a folder with a ``data.yaml`` and, for each split, a list of the images, or COCO's annotations that name the
images where they lie. It is read back before it gets its name. A list is used if the labels are a file for each image and are
found from the list; so labels that somebody corrects later are those of the result, too.

Legend: N images, M labels, C classes.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from yolofleet.data.datasets.check import same_images
from yolofleet.data.datasets.convert import Progress, check_free, distinct, lost_key_points, noted_index
from yolofleet.data.datasets.divide import (
    Stratification,
    groups_by_name,
    groups_by_pattern,
    groups_by_table,
    groups_with_copies,
    parted_groups,
)
from yolofleet.data.datasets.index import DataIndex, build_index
from yolofleet.data.datasets.labels import Id, Outlines, offsets_of
from yolofleet.data.datasets.scan import outline_arrays
from yolofleet.data.datasets.sources import load_dataset
from yolofleet.data.datasets.spec import SPLITS, DatasetSpec
from yolofleet.data.datasets.writers import below_common_folder, write_coco, write_lines
from yolofleet.storage.atomic import whole_folder, writing
from yolofleet.storage.caches import is_cached
from yolofleet.storage.yaml_lines import write_yaml
from yolofleet.support.errors import ConfigError, DataError, StorageError, YolofleetError
from yolofleet.support.text import listed, quoted, screen_line, shown

TOLERANCE = 1e-4  # of boxes, as fractions of the image: COCO's have 0.001 px
_COLUMNS = ("path_bytes", "stamps", "sizes_wh", "boxes_cxcywh_unit", "crowd", "area_px")
_OFFSETS = ("path_offsets", "offsets")
_FORM = "annotations/instances_{}.json"


@dataclass
class Combined:
    """The data set that was written, and notes that a person should know."""

    folder: Path
    indexes: dict[str, DataIndex] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def split_dataset(
    spec: DatasetSpec,
    out: Path,
    shares: Mapping[str, int],
    *,
    seed: int = 0,
    group: str = "auto",
    table: str = "",
    on_progress: Progress = lambda what, done, total: None,
) -> Combined:
    """Divide the images of train and val, and of test if it gets a share, anew. Another test split stays as it is.

    Args:
        out: a folder that does not exist yet, or is empty.
        shares: of each split, train first, in ``divide.UNIT``.
        group: auto, name, none or a regular expression for paths; see docs/data.md.
        table: ``FILE:COLUMN`` instead of ``group``; "": none.
    Raises:
        ConfigError: ``out`` is not empty, a split would get no image, or the groups cannot be used.
        DataError: the data set is not usable for training. StorageError: a file cannot be written; nothing is left behind.
    """
    check_free(out)
    done = Combined(out)
    indexes = _indexes(spec, done, on_progress)
    kept = {"test": indexes.pop("test")} if "test" in indexes and "test" not in shares else {}
    if not indexes:
        raise ConfigError(
            f"{spec.name} has only test images", source=spec.origin, hint="--test with its share"
        )
    pool = _without_repeats(joined(list(indexes.values()), spec.names), indexes, done)
    copies = same_images([pool, *kept.values()], on_progress=partial(on_progress, "comparing images"))
    pool = _without_images_of(kept, pool, copies, done)
    names = below_common_folder([os.path.abspath(path) for path in pool.paths])
    owner = np.repeat(np.arange(len(pool)), np.diff(pool.offsets))[~pool.crowd]
    classes, count = pool.classes[~pool.crowd], len(spec.names)
    if table:
        groups = groups_by_table(names, table)
    elif group in ("auto", "name", "none"):
        groups = names if group == "none" else groups_by_name(names)
        united = groups_with_copies(groups, pool.paths, copies)
        why = Stratification(united, owner, classes, count, seed).why_not(list(shares.values()))
        if why and group == "auto" and len(set(groups)) < len(groups):
            done.notes.append(f"not grouped by name, because {why} (--group name does it nevertheless)")
            groups = names
    else:
        groups = groups_by_pattern(names, group)
    groups = [given or f"/{name}" for given, name in zip(groups, names, strict=True)]
    groups = groups_with_copies(groups, pool.paths, copies)
    done.notes += _group_notes(groups, names)
    chosen = Stratification(groups, owner, classes, count, seed).split(list(shares.values()))
    for number, split in enumerate(shares):
        images = np.flatnonzero(chosen == number)
        if not len(images):
            what = f"{split} would get none of the {len(pool)} images in {len(set(groups))} groups"
            raise ConfigError(what, source=spec.origin, hint="larger shares, more images, or --group none")
        done.indexes[split] = replace(pool.part(images), split=split)
    done.indexes |= {split: replace(index, split=split) for split, index in kept.items()}
    labels: dict[str, str | None] = {}
    for split in (*indexes, *kept):
        for reader in spec.readers(split):
            labels |= {path: reader.label_file(at) for at, path in enumerate(reader.images)}
    ids = distinct(spec.category_ids or range(1, len(spec.names) + 1))
    _write(done, spec.names, ids, labels, spec.kpt_shape)
    return done


def merge_datasets(
    specs: Sequence[DatasetSpec], out: Path, *, on_progress: Progress = lambda what, done, total: None
) -> Combined:
    """Join data sets by the names of their classes, split by split.

    An image file (by content) that is in several splits stays in the last of train, val, test. If it is in one split of several
    sets, it is used once: with the labels of the first set, and those of classes that the earlier sets do not have.

    Raises:
        See :func:`split_dataset`.
    """
    check_free(out)
    done = Combined(out)
    names = tuple(dict.fromkeys(name for spec in specs for name in spec.names))
    parts: dict[str, list[tuple[int, DataIndex]]] = defaultdict(list)
    for number, spec in enumerate(specs):
        done.notes += lost_key_points(spec)
        for split, index in _indexes(spec, done, on_progress).items():
            parts[split].append((number, index))
    if "train" not in parts:
        raise ConfigError("none of the data sets has train images", source=specs[0].origin)
    merged = {
        split: replace(joined([index for _, index in parts[split]], names), split=split)
        for split in SPLITS
        if split in parts
    }
    owners = {
        split: np.repeat([number for number, _ in parts[split]], [len(index) for _, index in parts[split]])
        for split in merged
    }
    done.notes += _name_notes(specs, names, parts)
    copies = same_images(list(merged.values()), on_progress=partial(on_progress, "comparing images"))
    has_class = np.array([[name in spec.names for name in names] for spec in specs])
    for split, index in merged.items():
        done.indexes[split] = _without_copies(index, owners[split], copies, has_class, specs, done)
        if not len(done.indexes[split]):
            raise DataError(f"all images of {split} are also in a later split", source=specs[0].origin)
    done.notes += parted_groups(list(done.indexes.values()))
    _write(done, names, range(1, len(names) + 1), {}, None)
    return done


def joined(indexes: Sequence[DataIndex], names: Sequence[str]) -> DataIndex:
    """Return the images and labels of several indexes in one, which is not stored. Classes are matched by name."""

    def every(arrays: Iterable[np.ndarray]) -> np.ndarray:
        return np.concatenate(list(arrays))

    def numbers(index: DataIndex) -> np.ndarray:
        if index.names == tuple(names):  # names may repeat
            return np.arange(len(names), dtype=np.int32)
        return np.array([names.index(name) for name in index.names], np.int32)

    def polygons(index: DataIndex) -> np.ndarray:
        return np.diff(index.polygon_offsets) if len(index.points) else np.zeros(len(index.classes), np.int64)

    outlines = Outlines(
        every(map(polygons, indexes)),
        every(np.diff(index.point_offsets) for index in indexes),
        every(index.points for index in indexes),
    )
    run_counts = every(
        np.diff(one.run_offsets) if one.has_runs else np.zeros(len(one.classes), np.int64) for one in indexes
    )
    values: dict[str, Any] = {
        "run_offsets": offsets_of(run_counts if any(one.has_runs for one in indexes) else run_counts[:0]),
        "run_lengths": every(one.run_lengths for one in indexes),
        **{name: every(getattr(index, name) for index in indexes) for name in _COLUMNS},
        **{name: offsets_of(every(np.diff(getattr(i, name)) for i in indexes)) for name in _OFFSETS},
        **outline_arrays(outlines),
        "names": tuple(names),
        "classes": every(numbers(index)[index.classes] for index in indexes),
        "image_ids": np.arange(sum(map(len, indexes))),
    }
    return replace(indexes[0], given_ids=(), file=None, **values)


def _indexes(spec: DatasetSpec, done: Combined, on_progress: Progress) -> dict[str, DataIndex]:
    """Return the index of each split that has files; of two splits with the same files only the first."""
    done.notes += [f"{spec.name}: {note}" for note in spec.notes]
    done.notes += [f"{spec.name}: no {split}: {error.what}" for split, error in spec.missing.items()]
    found: dict[str, DataIndex] = {}
    for split in (one for one in SPLITS if one in spec.splits):
        twin = next((other for other in found if spec.splits[other] == spec.splits[split]), None)
        if twin:
            done.notes.append(f"{spec.name}: {split} has the same files as {twin}: used once, as {twin}")
            continue
        index, notes = noted_index(spec, split, on_progress)
        if spec.within is not None or is_cached(Path(index.path(0))):
            what = f"{spec.name} has its images in the cache folder, which may be deleted"
            hint = f"yolofleet data convert {quoted(spec.origin)} --to yolo --out FOLDER first, and name that folder"
            raise ConfigError(what, source=spec.origin, hint=hint)
        done.notes += [f"{spec.name}: {note}" for note in notes]
        found[split] = index
    return found


def _without_repeats(pool: DataIndex, indexes: Mapping[str, DataIndex], done: Combined) -> DataIndex:
    """Return the pool with each image file once."""
    first: dict[str, int] = {}
    for at, path in enumerate(pool.paths):
        first.setdefault(os.path.realpath(path), at)
    if len(indexes) > 1:
        counts = ", ".join(f"{len(index)} of {split}" for split, index in indexes.items())
        done.notes.append(f"divided anew: {counts}")
    if len(first) < len(pool):
        what = (
            f"{len(pool) - len(first)} images are in several splits: used once, with the labels of the first"
        )
        done.notes.append(what)
    return pool.part(np.array(list(first.values()), np.int64))


def _without_images_of(
    kept: Mapping[str, DataIndex],
    pool: DataIndex,
    copies: Sequence[Sequence[tuple[str, str]]],
    done: Combined,
) -> DataIndex:
    """Return the pool without the images of a split that stays as it is, and note equal images."""
    also = {path for group in copies if any(split in kept for split, _ in group) for _, path in group}
    if left := [at for at, path in enumerate(pool.paths) if path in also]:
        done.notes.append(f"{len(left)} images are also in {', '.join(kept)}: left out of the others")
        pool = pool.part(np.setdiff1d(np.arange(len(pool)), left))
    many = [len(group) for group in copies if group[0][1] not in also]
    if many:
        what = f"{sum(many)} images have only {len(many)} content{'s' * (len(many) > 1)}: equal ones stay in one split"
        done.notes.append(what)
    return pool


def _group_notes(groups: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return a note about the groups of several images."""
    sizes = Counter(groups)
    largest, most = sizes.most_common(1)[0]
    if most == 1:
        return []
    several = sum(count > 1 for count in sizes.values())
    some = [screen_line(name) for name, group in zip(names, groups, strict=True) if group == largest][:2]
    stay = "group of images stays" if several == 1 else "groups of images stay"
    what = f"{several} {stay} together; the largest has {most}, such as {', '.join(some)}"
    return [f"{what}; {sizes.total() - sum(c for c in sizes.values() if c > 1)} images are in no group"]


def _name_notes(
    specs: Sequence[DatasetSpec], names: Sequence[str], parts: Mapping[str, Sequence[tuple[int, DataIndex]]]
) -> list[str]:
    """Return a note about the classes that a set lacks, with the labels that others have, and one about similar names."""
    labels: Counter[str] = Counter()
    for number, index in (part for split in parts.values() for part in split):
        labels.update(dict(zip(specs[number].names, index.class_counts().tolist(), strict=True)))
    notes = []
    for spec in specs:
        if lacks := [name for name in names if name not in spec.names]:
            some = listed([f"{shown(name)} ({labels[name]} labels)" for name in lacks], most=8)
            what = f"{spec.name} does not have {some}: if its images show such objects, they are learned as background"
            notes.append(what)
    similar: dict[str, list[str]] = defaultdict(list)
    for name in names:
        similar["".join(filter(str.isalnum, name.casefold()))].append(shown(name))
    pairs = [" and ".join(group) for group in similar.values() if len(group) > 1]
    notes += [f"names that nearly agree are classes of their own: {listed(pairs, most=8)}"] if pairs else []
    return notes


def _without_copies(
    index: DataIndex,
    owner: np.ndarray,
    copies: Sequence[Sequence[tuple[str, str]]],
    has_class: np.ndarray,
    specs: Sequence[DatasetSpec],
    done: Combined,
) -> DataIndex:
    """Leave out the images that a later split has; join the labels of copies from several sets.

    Args:
        owner: int64 [N], the data set of each image.
        has_class: bool [sets, C].
    """
    at_path: dict[str, list[int]] = defaultdict(list)
    for at, path in enumerate(index.paths):
        at_path[path].append(at)
    first, moved, again = np.arange(len(index)), list[int](), 0
    is_kept = np.ones(len(index.classes), bool)
    for group in copies:
        here = [at for path in dict.fromkeys(p for s, p in group if s == index.split) for at in at_path[path]]
        last = max((split for split, _ in group), key=SPLITS.index)
        if here and last != index.split:
            moved += here
            continue
        here.sort(key=lambda at: owner[at])
        known = np.zeros(has_class.shape[1], bool)
        for one, at in enumerate(here):
            if owner[at] != owner[here[0]]:
                first[at], again = here[0], again + 1
                rows = slice(*index.offsets[at : at + 2])
                is_kept[rows] = ~known[index.classes[rows]]
            if one + 1 < len(here) and owner[here[one + 1]] != owner[at]:
                known |= has_class[owner[at]]
    if moved:
        some = listed([screen_line(f"{specs[owner[at]].name}: {index.path(at)}") for at in moved])
        what = f"{len(moved)} images of {index.split} are also in val or test of a set: left out of {index.split} ({some})"
        done.notes.append(what)
    if again:
        what = f"{index.split}: {again} images are in several sets: used once, with the labels of the first set and those of classes that it does not have"
        done.notes.append(what)
    used = np.setdiff1d(np.flatnonzero(first == np.arange(len(index))), moved)
    return _with_owners(index, first, is_kept).part(used) if again or moved else index


def _with_owners(index: DataIndex, owner_of: np.ndarray, keep: np.ndarray) -> DataIndex:
    """Return the index with the labels that ``keep`` marks, each at the image ``owner_of[its image]``."""
    owner = owner_of[np.repeat(np.arange(len(index)), np.diff(index.offsets))]
    order = np.argsort(owner, kind="stable")
    order = order[keep[order]]
    return index.reordered(order, offsets_of(np.bincount(owner[order], minlength=len(index))))


# -- files -----------------------------------------------------------------------------------------------------


def _write(
    done: Combined,
    names: Sequence[str],
    category_ids: Sequence[Id],
    labels: Mapping[str, str | None],
    kpt_shape: tuple[int, int] | None,
) -> None:
    """Write the folder, as lists if these give the same labels.

    Args:
        labels: the label file of each image; None if it has none of its own.
    """
    home = done.folder.absolute()
    images = {split: [_name(path, home) for path in index.paths] for split, index in done.indexes.items()}
    every = [labels.get(path) for index in done.indexes.values() for path in index.paths]
    about = {"nc": len(names), "names": list(names)} | ({"kpt_shape": list(kpt_shape)} if kpt_shape else {})
    with writing(home), whole_folder(home) as folder:
        if all(every):
            for split, index in done.indexes.items():
                lines = [
                    f"{name} {_name(str(file), home)}" if str(file).endswith(".xml") else name
                    for name, file in zip(images[split], map(labels.get, index.paths), strict=True)
                ]
                write_lines(folder / f"{split}.txt", lines)
            if not _difference(folder, done, {split: f"{split}.txt" for split in images}, about):
                return
            for split in images:
                (folder / f"{split}.txt").unlink()
        for split, index in done.indexes.items():
            write_coco(folder, split, images[split], index, category_ids, home.name)
        # categories of one name are told apart by their ids only
        about = {name: about[name] for name in ("nc", "names")} if len(set(names)) == len(names) else {}
        if difference := _difference(folder, done, {split: _FORM.format(split) for split in images}, about):
            what = f"the result differs when it is read back: {difference}"
            raise StorageError(
                what, hint="correct what yolofleet data check reports, or convert the data set first"
            )
        done.notes.append(
            "labels were copied into COCO's annotations: later changes of the source are not seen"
            + (", and key points are left out" if kpt_shape else "")
        )


def _name(path: str, home: Path) -> str:
    """Return the path of a file as the result states it: relative, so that both can be moved together, unless only the root of
    the disk has both, or a link leads to the result.
    """
    path = os.path.abspath(path)
    with suppress(ValueError):  # several Windows drives
        common = os.path.commonpath([path, home])
        if common != os.path.dirname(common) and home.parent == home.parent.resolve():
            return os.path.relpath(path, home).replace(os.sep, "/")
    return path


def _difference(folder: Path, done: Combined, entries: Mapping[str, str], about: Mapping[str, object]) -> str:
    """Write ``data.yaml``, read the folder, and return the first difference from the indexes, or "" if they are equal."""
    text = write_yaml({**entries, **about})
    (folder / "data.yaml").write_text(text, encoding="utf-8", newline="\n")
    try:
        spec = load_dataset(str(folder / "data.yaml"))
        for split, index in done.indexes.items():
            found = build_index(spec, split, masks=index.has_runs)
            if list(map(os.path.realpath, found.paths)) != list(map(os.path.realpath, index.paths)):
                return f"{len(found)} images of {split}, not the {len(index)} that were chosen"
            for name in ("offsets", "classes", "crowd"):
                if not np.array_equal(getattr(found, name), getattr(index, name)):
                    return f"{name} of {split}"
            if np.abs(found.boxes_cxcywh_unit - index.boxes_cxcywh_unit).max(initial=0) > TOLERANCE:
                return f"boxes of {split}"
            if not np.array_equal(found.run_lengths, index.run_lengths):
                return f"masks of {split}"
    except YolofleetError as error:
        return error.what
    return ""
