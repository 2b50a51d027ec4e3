"""Group the images of a data set by their names or by a table, and divide the groups into splits.

All numbers are integers and the order comes from a hash, so every machine divides equal data sets in the same way.
"""

from __future__ import annotations

import csv
import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from yolofleet.data.datasets.index import DataIndex
from yolofleet.data.datasets.reader import list_lines
from yolofleet.data.datasets.writers import below_common_folder
from yolofleet.support.errors import ConfigError
from yolofleet.support.text import listed, screen_line, shown

UNIT = 1_000_000  # shares are whole numbers of it, so sums are exact
_NEAR_UNIT = 1 << 24  # the same for distances; a product of two, summed over 10,000 classes, is below 2**63
_MOVES = 1000
# Roboflow's versions of one picture
_COPY = re.compile(r"(?i)[_.](jpe?g|png|bmp|webp|tiff?)\.rf\.[0-9a-z]+$")
_NUMBER = re.compile(r"[ _.()-]*\d+\)?$")
# what cameras and programs write before the number of a picture, splits, years and times
_COMMON = re.compile(
    r"(?i)(img|image|im|pic|picture|photo|p|dsc|dscn|dscf|pxl|scan|frame|file|train|val|valid|test|[\W\d_]*)"
)
_LETTER = re.compile(r"[^\W\d_]")
_LAYOUT = re.compile(r"(?i)(jpeg)?images|data|(train|val|valid|validation|test)[\W\d_]*|")


def groups_by_name(names: Sequence[str]) -> list[str]:
    """Return the group of each image: its name without the last number, as ``clip`` of ``clip_0001.jpg``.

    Names of several videos do not tell them apart if they are those of a camera (``frame_0001``), are the same in several
    folders, or begin alike in most images: then the folder is the group. Folders of a layout, as ``images`` and ``train``,
    do not count. Roboflow's versions of one picture (``a_jpg.rf.1f2e.jpg``) are one group. Other images, as ``000001`` or
    ``IMG_0001`` without a folder, are alone.

    Args:
        names: paths separated by /.
    """
    parts: list[
        tuple[str, str, str]
    ] = []  # of each image: folders without those of a layout, picture, series
    homes, of_cameras = dict[str, str](), set[str]()
    for name in names:
        folder, _, base = name.rpartition("/")
        picture = _COPY.sub("", base.rpartition(".")[0])
        series = _NUMBER.sub("", picture)
        folders = "/".join(part for part in folder.split("/") if not _LAYOUT.fullmatch(part))
        parts.append((folders, picture, series))
        if series != picture and homes.setdefault(picture, folders) != folders:
            of_cameras.add(series)
    counts = Counter(series for _, picture, series in parts if series != picture)
    of_cameras |= {
        series for series, count in counts.items() if _LETTER.search(series) and count * 2 > len(names)
    }
    groups = []
    for name, (folders, picture, series) in zip(names, parts, strict=True):
        is_numbered, is_common = series != picture, _COMMON.fullmatch(series)
        if is_numbered and folders and (series in of_cameras or (is_common and _LETTER.search(series))):
            groups.append(f"{folders}/")
        elif is_numbered and not is_common:
            groups.append(series)
        else:
            stem = name.rpartition(".")[0]
            groups.append(f"/{picture}" if _COPY.search(stem) else f"{stem.rpartition('/')[0]}/{picture}")
    return groups


def groups_with_copies(
    groups: Sequence[str], paths: Sequence[str], copies: Sequence[Sequence[tuple[str, str]]]
) -> list[str]:
    """Return the groups of images, of which those that share an image are one.

    Args:
        copies: of ``same_images``; other paths are ignored.
    """
    of, above = dict(zip(paths, groups, strict=True)), dict[str, str]()

    def top(group: str) -> str:
        while group in above:
            group = above[group]
        return group

    for same in copies:
        first, *others = dict.fromkeys(top(of[path]) for _, path in same if path in of) or [""]
        above |= dict.fromkeys(others, first)
    return [top(group) for group in groups]


