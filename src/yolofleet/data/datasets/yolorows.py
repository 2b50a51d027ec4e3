"""The rows of a YOLO label file: boxes, polygons, and boxes with the key points of a pose."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from yolofleet.data.datasets.labels import Problem, ProblemLog
from yolofleet.data.datasets.reader import LabelRow

RAW_ROWS = (  # what only rows of this data set have, its name, what to do; see ``layouts``
    (rb"(?m)^(-?\d+,){7}-?\d+,?\s*$", "VisDrone's", "1 to 4 are x, y, width, height in pixels, 6 is the class"),
    (rb"(?m)^(-?[\d.]+ ){8}[a-zA-Z][\w-]* [0-2]\s*$|^imagesource:", "DOTA's", "1 to 8 are corners in pixels, 9 is the class"),
    (rb"(?m)^[A-Za-z_]+ -?[\d.]+ -?\d+ (-?[\d.]+ ){11}-?[\d.]", "KITTI's", "1 is the class, 5 to 8 are x1, y1, x2, y2 in pixels"),
    (rb"(?m)^\S+/\S+\.jpe?g\s+\d+\s+(-?\d+ ){9}-?\d", "WIDER FACE's", "1 to 4 are x, y, width, height in pixels"),
)  # fmt: skip


def parse_rows(
    data: bytes,
    path: str,
    log: ProblemLog,
    kpt_shape: tuple[int, int] | None = None,
    are_polygons: Callable[[], bool] = lambda: False,
) -> Iterator[LabelRow]:
    """Yield each readable row of a label file; add a problem for each other row.

    Args:
        kpt_shape: number of key points, and numbers of each, that may stand behind a box.
        are_polygons: whether other rows of the data set show that long rows are no poses.
    """
    if data.startswith(b"\xef\xbb\xbf"):
        data = data[3:]
    has_underscore = b"_" in data
    with_points = 5 + math.prod(kpt_shape) if kpt_shape else 0
    for line, text in enumerate(data.splitlines(), 1):
        columns = text.split()
        if not columns:
            continue
        try:
            if has_underscore and b"_" in text:  # float() accepts 0.5_0; other programs do not
                raise ValueError
            numbers = list(map(float, columns))
        except ValueError:
            shown = repr(text[:60].decode("ascii", "backslashreplace"))
            log.add(Problem(path, line, f"{shown} is not a row of numbers{_cause(text)}", "label-unreadable"))
            continue
        count = len(numbers)
        if count == 5 or count == with_points:
            yield line, numbers[:5], False, []
            continue
        kind = "label-unreadable"
        if kpt_shape:
            what = f"has {count} columns; kpt_shape {list(kpt_shape)} means {with_points}, or 5 for a box"
        elif (point_columns := _pose_columns(numbers)) > 0 and not are_polygons():
            what = f"columns 2 to 5 are a box that holds the points in the other {count - 5}: the label of a pose? "
            what += f"kpt_shape: [{(count - 5) // point_columns}, {point_columns}] in the YAML reads its box"
            kind = "label-of-pose"
        elif count >= 7 and count % 2:
            box = _box_of_polygon(numbers[1::2], numbers[2::2])
            if count == 9:
                what = "rows of 9 columns, read as the box around 4 corners: {count}"
                log.add(Problem(path, line, what, "corners-boxed"))
            if point_columns < 0:
                what = "rows that may be polygons or poses, read as polygons: {count}; kpt_shape in the YAML would say poses"
                log.add(Problem(path, line, what, "polygons-or-poses"))
            yield line, [numbers[0], *box], False, numbers[1:]
            continue
        else:
            what = f"has {count} columns; expected 5 (class cx cy w h), or 7, 9, ... for a polygon"
            if count == 6:
                what += "; is column 6 a confidence or a track? Remove it"
        log.add(Problem(path, line, what, kind))


def are_mostly_polygons(files: Iterable[bytes]) -> bool:
    """Return whether most long rows of some label files cannot be poses; if a set has poses, all its long rows are some."""
    texts = (row.split() for data in files for row in data.splitlines())
    rows = [list(map(float, row)) for row in texts if len(row) > 6 and len(row) % 2 and _are_numbers(row)]
    return sum(_pose_columns(row) == 0 for row in rows) * 2 > len(rows)


def _cause(text: bytes) -> str:
    """Return why a row is not numbers, as the end of a message; '' if that is not clear."""
    for signs, form, columns_mean in RAW_ROWS:
        if re.search(signs, text):
            return f": it is {form} label, whose column {columns_mean}: convert it to YOLO or COCO"
    columns, parts = text.split(), [part for part in re.split(rb"[\s,;]+", text) if part]
    if b"," in text and len(columns) >= 5 and _are_numbers([one.replace(b",", b".") for one in columns]):
        return ": it has decimal commas; write 0.5"
    if len(parts) >= 5 and (b"," in text or b";" in text) and _are_numbers(parts):
        return ": it has commas or semicolons between the columns; write spaces"
    if len(parts) >= 5 and _are_numbers(parts[-4:]) and not _are_numbers(parts[:1]):
        return ": it begins with the name of a class; write its number in names, from 0"
    if b"\0" in text:
        return ": it has NUL bytes"
    if not any(_are_numbers([part]) for part in parts):
        return ": it is text, such as a header or a comment"
    return ""


def _are_numbers(parts: Sequence[bytes]) -> bool:
    try:
        return bool([float(part) for part in parts])
    except ValueError:
        return False


def _pose_columns(numbers: list[float]) -> int:
    """Return how many columns each key point has if a row is likely a pose: 3 with visibility, 2 without; else 0.

    A pose is class, box and key points. Its visibilities are 0, 1 or 2, and the box holds the visible points. A polygon
    that is read as a pose may fulfil this too, but then its second point, which would be width and height of the box,
    is near the others. -1: so it is here, and the row may be either.
    """
    count = len(numbers)
    if count < 7 or not (0 < numbers[3] <= 1.001 and 0 < numbers[4] <= 1.001):
        return 0
    x, y, seen = numbers[5::3], numbers[6::3], numbers[7::3]
    if (count - 5) % 3 == 0 and all(value in (0.0, 1.0, 2.0) for value in seen):
        visible = [at for at, value in enumerate(seen) if value]
        if 2.0 in seen or _in_box([x[at] for at in visible], [y[at] for at in visible], numbers):
            return 3
    x, y = numbers[5::2], numbers[6::2]
    if count % 2 == 0 or not _in_box(x, y, numbers):
        return 0
    for values, centre, side in ((x, numbers[1], numbers[3]), (y, numbers[2], numbers[4])):
        low, high = min(*values, centre), max(*values, centre)
        if count > 7 and not 2 * low - high <= side <= 2 * high - low:  # triangles often are so
            return 2
    return -1


def _in_box(x: Sequence[float], y: Sequence[float], row: Sequence[float]) -> bool:
    """Return whether columns 2 to 5 of a row are a box inside the image that holds all points."""
    for values, centre, side in ((x, row[1], row[3]), (y, row[2], row[4])):
        low, high = centre - side / 2 - 0.001, centre + side / 2 + 0.001
        if not values or low < -0.002 or high > 1.002 or min(values) < low or max(values) > high:
            return False
    return True


def _box_of_polygon(x: list[float], y: list[float]) -> list[float]:
    """Return cx, cy, w, h of the box around the corners of a polygon; NaN if a coordinate is not finite."""
    if not math.isfinite(sum(x) + sum(y)):  # min and max ignore a NaN that is not the first value
        return [math.nan] * 4
    left, right, top, bottom = min(x), max(x), min(y), max(y)
    return [(left + right) / 2, (top + bottom) / 2, right - left, bottom - top]
