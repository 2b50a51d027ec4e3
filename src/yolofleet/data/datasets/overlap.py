# Paths are strings here: a data set may have millions.
"""Find images that two splits share, by their paths. ``audit.same_images`` finds copies, which takes the content."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import combinations

from yolofleet.data.datasets.index import DataIndex


def overlap_notes(splits: Sequence[DataIndex]) -> list[str]:
    """Return a note for each two splits that share image files, also over symbolic links."""
    notes = []
    for first, second in combinations(splits, 2):
        known, stamps = set(first.paths), set(map(tuple, first.stamps.tolist()))
        others = [n for n, path in enumerate(second.paths) if path not in known]
        # one file has one size and one time under all its names
        linked = [n for n in others if tuple(second.stamps[n].tolist()) in stamps]
        real = set(map(os.path.realpath, known if linked else ()))
        shared = len(second) - len(others) + sum(os.path.realpath(second.path(n)) in real for n in linked)
        if shared == len(first) == len(second):
            what = f"{first.split} and {second.split} are the same {shared} images"
        else:
            what = f"{shared} of {len(second)} {second.split} images are {first.split} images too"
        if shared:
            notes.append(f"{what}: accuracy on images that were learned says nothing about others")
    return notes
