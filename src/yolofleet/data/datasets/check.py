"""Check a data set: its labels and image headers, on request every image, and images that occur twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from yolofleet.data.datasets.audit import decode_all, same_images
from yolofleet.data.datasets.index import DataIndex, build_index
from yolofleet.data.datasets.labels import KINDS, LOSSES, MAX_PROBLEMS_KEPT, REFUSED, Problem
from yolofleet.data.datasets.overlap import overlap_notes
from yolofleet.data.datasets.spec import SPLITS, DatasetSpec
from yolofleet.support.errors import DataError
from yolofleet.support.text import listed

EMPTY_CLASSES_SHOWN = 8
Progress = Callable[[str, int, int], None]  # stage, images done, all


def existing_splits(spec: DatasetSpec, wanted: str) -> list[str]:
    """Return the splits that ``--split`` names: one, or with ``all`` those of the description."""
    if wanted != "all":
        return [wanted]
    return [name for name in SPLITS if name in spec.splits or name in spec.missing]


def lenient_index(
    spec: DatasetSpec,
    split: str,
    *,
    on_progress: Progress,
    problems_kept: int = 0,
    single_cls: bool = False,
) -> DataIndex:
    """Return the index of a split without raising for its problems. Training reuses the stored index."""
    return build_index(
        spec,
        split,
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
        copies: groups of equal images, (split, path) of each.
    """

    spec: DatasetSpec
    indexes: list[DataIndex] = field(default_factory=list)
    errors: dict[str, DataError] = field(default_factory=dict)
    problems: dict[str, list[Problem]] = field(default_factory=dict)
    kinds: dict[str, Counter[str]] = field(default_factory=dict)
    copies: list[list[tuple[str, str]]] = field(default_factory=list)

    @property
    def notes(self) -> list[str]:
        """Notes of the description, images in two splits, image sizes, classes without labels, and class numbers that seem
        to start at 1.
        """
        assumed = (f"{i.split}: {note}" for i in self.indexes for note in i.assumed)
        notes = [*self.spec.notes, *assumed, *overlap_notes(self.indexes)]
        for index in self.indexes:
            (width, height), (most_width, most_height) = index.sizes_wh.min(0), index.sizes_wh.max(0)
            sizes = f"{index.split}: images from {width} x {height} to {most_width} x {most_height} px"
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

    def verdict(self, data: str) -> DataError | None:
        """Return an error if images or labels are lost, or an image is in two splits."""
        lost = {kind for counts in self.kinds.values() for kind in counts if KINDS[kind] in LOSSES}
        if self.errors or any(KINDS[kind] == REFUSED for kind in lost):
            hint = "correct these files; train refuses this data set"
        elif lost:
            hint = "correct these files; a training that is started all the same leaves out what is dropped"
        elif any("image-in-two-splits" in counts for counts in self.kinds.values()):
            hint = "keep each image in one split only: accuracy on images that were learned says nothing"
        else:
            return None
        fault = "loses images or labels" if self.errors or lost else "has the same images in several splits"
        return DataError(f"{data} {fault}; the problems are listed above", hint=hint)

    def to_json(self) -> dict[str, Any]:
        return {
            "data": self.spec.origin,
            "names": list(self.spec.names),
            "splits": {
                index.split: {
                    **{name.replace(" ", "_"): number for name, number in index.totals().items()},
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
    """Check splits of a data set.

    Args:
        decode: also decode every image.
        duplicates: also search for equal images.
        problems_kept: problems of each split to keep.
        single_cls: all classes become class 0.
    """
    found = DatasetCheck(spec)
    for split in splits:
        try:
            index = lenient_index(
                spec, split, on_progress=on_progress, problems_kept=problems_kept, single_cls=single_cls
            )
        except DataError as error:
            found.errors[split] = error
            continue
        found.indexes.append(index)
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
    for group in found.copies:
        copied_in = {split for split, _ in group}
        for split in copied_in:
            found.kinds[split]["image-in-two-splits" if len(copied_in) > 1 else "image-copy"] += 1
    return found