def parted_groups(indexes: Sequence[DataIndex]) -> list[str]:
    """Return a note if frames of a video, by their names, are in several splits. The indexes have the same classes."""
    names = below_common_folder([path for index in indexes for path in index.paths])
    groups, splits = (
        groups_by_name(names),
        np.repeat([index.split for index in indexes], [*map(len, indexes)]),
    )
    owner = np.repeat(np.arange(len(names)), np.concatenate([np.diff(index.offsets) for index in indexes]))
    classes = np.concatenate([index.classes for index in indexes])
    share = UNIT * int((splits == "train").sum()) // len(names)
    if Stratification(groups, owner, classes, len(indexes[0].names), 0).why_not([share]):
        return []
    found: dict[str, dict[str, str]] = {}
    for name, group, split in zip(names, groups, splits.tolist(), strict=True):
        found.setdefault(group, {}).setdefault(split, name)
    parted = [[*some.values()] for some in found.values() if len(some) > 1]
    what = f"{len(parted)} groups of images that seem to be frames of one video, by their names, are in several splits"
    such = " and ".join(map(screen_line, parted[0][:2])) if parted else ""
    return [f"{what}, such as {such}; yolofleet data split keeps each in one split"] if parted else []


def groups_by_pattern(names: Sequence[str], pattern: str) -> list[str]:
    """Return the group of each image that a regular expression finds in its path, "" for none. Raises ConfigError.

    Args:
        pattern: its first group is the name, or all that it matches.
    """
    try:
        matches = [re.search(pattern, name) for name in names]
    except (re.error, RecursionError, OverflowError) as error:
        what = f"--group {shown(pattern)} is not a regular expression: {error}"
        raise ConfigError(what, source="command line", hint="--group '([^/]+)/[^/]+$' for folders") from None
    return [(match[1 if match.re.groups else 0] or "") if match else "" for match in matches]


def groups_by_table(names: Sequence[str], table: str) -> list[str]:
    """Return the group of each image that a column of a CSV file states, "" for none. Raises ConfigError.

    Args:
        table: ``FILE:COLUMN``; the first column has the file names of the images, with or without folders.
    """
    file, _, column = table.rpartition(":")
    try:
        rows = [[cell.strip() for cell in row] for row in csv.reader(list_lines(Path(file))) if row]
    except (OSError, ValueError, csv.Error) as error:
        what = f"--groups {shown(table)} cannot be read: {error}"
        raise ConfigError(what, source="command line", hint="--groups FILE.csv:COLUMN") from None
    if not rows or column not in rows[0][1:]:
        what = (
            f"no column {shown(column)} behind the first (columns: {listed(rows[0] if rows else [], most=8)})"
        )
        raise ConfigError(what, source=file, hint="--groups FILE.csv:COLUMN")
    at, stated = rows[0].index(column), dict[str, str]()
    for number, row in enumerate(rows[1:], 2):
        name, group = row[0].replace("\\", "/"), row[at] if len(row) > at else ""
        if stated.setdefault(name, group) != group:
            what = f"{shown(name)} is in the groups {shown(stated[name])} and {shown(group)}"
            raise ConfigError(what, source=f"{file}, row {number}", hint="state one group for each image")

    def of(name: str) -> str:
        ends = ["/".join(name.split("/")[start:]) for start in range(name.count("/") + 1)]
        found = (stated.get(end) or stated.get(end.rpartition(".")[0]) for end in ends)
        return next(filter(None, found), "")

    return list(map(of, names))


