# Paths are strings here: a data set may have millions.
# ruff: noqa: PTH116
"""Check a data set: its labels and image headers, on request every image, and images that occur twice.

OpenCV returns a damaged JPEG half grey and only prints a warning. So child processes decode the images with standard
error redirected to a file, and read that file after each image.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np

from yolofleet.data.datasets.divide import parted_groups
from yolofleet.data.datasets.index import DataIndex, build_index
from yolofleet.data.datasets.labels import KINDS, MAX_PROBLEMS_KEPT, Problem
from yolofleet.data.datasets.listing import overlap_notes
from yolofleet.data.datasets.spec import SPLITS, DatasetSpec
from yolofleet.data.geometry.rle import RunTable, slices_of
from yolofleet.data.images.decode import read_image
from yolofleet.storage.foreign import open_foreign
from yolofleet.support.errors import DataError
from yolofleet.support.system.children import safe_spawn
from yolofleet.support.text import listed

EMPTY_CLASSES_SHOWN = 8
_CHUNK = 64
_THREADS = 8  # they mostly wait for the disk
_MOST_PROCESSES = 16
_BLOCK_BYTES = 1 << 20
_RUNS_AT_ONCE = 1 << 22  # about 200 MB of temporaries
_IMG, _CELL = 640, 4  # pixels: the usual image size, and the side of a pixel of a loss
MASK_COUNTS = (
    "labels without a mask",
    "masks that leave their box",
    "masks below a pixel of the loss at 640 px",
)
_DARK = 17  # 12 of 16 bits end at 15 after the division by 256
Progress = Callable[[str, int, int], None]  # stage, images done, all


def existing_splits(spec: DatasetSpec, wanted: str) -> list[str]:
    """Return the splits that ``--split`` names: one, or with ``all`` those that a training uses, and test if it has files."""
    if wanted != "all":
        return [wanted]
    return [name for name in SPLITS if name in spec.splits or (name in spec.missing and name != "test")]


def lenient_index(
    spec: DatasetSpec,
    split: str,
    *,
    on_progress: Progress,
    problems_kept: int = 0,
    single_cls: bool = False,
    masks: bool | None = False,
) -> DataIndex:
    """Return the index of a split without raising for its problems. Training reuses the stored index."""
    return build_index(
        spec,
        split,
        masks=masks,
        strict=False,
        single_cls=single_cls,
        problems_kept=max(problems_kept, MAX_PROBLEMS_KEPT),
        on_progress=partial(on_progress, f"reading {split}"),
    )


@dataclass
class DatasetCheck:
    """What is wrong with a data set. Counts and lists of problems are by split.

    Attributes:
        indexes: of the splits that can be read; ``errors`` has the others.
        problems: those that are kept; ``kinds`` counts all.
        masks: what is wrong with masks, see ``mask_counts``; none for a split without any.
        copies: groups of equal images, (split, path) of each.
        parted: notes about frames of videos in several splits.
    """

    spec: DatasetSpec
    indexes: list[DataIndex] = field(default_factory=list)
    errors: dict[str, DataError] = field(default_factory=dict)
    problems: dict[str, list[Problem]] = field(default_factory=dict)
    kinds: dict[str, Counter[str]] = field(default_factory=dict)
    masks: dict[str, dict[str, int]] = field(default_factory=dict)
    copies: list[list[tuple[str, str]]] = field(default_factory=list)
    parted: list[str] = field(default_factory=list)

    @property
    def leaks(self) -> list[str]:
        """Notes about images, and frames of one video, that are in several splits."""
        return [*overlap_notes(self.indexes), *self.parted]

    @property
    def notes(self) -> list[str]:
        """Notes of the description, images in two splits, image sizes, classes without labels, and class numbers that seem
        to start at 1.
        """
        assumed: dict[str, list[str]] = {}
        for index in self.indexes:
            for note in index.assumed:
                assumed.setdefault(note, []).append(index.split)
        of_splits = (f"{' and '.join(splits)}: {note}" for note, splits in assumed.items())
        notes = [*self.spec.notes, *of_splits, *self.leaks]
        if "test" in self.spec.missing and "test" not in self.errors:
            what = self.spec.missing["test"].what
            notes.append(f"{what}: test is left out; a training does not use it")
        for index in self.indexes:
            ends = [f"{width} x {height}" for width, height in (index.sizes_wh.min(0), index.sizes_wh.max(0))]
            sizes = f"{index.split}: images from {' to '.join(ends)} px"
            if ends[0] == ends[1]:
                sizes = f"{index.split}: all images have {ends[0]} px"
            empty = [name for name, count in zip(index.names, index.class_counts(), strict=True) if not count]
            shown = listed(empty, most=EMPTY_CLASSES_SHOWN)
            few = f"; {len(empty)} of {len(index.names)} classes have no label: {shown}" if empty else ""
            notes.append(sizes + few)
        has_no_first_class = bool(self.indexes) and not sum(index.class_counts()[0] for index in self.indexes)
        if has_no_first_class and any(counts["wrong-class"] for counts in self.kinds.values()):
            notes.append(
                "no label is of class 0, and some are of a class that names does not have: are they numbered from 1?"
            )
        return notes

    def totals(self, index: DataIndex) -> dict[str, int]:
        """Return the totals of a split, with those of its masks if any split has some."""
        return index.totals() | (
            self.masks.get(index.split) or dict.fromkeys(MASK_COUNTS, 0) if self.masks else {}
        )

    def verdict(self, data: str) -> DataError | None:
        """Return an error if images or labels are lost, or an image is in two splits."""
        lost = {kind for counts in self.kinds.values() for kind in counts if KINDS[kind].loses}
        if self.errors or "wrong-class" in lost:
            hint = "correct these files; train refuses this data set"
        elif lost:
            hint = "correct these files; a training that is started all the same leaves out what is dropped"
        elif any("image-in-two-splits" in counts for counts in self.kinds.values()):
            hint = "keep each image in one split only: accuracy on images that were learned says nothing"
        else:
            return None
        problem = "loses images or labels" if lost else "has the same images in several splits"
        problem = f"cannot be used: {' and '.join(self.errors)}" if self.errors else problem
        return DataError(f"{data} {problem}; the problems are listed above", hint=hint)

    def to_json(self) -> dict[str, Any]:
        return {
            "data": self.spec.origin,
            "names": list(self.spec.names),
            "splits": {
                index.split: {
                    **{name.replace(" ", "_"): number for name, number in self.totals(index).items()},
                    "labels_of_class": dict(zip(index.names, index.class_counts().tolist(), strict=True)),
                    "kinds": dict(self.kinds[index.split]),
                    "problems": [{**asdict(p), "action": p.action} for p in self.problems[index.split]],
                }
                for index in self.indexes
            },
            "unusable": {
                name: {"what": e.what, "source": e.source, "hint": e.hint} for name, e in self.errors.items()
            },
            "same_images": [
                [{"split": split, "path": path} for split, path in group] for group in self.copies
            ],
            "notes": self.notes,
        }


def check_dataset(
    spec: DatasetSpec,
    splits: Sequence[str],
    *,
    decode: bool,
    duplicates: bool,
    problems_kept: int,
    on_progress: Progress,
    single_cls: bool = False,
) -> DatasetCheck:
    """Check splits of a data set."""
    found = DatasetCheck(spec)
    for split in splits:
        try:
            index = lenient_index(
                spec,
                split,
                on_progress=on_progress,
                problems_kept=problems_kept,
                single_cls=single_cls,
                masks=None,
            )
        except DataError as error:
            found.errors[split] = error
            continue
        found.indexes.append(index)
        if index.has_runs:
            found.masks[split] = mask_counts(index)
        undecodable = []
        if decode:
            problems = decode_all(index, on_progress=partial(on_progress, f"decoding {split}"))
            undecodable = [problem.below(spec.root) for problem in problems]
        found.problems[split] = [*index.problems, *undecodable]
        found.kinds[split] = Counter(index.problem_kinds) + Counter(p.kind for p in undecodable)
    if duplicates:
        distinct = [
            index
            for at, index in enumerate(found.indexes)
            if not any(spec.splits[index.split] == spec.splits[other.split] for other in found.indexes[:at])
        ]
        found.copies = same_images(distinct, on_progress=partial(on_progress, "comparing images"))
        found.parted = parted_groups(distinct) if distinct else []
    for group in found.copies:
        copied_in = {split for split, _ in group}
        for split in copied_in:
            found.kinds[split]["image-in-two-splits" if len(copied_in) > 1 else "image-copy"] += 1
    return found


def mask_counts(index: DataIndex) -> dict[str, int]:
    """Return how many labels, without crowd regions, have no mask, a mask that leaves its box by more than a pixel, or one that
    is smaller than a pixel of the maps that a loss compares, in training at ``_IMG`` pixels.
    """
    lengths = np.diff(index.run_offsets)
    sizes = np.repeat(index.sizes_wh.astype(np.float64), np.diff(index.offsets), axis=0)  # [M, 2]
    middle, half = index.boxes_cxcywh_unit[:, :2] * sizes, index.boxes_cxcywh_unit[:, 2:] * sizes / 2
    leaves, small = np.zeros((2, len(lengths)), bool)
    for part in slices_of(lengths, _RUNS_AT_ONCE):
        start, stop = index.run_offsets[part.start], index.run_offsets[part.stop]
        table = RunTable(index.run_lengths[start:stop], lengths[part])
        corner, sides = np.split(table.boxes_xywh(sizes[part, 1].astype(np.int64)), 2, axis=1)
        over = np.maximum((middle - half)[part] - corner, corner + sides - (middle + half)[part])
        leaves[part] = (over > 1.01).any(axis=1)
        small[part] = table.areas * (_IMG / sizes[part].max(axis=1)) ** 2 < _CELL**2
    has = (lengths > 0) & ~index.crowd
    counts = (~has & ~index.crowd, leaves & has, small & has)
    return {name: int(of.sum()) for name, of in zip(MASK_COUNTS, counts, strict=True)}


# -- images that do not decode, and equal images --------------------------------------------------------------------


def decode_all(
    index: DataIndex, *, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> list[Problem]:
    """Decode every image in child processes and return a problem for each that is not as it should be.

    An image is a problem if it does not decode, has another size than its header states, or makes the decoder print a
    warning.
    """
    paths = index.paths
    sizes = [tuple(size) for size in index.sizes_wh.tolist()]
    jobs = [(paths[at : at + _CHUNK], sizes[at : at + _CHUNK]) for at in range(0, len(paths), _CHUNK)]
    processes = min(_MOST_PROCESSES, os.cpu_count() or 1, max(1, len(jobs)))
    spawn = multiprocessing.get_context("spawn")
    problems: list[Problem] = []
    with (
        safe_spawn(),
        cancelled_early(ProcessPoolExecutor(processes, spawn, initializer=_catch_warnings)) as pool,
    ):
        done = 0
        for job, found in zip(jobs, pool.map(_decode_some, jobs), strict=True):
            problems += found
            done += len(job[0])
            on_progress(done, len(paths))
    return problems


def _catch_warnings() -> None:
    """Redirect standard error of this process to an unnamed file."""
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)


def _decode_some(job: tuple[Sequence[str], Sequence[tuple[int, ...]]]) -> list[Problem]:
    problems = []
    for path, (width, height) in zip(*job, strict=True):
        try:
            image = read_image(path)
        except DataError as error:
            _warning()
            what = error.what.removeprefix(f"image {path} ")
            problems.append(Problem(path, None, what, "image-undecodable"))
            continue
        warning = _warning()
        if image.shape[:2] != (height, width):
            what = f"has {image.shape[1]} x {image.shape[0]} pixels, but its header states {width} x {height}"
            problems.append(Problem(path, None, what, "image-undecodable"))
        elif warning:
            problems.append(Problem(path, None, f"decoder warning: {warning}", "image-damaged"))
        elif image.max() < _DARK:
            what = f"is nearly black: no pixel is brighter than {image.max()} of 255"
            problems.append(Problem(path, None, what, "image-dark"))
    return problems


def _warning() -> str:
    """Return the first line that was printed to standard error since the last call."""
    if not os.lseek(2, 0, os.SEEK_CUR):
        return ""
    os.lseek(2, 0, os.SEEK_SET)
    text = os.read(2, 4096)
    os.lseek(2, 0, os.SEEK_SET)
    os.ftruncate(2, 0)
    lines = text.decode("utf-8", "replace").strip().splitlines()
    return lines[0][:200] if lines else "text that cannot be shown"


def same_images(
    indexes: Sequence[DataIndex], *, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> list[list[tuple[str, str]]]:
    """Return groups of images with equal file content, [(split, path), ...]; groups in several splits come first.

    Only files of equal length are read. The same image in another encoding is not detected.
    """
    by_length: dict[int, list[tuple[str, str]]] = defaultdict(list)
    for index in indexes:
        for path in index.paths:
            try:
                by_length[os.stat(path).st_size].append((index.split, path))
            except OSError:
                continue
    alike = [item for items in by_length.values() if len(items) > 1 for item in items]
    groups: dict[bytes, list[tuple[str, str]]] = defaultdict(list)
    with cancelled_early(ThreadPoolExecutor(_THREADS, thread_name_prefix="hash")) as pool:
        for done, (item, digest) in enumerate(zip(alike, pool.map(_digest, alike), strict=True), 1):
            if digest:
                groups[digest].append(item)
            if done % _CHUNK == 0 or done == len(alike):
                on_progress(done, len(alike))
    found = [items for items in groups.values() if len(items) > 1]
    return sorted(found, key=lambda items: (len({split for split, _ in items}) == 1, items))


def _digest(item: tuple[str, str]) -> bytes | None:
    digest = hashlib.blake2b(digest_size=16)
    try:
        with open_foreign(item[1], buffering=0) as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
    except OSError:
        return None
    return digest.digest()


@contextmanager
def cancelled_early(pool: Executor) -> Iterator[Executor]:
    """Shut a pool down. On an exception such as Ctrl-C, cancel the jobs that have not begun."""
    try:
        yield pool
    except BaseException:
        pool.shutdown(cancel_futures=True)
        raise
    pool.shutdown()
