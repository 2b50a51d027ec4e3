"""Compare the class names of weights with those of a data set, and bring the classes into the order of the data set."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from yolofleet.support.text import listed, screen_line

# names of weights and data sets without real ones, and of --single-cls
NUMBERED = re.compile(r"(class|cls|category|label|object)?[ _-]?(\d+)|(object)", re.IGNORECASE)
SHOWN = 8  # names in a message


@dataclass(frozen=True)
class NameMatch:
    """How the classes of weights and of a data set belong together.

    Attributes:
        columns: for each class of the data set the number of the class of the weights; None: both have one order.
        pairs: (name in the weights, name in the data set) of classes that belong together under different names.
        text: what differs; "": nothing.
    """

    columns: tuple[int, ...] | None = None
    pairs: tuple[tuple[str, str], ...] = ()
    text: str = ""

    @property
    def note(self) -> str:
        """Return what was done about it."""
        return f"mapped by name: {self.text}" if self.columns is not None else self.text


def match_names(of_weights: Sequence[str], of_data: Sequence[str], *, assumed: bool = False) -> NameMatch:
    """Match two lists of class names of equal length: equal names first, then the others in their order.

    Capital letters, ``_`` and ``-`` make no difference. Names that are only numbers match everything.

    Args:
        assumed: the file of the weights has no names, so those that its reader gave them match everything, too.
    """
    theirs, ours = _keys(of_weights), _keys(of_data)
    if len(set(theirs)) < len(theirs) or len(set(ours)) < len(ours):
        theirs, ours = list(of_weights), list(of_data)
    shared, count = set(theirs) & set(ours), len(ours)
    says_nothing = assumed or _is_numbered(of_weights) or _is_numbered(of_data)
    if theirs == ours or (len(shared) < count and says_nothing):
        return NameMatch()
    in_order = columns = tuple(range(count))
    if len(set(theirs)) == len(set(ours)) == count:
        rest = iter([number for number, key in enumerate(theirs) if key not in shared])
        columns = tuple(theirs.index(key) if key in shared else next(rest) for key in ours)
    pairs = tuple((of_weights[c], of_data[n]) for n, c in enumerate(columns) if theirs[c] != ours[n])
    texts = []
    if columns != in_order:
        places = [f"{n}: {of_weights[n]} / {of_data[n]}" for n in in_order if theirs[n] != ours[n]]
        texts.append("the classes have another order: " + _shown(places))
    if pairs:
        names = _shown([f"{mine} / {yours}" for mine, yours in pairs])
        texts.append(f"{len(pairs)} of {count} classes have two names: {names}")
    text = "; ".join(texts) + " (weights / data set)"
    return NameMatch(columns if columns != in_order else None, pairs, text)


class ReorderedClasses:
    """A network, or an exported file, whose classes are in the order of a data set; evaluation can use it.

    Args:
        columns: for each class of the data set the number of the network's class.
    """

    training = False

    def __init__(self, network: Any, columns: Sequence[int]) -> None:
        self.network, self.nc, self.strides = network, network.nc, network.strides
        self.networks, self.needs_nms = getattr(network, "networks", (network,)), network.needs_nms
        self.task = network.task
        self._columns = columns

    def __call__(self, images: Tensor) -> Any:
        return self.network(images)

    def decode(self, raws: Any) -> Any:
        """Return predictions as ``Detector.decode``, or a list of these."""
        decoded = self.network.decode(raws)
        if isinstance(decoded, list):
            return [one.of_classes(self._columns) for one in decoded]
        return decoded.of_classes(self._columns)


def _keys(names: Sequence[str]) -> list[str]:
    """Return the names without differences of spelling."""
    return [" ".join(re.split(r"[\s_-]+", name.strip().casefold())) for name in names]


def _is_numbered(names: Sequence[str]) -> bool:
    """Return whether the names say nothing: 0, 1, ... or class0, class1, ..., from 0 or 1; or object."""
    found = [NUMBERED.fullmatch(name.strip()) for name in names]
    numbers = [int(one[2] or 0) if one else -1 for one in found]
    return any(numbers == list(range(first, first + len(names))) for first in (0, 1))


def _shown(names: Sequence[str]) -> str:
    return listed([screen_line(name, limit=60) for name in names], most=SHOWN)
