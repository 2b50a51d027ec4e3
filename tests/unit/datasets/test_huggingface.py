"""Data sets as on the Hugging Face hub: what their boxes and numbers mean, and what is refused."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from commands import called, train_args, working_in
from small_data import encoded, picture, write_picture

from yolofleet.data.datasets.index import build_index
from yolofleet.data.datasets.sources import load_dataset

SIDES = [[10, 12, 20, 24], [32, 24, 32, 24]]  # x, y, width, height in 64 x 48 pixels
CORNERS = [[10, 12, 30, 36], [32, 24, 64, 48]]
WITH_PYARROW = pytest.mark.skipif(
    importlib.util.find_spec("pyarrow") is None,
    reason='Parquet files need pyarrow: pip install "pyarrow>=15"',
)


@pytest.fixture
def folder(tmp_path):
    with working_in(tmp_path, YOLOFLEET_CACHE=str(tmp_path / "cache"), COLUMNS="200"):
        yield tmp_path


def image_folder(root: Path, objects: Any, splits: tuple[str, ...] = ("train", "validation")) -> Path:
    """Two images in each split: one with these objects, and one without any."""
    for number, split in enumerate(splits):
        rows = [{"file_name": "a.jpg", "objects": objects}, {"file_name": "b.jpg", "objects": []}]
        for seed, row in enumerate(rows):
            write_picture(root / split / row["file_name"], seed=2 * number + seed)
        (root / split / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def corners_of(root: Path) -> list[list[float]]:
    index = build_index(load_dataset(str(root)), "train")
    assert [Path(path).name for path in index.paths] == ["a.jpg", "b.jpg"] and index.background == 1
    rows = index.labels(0)[:, 1:] * [64, 48, 64, 48]
    return [[round(v) for v in (x - w / 2, y - h / 2, x + w / 2, y + h / 2)] for x, y, w, h in rows.tolist()]


@pytest.mark.parametrize(
    ("objects", "names"),
    [
        ({"bbox": SIDES, "categories": [0, 2]}, ("0", "2")),
        ({"bbox": SIDES, "category": ["dog", "cat"]}, ("cat", "dog")),
        ([{"bbox": SIDES[0], "category_id": 1}, {"bbox": SIDES[1], "category_id": 3}], ("1", "3")),
        ({"bbox": CORNERS, "label": [0, 1]}, ("0", "1")),
    ],
)
def test_metadata_beside_images_is_read(folder, objects, names):
    root = image_folder(folder / "set", objects)
    assert load_dataset("set").names == names
    assert corners_of(root) == CORNERS
    done = called("data", "check", "set", "--duplicates")
    assert done.code == 0, done.err
    meaning = "x1, y1, x2, y2" if "label" in objects else "x, y, width, height"
    assert f"boxes are taken as {meaning}" in done.out


def test_names_of_numbers_and_a_training(folder):
    image_folder(folder / "set", {"bbox": SIDES, "categories": [0, 2]})
    Path("set/classes.txt").write_text("cat\ndog\nbird\n")
    assert load_dataset("set").names == ("cat", "dog", "bird")
    assert called(*train_args(folder / "set", "--epochs", "1", "--name", "run")).code == 0
    assert called("data", "split", "set", "--out", "out", "--val", "0.3", "--test", "0.3").code == 0
    assert called("data", "check", "out").code == 0


def test_changed_metadata_are_read_again(folder):
    root = image_folder(folder / "set", {"bbox": SIDES, "categories": [0, 2]})
    assert corners_of(root) == CORNERS
    image_folder(root, {"bbox": SIDES[:1], "categories": [1]})
    assert corners_of(root) == CORNERS[:1]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "metadata.jsonl:1 is not a JSON object with file_name"),
        ('["a.jpg"]', "metadata.jsonl:1 is not a JSON object with file_name"),
        ('{"file_name": "a.jpg", "text": "a cat"}', "without a bbox and a category"),
        ('{"file_name": "a.jpg", "objects": {"bbox": [[1, 2, 3, 4]], "category": []}}', "without a bbox and a category"),
        ('{"file_name": "a.jpg", "objects": {"bbox": [[1, 2, 3, 4]], "category": [null]}}', "neither a number nor"),
        ('{"file_name": "a.jpg", "objects": {"bbox": 5, "category": [1]}}', "without a bbox and a category"),
        ('{"file_name": "a.jpg", "objects": {"bbox": [[50, 40, 20, 20]], "category": [1]}}', "do not fit their images"),
    ],
)  # fmt: skip
def test_metadata_that_are_no_labels_are_refused(folder, line, says):
    write_picture(folder / "set" / "a.jpg")
    Path("set/metadata.jsonl").write_text(line + "\n")
    done = called("data", "check", "set")
    assert done.code == 3 and says in done.err and "Traceback" not in done.err


@pytest.mark.skipif(
    importlib.util.find_spec("pyarrow") is not None, reason="pyarrow is installed, so Parquet files are read"
)
def test_parquet_without_pyarrow_names_the_package(folder):
    Path("set/data").mkdir(parents=True)
    Path("set/data/train-00000-of-00001.parquet").write_bytes(b"PAR1")
    done = called("data", "check", "set")
    assert done.code == 2 and "pyarrow>=15" in done.err and "convert it to COCO or YOLO" in done.err


@WITH_PYARROW
def test_parquet_files_of_the_hub_are_read(folder):
    import pyarrow
    import pyarrow.parquet as parquet

    names = {"feature": {"names": ["cat", "dog", "bird"], "_type": "ClassLabel"}, "_type": "List"}
    about = {"info": {"features": {"objects": {"category": names, "bbox": {"_type": "List"}}}}}
    for split, seeds in (("train", (1, 2)), ("validation", (3, 4))):
        rows = [
            {
                "image": {"bytes": encoded(picture(64, 48, seed)), "path": f"{seed}.jpg"},
                "objects": {"bbox": CORNERS[: seed % 2 * 2], "category": [0, 2][: seed % 2 * 2]},
            }
            for seed in seeds
        ]
        table = pyarrow.Table.from_pylist(rows)
        table = table.replace_schema_metadata({b"huggingface": json.dumps(about).encode()})
        Path("set/data").mkdir(parents=True, exist_ok=True)
        parquet.write_table(table, f"set/data/{split}-00000-of-00001.parquet")
    assert load_dataset("set").names == ("cat", "dog", "bird")
    index = build_index(load_dataset("set"), "train")
    assert index.class_counts().tolist() == [1, 0, 1] and index.background == 1
    assert called(*train_args(folder / "set", "--epochs", "1", "--name", "run")).code == 0
    done = called("data", "split", "set", "--out", "out")
    assert done.code == 2 and "data convert" in done.err  # the images lie in the cache
    assert called("data", "convert", "set", "--to", "yolo", "--out", "yolo").code == 0
    assert called("data", "split", "yolo", "--out", "out", "--val", "0.5").code == 0


@WITH_PYARROW
@pytest.mark.parametrize("content", [b"", b"PAR1", b"no parquet"])
def test_damaged_parquet_files_are_refused(folder, content):
    Path("set").mkdir()
    Path("set/train.parquet").write_bytes(content)
    done = called("data", "check", "set")
    assert done.code == 3 and "cannot be read" in done.err and "Traceback" not in done.err
