"""Images with labels that a program lists, without label files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from yolofleet.data.datasets.labels import ProblemLog, RawLabels
from yolofleet.data.datasets.reader import SplitReader, stamp
from yolofleet.data.datasets.spec import Format, LabelledImage


class ImageList(SplitReader):
    """The reader of ``spec.listed_dataset``."""

    bare_rows = True
    columns = ("images", "stamps", "_rows")

    def __init__(self, listed: Iterable[LabelledImage]) -> None:
        every = list(listed)
        self.images = [str(Path(path).resolve()) for path, _ in every]
        self.stamps = [stamp(path) for path in self.images]
        self._rows = [np.asarray(rows, np.float64).reshape(-1, 5).tolist() for _, rows in every]

    def rows(self, start: int, stop: int, sizes_wh: np.ndarray, log: ProblemLog) -> RawLabels:
        """Return the labels of images ``start:stop``; see ``SplitReader.rows``."""
        rows = [
            (at - start, number, row, False, list[float]())
            for at in range(start, stop)
            for number, row in enumerate(self._rows[at])
        ]
        return RawLabels.of_rows(rows)

    def place(self, image: int, mark: int) -> tuple[str, int | None, str]:
        return self.images[image], None, f"label {mark}: "


FORMAT = Format(lambda source, spec, images: ImageList(source.images))
