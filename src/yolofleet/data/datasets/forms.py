"""What the four numbers of a box mean: two corners, or a corner or centre and the sides; pixels or fractions of the image.

All readers have one rule: the boxes of a whole file or split show it, never a single box.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

FORMS = ("x, y, width, height", "x1, y1, x2, y2", "cx, cy, width, height")  # of the four numbers of a box
SIDES, CORNERS, CENTRE = range(3)
FRACTIONS = "boxes are taken as fractions of their images, not as pixels: {count}"
_EDGE = 1e-3  # fractions of other programs exceed 0..1 by rounding


def low_and_high(form: int, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the corners of boxes in one of ``FORMS``: [M, 2] each."""
    first, second = numbers[:, :2], numbers[:, 2:]
    if form == CENTRE:
        return first - second / 2, first + second / 2
    return first, second if form == CORNERS else first + second


def evidence_of(numbers: np.ndarray, sizes_wh: np.ndarray, area: np.ndarray | None = None) -> np.ndarray:
    """Return what shows the form of boxes, int64 [6]; add the evidence of several files.

    Args:
        numbers: [M, 4]; those that are not finite do not count.
        sizes_wh: [M, 2] of the image of each box in the same unit; boxes of an unknown size (0) do not count.
        area: [M], as the file states it.
    Returns:
        number of boxes; those that do not fit their images in each of ``FORMS``; those whose area is width x height if
        they are sides, and if they are corners.
    """
    known = np.isfinite(numbers).all(1) & (sizes_wh > 0).all(1)
    numbers, sizes = numbers[known], sizes_wh[known].astype(np.float64)
    slack = 0.01 * sizes + (sizes > 1)  # programs round, or count pixels from 1
    corners = [low_and_high(form, numbers) for form in range(3)]
    wrong = [((low < -slack) | (high > sizes + slack) | (high <= low)).any(1).sum() for low, high in corners]
    stated = np.full(len(numbers), np.nan) if area is None else area[known]
    equal = [(abs((high - low).prod(1) - stated) <= 0.01 * stated).sum() for low, high in corners[:2]]
    return np.array([len(numbers), *wrong, *equal], np.int64)


def form_of(evidence: np.ndarray, usual: int) -> int | None:
    """Return which of ``FORMS`` the boxes of a file have; None if it is not ``usual``, but not clear which other one.

    It is another form only if nearly all boxes fit their images in that form, and either many do not in the usual one, or
    the stated areas show corners. A few boxes that stick out show nothing.
    """
    boxes, wrong, (as_sides, as_corners) = int(evidence[0]), evidence[1:4], evidence[4:]
    fitting = [form for form in range(3) if wrong[form] * 100 <= boxes]
    if as_sides > as_corners and CORNERS in fitting:
        fitting.remove(CORNERS)
    if usual == SIDES and as_corners * 2 > boxes and as_corners > as_sides and CORNERS in fitting:
        return CORNERS
    is_certain = boxes > 1 and wrong[usual] >= max(boxes / 10, min(3, boxes / 2))
    if usual in fitting or not fitting or not is_certain:
        return usual
    return fitting[0] if len(fitting) == 1 else None


def form_in_words(evidence: np.ndarray, usual: int) -> str:
    """Return how many boxes do not fit their images in the usual form, and in the others."""
    boxes, *wrong = evidence[:4].tolist()
    others = ", ".join(f"{wrong[form]} as {FORMS[form]}" for form in range(3) if form != usual)
    return f"{wrong[usual]} of {boxes} boxes do not fit their images as {FORMS[usual]}, which this format has; {others}"


def are_fractions(corners: Sequence[Sequence[float]]) -> bool | None:
    """Return whether all x1, y1, x2, y2 of a file that should be pixels are fractions: a box in pixels is larger than a pixel.

    None: the file shows nothing, because the box 0, 0, 1, 1 is a whole image, or a pixel that stands for no object.
    """
    rows = np.array(corners, np.float64).reshape(-1, 4)
    fits = ((rows > -_EDGE) & (rows < 1 + _EDGE)).all()
    if not (fits and (rows[:, 2:] > rows[:, :2]).all(1).any()):
        return False
    return True if (rows != np.rint(rows)).any() else None