class Stratification:
    """Iterative stratification of groups of images.

    The class with the fewest labels left comes first. Each group with that class, the one with most labels of it first, goes to
    the split that lacks most of them. Then groups move one by one, as long as that brings the splits nearer to their shares.
    Source: Sechidis, Tsoumakas, Vlahavas, "On the Stratification of Multi-Label Data", ECML PKDD 2011. There, an image has a
    class or not; here a group has a number of labels of each, and images without labels are one more class.

    Legend: N images, M labels, G groups, C columns: the classes, images without labels, and images.

    Args:
        groups: N names.
        owner, classes: int64 [M]: the image and the class of each label.
        names: number of classes.
        seed: decides between groups that are equally good.
    """

    def __init__(
        self, groups: Sequence[str], owner: np.ndarray, classes: np.ndarray, names: int, seed: int
    ) -> None:
        def order(name: str) -> bytes:
            return hashlib.blake2b(f"{seed}\0{name}".encode("utf-8", "surrogateescape")).digest()

        number = {name: at for at, name in enumerate(sorted(set(groups), key=order))}
        self.member = np.array([number[name] for name in groups], np.int64)  # [N]
        self.columns, images = names + 2, np.arange(len(groups))
        without = np.setdiff1d(images, owner)
        column = np.concatenate([classes, np.full(len(without), names), np.full(len(images), names + 1)])
        group = self.member[np.concatenate([owner, without, images]).astype(np.int64)]
        cells, self.count = np.unique(group * self.columns + column, return_counts=True)
        # of each cell of the table [G, C] that is not 0
        self.group, self.column = np.divmod(cells, self.columns)
        self.starts = np.searchsorted(self.group, np.arange(len(number) + 1))
        self.total = np.bincount(column.astype(np.int64), minlength=self.columns)

    def split(self, shares: Sequence[int]) -> np.ndarray:
        """Return the split of each image, int64 [N]; ``shares`` of the splits are in ``UNIT``."""
        chosen = np.full(len(self.starts) - 1, -1, np.int64)
        lacks = np.array(shares, np.int64)[:, None] * self.total  # [splits, C], in UNIT
        left = self.total[:-1].copy()
        while left.any():
            rarest = int(np.flatnonzero(left)[np.argmin(left[left > 0])])
            here = np.flatnonzero((self.column == rarest) & (chosen[self.group] < 0))
            for cell in here[np.argsort(-self.count[here], kind="stable")].tolist():
                group = int(self.group[cell])
                best = max(range(len(shares)), key=lambda s: (lacks[s, rarest], lacks[s, -1], -s))
                own = self._cells(group)
                chosen[group] = best
                lacks[best, self.column[own]] -= UNIT * self.count[own]
                left[self.column[own][:-1]] -= self.count[own][:-1]  # the last column is that of images
        self._improve(chosen, shares)
        return chosen[self.member]

    def _cells(self, group: int) -> slice:
        return slice(self.starts[group], self.starts[group + 1])

    def _improve(self, chosen: np.ndarray, shares: Sequence[int]) -> None:
        """Move groups while that lowers the sum of the squared distances, each as a share of its column."""
        weight = self.count * _NEAR_UNIT // self.total[self.column]
        over = np.zeros((len(shares), self.columns), np.int64)  # what a split has too much
        np.add.at(over, (chosen[self.group], self.column), weight)
        over -= np.array(shares, np.int64)[:, None] * over.sum(0) // UNIT
        for _ in range(_MOVES):
            moves = []
            for split in range(len(shares)):
                change = weight * (over[split, self.column] - over[chosen[self.group], self.column] + weight)
                sums = np.diff(np.concatenate([[0], np.cumsum(change)])[self.starts])
                sums[chosen == split] = 0
                moves.append((int(sums.min()), split, int(sums.argmin())))
            gain, split, group = min(moves)
            if gain >= 0:
                return
            own = self._cells(group)
            over[chosen[group], self.column[own]] -= weight[own]
            over[split, self.column[own]] += weight[own]
            chosen[group] = split

    def why_not(self, shares: Sequence[int]) -> str:
        """Return why the groups are hardly frames of videos, or do not reach each split; "" if neither is known.

        Args:
            shares: of the splits, in ``UNIT``, that of train first; one alone is not tried.
        """
        sizes = np.bincount(self.member)
        if sizes.max() * UNIT > shares[0] * len(self.member):
            return f"the largest group would have {sizes.max()} of {len(self.member)} images"
        is_class = self.column < self.columns - 2
        groups = np.bincount(self.column[is_class], minlength=self.columns - 2)
        several = np.unique(self.column[is_class & (sizes[self.group] > 1)])  # classes of a larger group
        alone, known = int((groups[several] == 1).sum()), int((groups > 0).sum())
        if alone * 2 > known:
            return f"{alone} of {known} classes would be in one group only"
        if len(shares) > 1 and len(np.unique(self.split(shares))) < len(shares):
            return f"a split would get none of the {len(sizes)} groups"
        return ""
