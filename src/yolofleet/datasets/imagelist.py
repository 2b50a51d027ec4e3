"""Images and labels that a program lists, without label files: ``spec.listed_dataset``. M label rows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from yolofleet.datasets.labels import ProblemLog, RawLabels
from yolofleet.datasets.reader import SplitReader, stamp

LabelledImage = tuple[str | Path, Sequence[Sequence[float]]]  # path; rows of class, cx, cy, w, h (0..1)


class ImageList(SplitReader):
    """A reader of listed images."""

    repeats_are_duplicates = True

    def __init__(self, listed: Iterable[LabelledImage]) -> None:
        self.listed = list(listed)
        self.images = [str(Path(path).resolve()) for path, _ in self.listed]
        self.stamps = [stamp(path) for path in self.images]
        self._rows = [np.asarray(rows, np.float64).reshape(-1, 5) for _, rows in self.listed]

        # the labels have no files whose times could change
        labels = b"|".join(rows.tobytes() for rows in self._rows)
        self.key_text = hashlib.blake2b(labels, digest_size=16).hexdigest()

    def rows(self, start: int, stop: int, sizes_wh: np.ndarray, log: ProblemLog) -> RawLabels:
        """Return the labels of images ``start:stop``; see ``SplitReader.rows``."""
        rows = [
            (at - start, number, row, False, list[float]())
            for at in range(start, stop)
            for number, row in enumerate(self._rows[at].tolist())
        ]
        return RawLabels.of_rows(rows)

    def place(self, image: int, mark: int) -> tuple[str, int | None, str]:
        return self.images[image], None, f"label {mark}: "

    def without(self, images: Iterable[int]) -> ImageList:
        dropped = set(images)
        return ImageList(one for at, one in enumerate(self.listed) if at not in dropped)
