"""A working folder whose model, loss, data set and callbacks are those of examples/."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

from commands import small_shapes

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SMALL = ["--img", "64", "--batch", "4", "--nominal-batch", "4", "--micro-batch", "2", "--no-plots", "--epochs", "2"]  # fmt: skip
RUN = [*SMALL, "--threads", "1", "--workers", "0", "--reduce", "exact"]
CALLBACKS = ["--callbacks", "my_limit.py:LimitBiases", "--callbacks", "my_callbacks.py:Journal"]
CODE = ["--recipe-class", "all_parts.py:All", *CALLBACKS]
OWN_RUN = ["train", "--data", "small shapes/labels.csv", *CODE, *RUN]
ALL = """
from my_data import CsvData
from my_loss import SmallLogits
from my_model import TinyModel

class All(TinyModel, SmallLogits, CsvData):
    pass
"""


def make_user_code(folder: Path) -> None:
    """Copy the examples into a folder, with a data set and the same labels as a table."""
    data = small_shapes(folder, images=8, val_images=4)
    for example in EXAMPLES.glob("*.py"):
        shutil.copy(example, folder)
    (folder / "all_parts.py").write_text(ALL)
    with (data.parent / "labels.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(("split", "image", "class", "x1", "y1", "x2", "y2"))
        for label in sorted((data.parent / "labels").rglob("*.txt")):
            split = label.parent.name
            (image,) = (data.parent / "images" / split).glob(f"{label.stem}.*")
            for line in label.read_text().splitlines():
                number, x, y, w, h = (float(value) for value in line.split())
                sides = (x - w / 2, y - h / 2, x + w / 2, y + h / 2)
                table.writerow((split, image.relative_to(data.parent), f"class {number:.0f}", *sides))
