"""Data sets as on the Hugging Face hub: what their boxes and numbers mean, and what is refused."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from commands import called, train_args
from label_rows import index_of, rows_of
from small_data import encoded, picture, write_picture

from yolofleet.data.datasets.sources import load_dataset

SIDES = [[10, 12, 20, 24], [32, 24, 32, 24]]  # x, y, width, height in 64 x 48 pixels
CORNERS = [[10, 12, 30, 36], [32, 24, 64, 48]]
WITH_PYARROW = pytest.mark.skipif(
    importlib.util.find_spec("pyarrow") is None,
    reason='Parquet files need pyarrow: pip install "pyarrow>=15"',
)


def image_folder(root: Path, objects: Any, splits: tuple[str, ...] = ("train", "validation")) -> Path:
    """Two images in each split: one with these objects, and one without any."""
    for number, split in enumerate(splits):
        rows = [{"file_name": "a.jpg", "objects": objects}, {"file_name": "b.jpg", "objects": []}]
        for seed, row in enumerate(rows):
            write_picture(root / split / row["file_name"], seed=2 * number + seed)
        (root / split / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def corners_of(root: Path) -> list[list[float]]:
    index = index_of(root)
    assert [Path(path).name for path in index.paths] == ["a.jpg", "b.jpg"] and index.background == 1
    rows = rows_of(index.labels(0))[:, 1:] * [64, 48, 64, 48]
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
    assert ("taken as x1, y1, x2, y2" in done.out) == ("label" in objects)


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
        ('{"file_name": "a.jpg", "objects": {"bbox": [[0.5, 0.4, 0.2, 0.2]], "category": [1]}}', "fractions, not pixels"),
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
    index = index_of("set")
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


def write_parquet(file: Path, seeds: list[int], boxes: list[list[int]], names: tuple[str, ...] = ()) -> None:
    """An image for each seed, all with these boxes of class 0."""
    import pyarrow
    import pyarrow.parquet as parquet

    objects = {"bbox": boxes, "category": [0] * len(boxes)}
    rows = [{"image": {"bytes": encoded(picture(64, 48, seed))}, "objects": objects} for seed in seeds]
    table = pyarrow.Table.from_pylist(rows)
    if names:
        about = {"features": {"category": {"names": list(names), "_type": "ClassLabel"}}}
        table = table.replace_schema_metadata({b"huggingface": json.dumps(about).encode()})
    file.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table, file)


@WITH_PYARROW
@pytest.mark.parametrize("below", ["{}/train-0.parquet", "{}/data/train-0.parquet", "data/train-{}.parquet"])
def test_parquet_files_of_one_name_keep_their_own_images_and_labels(folder, below):
    write_parquet(folder / "set" / below.format("cats"), [1, 2], SIDES[:1])
    write_parquet(folder / "set" / below.format("dogs"), [3, 4], SIDES[1:])
    index = index_of("set")
    found = {
        Path(path).read_bytes(): rows_of(index.labels(at)).tolist() for at, path in enumerate(index.paths)
    }
    boxes = {1: SIDES[0], 2: SIDES[0], 3: SIDES[1], 4: SIDES[1]}
    for seed, (x, y, w, h) in boxes.items():
        expected = [[0, (x + w / 2) / 64, (y + h / 2) / 48, w / 64, h / 48]]
        assert found[encoded(picture(64, 48, seed))] == [pytest.approx(row) for row in expected]
    assert called("data", "convert", "set", "--to", "yolo", "--out", "yolo").code == 0
    assert len(list(Path("yolo/images/train").rglob("*.jpg"))) == 4


@WITH_PYARROW
def test_parquet_files_that_number_other_classes_are_refused(folder):
    write_parquet(folder / "set/cats/train-0.parquet", [1], SIDES, ("cat",))
    write_parquet(folder / "set/dogs/train-0.parquet", [2], SIDES, ("dog",))
    done = called("data", "check", "set")
    assert done.code == 3 and "has the classes dog" in done.err and "data merge" in done.err
    assert called("data", "check", "set/cats").code == 0


@WITH_PYARROW
@pytest.mark.parametrize("equal_rows", [1, 40])
def test_parquet_files_that_hold_more_than_images_can_are_refused_before_they_are_decoded(folder, equal_rows):
    import pyarrow
    import pyarrow.parquet as parquet

    objects = {"bbox": [[1, 1, 5, 5]], "category": [0]}
    row = {"image": {"bytes": bytes((70 << 20) // equal_rows)}, "objects": objects}
    Path("set").mkdir()
    table = pyarrow.Table.from_pylist([row] * equal_rows)
    parquet.write_table(
        table, "set/train.parquet", compression="zstd", use_dictionary=equal_rows > 1, write_statistics=False
    )
    done = called("data", "check", "set")
    assert done.code == 3 and "of content in" in done.err
    assert not list(Path("cache").rglob("*.jpg"))  # nothing stays in the cache
