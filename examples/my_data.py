"""Your own data set: yolofleet train --data labels.csv ... --recipe-class examples/my_data.py:CsvData

The table has the columns split, image, class, x1, y1, x2, y2, with coordinates as fractions of the image.
"""

import csv
from pathlib import Path

from yolofleet import TrainingRecipe
from yolofleet.data.datasets.spec import listed_dataset


class CsvData(TrainingRecipe):
    def dataset(self, data):
        names, splits = [], {"train": {}, "val": {}}
        with Path(data).open(newline="") as table:
            for row in csv.DictReader(table):
                boxes = splits[row["split"]].setdefault(Path(data).parent / row["image"], [])
                if row["class"] not in names:
                    names.append(row["class"])
                x1, y1, x2, y2 = (float(row[side]) for side in ("x1", "y1", "x2", "y2"))
                boxes.append((names.index(row["class"]), (x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1))
        return listed_dataset(data, names, {split: images.items() for split, images in splits.items()})
