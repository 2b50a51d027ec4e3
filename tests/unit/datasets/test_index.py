import multiprocessing
import os
import pickle
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coco_files import image, label, write_coco
from fleet import on_fleet
from label_rows import index_of, rows_of
from reference import reference
from small_data import ODD_NAMES, encoded, picture, voc_object, voc_set, write_picture, yolo_set

from yolofleet.data.datasets.arrayfile import read_arrays, write_arrays
from yolofleet.data.datasets.index import DataIndex
from yolofleet.data.images.decode import read_image
from yolofleet.storage.caches import cache_root
from yolofleet.support.errors import ConfigError, DataError

GOOD = "0 0.5 0.5 0.2 0.4\n"


def index_of_text(root, text, **choices):
    """One image with these labels, beside one with a good label."""
    yolo_set(root, {"a": text, "b": GOOD * 1 + "1 0.2 0.2 0.1 0.1\n" + "2 0.8 0.8 0.1 0.1\n"})
    return index_of(root, **choices)


def file_of(index):
    assert index.file is not None
    return index.file


def stored_files():
    return sorted((cache_root() / "index").glob("*"))


# what an index holds


def test_an_index_holds_what_the_files_say(tmp_path):
    yolo_set(tmp_path, {"b": "1 0.25 0.5 0.125 0.25\r\n\n 2 .5 .5 1 1", "a": None, "c": ""})
    index = index_of(tmp_path)
    assert [Path(path).name for path in index.paths] == ["a.jpg", "b.jpg", "c.jpg"]
    assert index.names == ("cat", "dog", "bird")
    assert index.offsets.tolist() == [0, 0, 2, 2]
    assert rows_of(index.labels(1)).tolist() == [[1, 0.25, 0.5, 0.125, 0.25], [2, 0.5, 0.5, 1, 1]]
    assert rows_of(index.labels(0)).shape == (0, 5)
    assert index.sizes_wh.tolist() == [[64, 48]] * 3
    assert index.area_px.tolist() == [0.125 * 64 * 0.25 * 48, 64 * 48]
    assert index.class_counts().tolist() == [0, 1, 1]
    assert index.image_ids.tolist() == [0, 1, 2]
    assert not index.crowd.any()
    assert index.problems == ()
    assert index.unlabelled == 1 and index.background == 2
    assert index.totals_text().endswith(
        "2 images without labels, 1 image without a label file, 1 empty label file"
    )


def test_numbers_without_problems_keep_their_bits(tmp_path):
    rng = np.random.default_rng(0)
    rows = np.column_stack([rng.uniform(0.3, 0.7, (200, 2)), rng.uniform(0.01, 0.5, (200, 2))])
    text = "".join("2 " + " ".join(f"{value:.6f}" for value in row) + "\n" for row in rows)
    text += "0 0.9996 0.5 0.001 0.2\n1 0.5 0.5 1.000001 1.0\n"  # rounding may stick out by 1e-3
    yolo_set(tmp_path, {"a": text})
    expected = np.array([line.split()[1:] for line in text.splitlines()], np.float64).astype(np.float32)
    index = index_of(tmp_path)
    assert np.array_equal(index.boxes_cxcywh_unit, expected)
    assert not index.problems


@pytest.mark.parametrize("layout", ["images/x->labels/x", "x->labels/x", "x/images->x/labels", "beside"])
def test_labels_are_found_in_every_usual_place(tmp_path, layout):
    folders = {
        "images/x->labels/x": ("d/images/x", "d/labels/x"),
        "x->labels/x": ("d/x", "d/labels/x"),
        "x/images->x/labels": ("d/images/x/images", "d/images/x/labels"),  # only the last "images" counts
        "beside": ("d/x", "d/x"),
    }
    images, labels = (tmp_path / folder for folder in folders[layout])
    write_picture(images / "a.jpg")
    labels.mkdir(parents=True, exist_ok=True)
    (labels / "a.txt").write_text(GOOD)
    (tmp_path / "data.yaml").write_text(f"train: {images}\nnames: [x]\n")
    assert len(index_of(tmp_path).classes) == 1


@pytest.mark.parametrize("name", ODD_NAMES)
def test_any_file_and_folder_name_will_do(tmp_path, name):
    yolo_set(tmp_path / name, {name: GOOD})
    index = index_of(tmp_path / name)
    assert read_image(index.path(0)).shape == (48, 64, 3)
    assert len(index.classes) == 1


@pytest.mark.skipif(os.name == "nt" or os.uname().sysname == "Darwin", reason="names there are always text")
def test_file_names_that_are_no_text_will_do(tmp_path):
    yolo_set(tmp_path, {"a": GOOD})
    for folder, suffix in (("images", ".jpg"), ("labels", ".txt")):
        old = os.fsencode(tmp_path / folder / "train") + b"/a" + suffix.encode()
        os.rename(old, old.replace(b"/a.", b"/\xff\xfe."))  # noqa: PTH104
    index = index_of(tmp_path)
    assert read_image(index.path(0)).shape == (48, 64, 3)
    assert len(index.classes) == 1


def test_sub_folders_and_links_are_followed_hidden_files_are_not(tmp_path):
    yolo_set(tmp_path, {"sub/b": GOOD, "a": GOOD})
    (tmp_path / "images" / "train" / "._a.jpg").write_bytes(b"macOS")
    (tmp_path / "images" / "train" / "loop").symlink_to(tmp_path / "images" / "train")
    index = index_of(tmp_path)
    assert [Path(path).name for path in index.paths] == ["a.jpg", "b.jpg"]
    assert len(index.classes) == 2


def test_lists_name_images_absolutely_or_relative_to_the_list_or_its_parent(tmp_path):
    yolo_set(tmp_path, {name: GOOD for name in ("a", "b", "c", "d")})
    text = f"{tmp_path}/images/train/c.jpg\n./images/train/b.jpg\r\n\nimages/train/b.jpg\nimages/train/gone.jpg\n"
    (tmp_path / "list.txt").write_text(text)
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "more.txt").write_text("images/train/d.jpg\n")
    (tmp_path / "data.yaml").write_text("train: [list.txt, lists/more.txt]\nnames: [x]\n")
    index = index_of(tmp_path)
    names = [Path(path).name for path in index.paths]
    assert names == ["c.jpg", "b.jpg", "d.jpg"]  # in the order of the lists
    assert len(index.classes) == 3
    assert [(Path(p.path).name, p.what, p.action) for p in index.problems] == [
        ("b.jpg", "is listed more than once", "counted once"),
        ("gone.jpg", "does not exist", "image left out"),
    ]


def test_image_ids_are_the_file_names_where_all_are_numbers(tmp_path):
    yolo_set(tmp_path / "x", {"000000000139": GOOD, "42": GOOD})
    assert index_of(tmp_path / "x").image_ids.tolist() == [139, 42]
    yolo_set(tmp_path / "y", {"7": GOOD, "07": GOOD})
    assert index_of(tmp_path / "y").image_ids.tolist() == [0, 1]


def test_sixteen_bit_tiff_and_odd_formats_are_measured_by_decoding(tmp_path):
    yolo_set(tmp_path, {"a": GOOD})
    image = picture(30, 20)
    (tmp_path / "images" / "train" / "b.ppm").write_bytes(encoded(image, ".ppm"))
    (tmp_path / "images" / "train" / "c.tif").write_bytes(encoded(image.astype(np.uint16) * 256, ".tif"))
    assert index_of(tmp_path).sizes_wh.tolist() == [[64, 48], [30, 20], [30, 20]]


def test_one_class_for_all(tmp_path):
    yolo_set(tmp_path, {"a": "7 .5 .5 .1 .1\n2 .5 .5 .2 .2\n"})
    index = index_of(tmp_path, single_cls=True)
    assert index.names == ("object",)
    assert index.classes.tolist() == [0, 0]


# what is wrong with labels


@pytest.mark.parametrize("number", ["3", "-1", "1.5", "1e30", "nan"])
def test_a_class_that_names_does_not_have_is_an_error_with_file_and_line(tmp_path, number):
    with pytest.raises(DataError) as caught:
        index_of_text(tmp_path, GOOD + f"{number} .5 .5 .1 .1\n")
    assert f"labels/train/a.txt:2: class {number.replace('e', 'e+')} but names has 3 (0..2)" in str(
        caught.value
    )
    assert caught.value.exit_code == 3
    index = index_of_text(tmp_path, GOOD + f"{number} .5 .5 .1 .1\n", strict=False)
    assert index.problem_count == 1
    assert len(index.labels(0)) == 1


def test_many_wrong_classes_are_counted_and_ten_are_shown(tmp_path):
    yolo_set(tmp_path, {"a": "9 .5 .5 .1 .1\n" * 3000, "b": "x\n" + GOOD * 10})
    with pytest.raises(DataError) as caught:
        index_of(tmp_path)
    assert "3000 labels have a class" in str(caught.value)
    assert "a.txt:10:" in str(caught.value)
    assert "a.txt:11:" not in str(caught.value)
    assert "and 2990 more" in str(caught.value)


def test_boxes_that_stick_out_are_clipped_and_reported(tmp_path):
    index = index_of_text(tmp_path, "0 0.9 0.5 0.4 0.2\n")
    # x from 0.7 to 1.1 becomes 0.7 to 1.0: centre 0.85, width 0.3
    assert np.allclose(rows_of(index.labels(0)), [[0, 0.85, 0.5, 0.3, 0.2]], atol=1e-6)
    assert index.problems[0].action == "clipped"


def test_a_data_set_in_pixels_is_refused(tmp_path):
    yolo_set(tmp_path, {"a": "0 320 240 100 80\n0 100 100 20 20\n" + GOOD})
    with pytest.raises(DataError, match="2 of 3 labels cannot be used") as caught:
        index_of(tmp_path)
    assert "pixels?" in str(caught.value)


def test_training_without_any_label_is_refused_and_says_where_they_belong(tmp_path):
    yolo_set(tmp_path, {"a": None, "b": None})
    with pytest.raises(DataError, match="none of the 2 train images has a label") as caught:
        index_of(tmp_path)
    assert str(tmp_path / "labels" / "train" / "a.txt") in caught.value.hint
    assert len(index_of(tmp_path, "val")) == 2


def test_no_images_and_no_split_are_errors(tmp_path):
    yolo_set(tmp_path, {"a": GOOD})
    with pytest.raises(ConfigError, match="no split 'test'"):
        index_of(tmp_path, "test")
    (tmp_path / "images" / "train" / "a.jpg").unlink()
    with pytest.raises(DataError, match="no images in"):
        index_of(tmp_path)


# what is wrong with images


def test_broken_images_are_left_out_and_reported(tmp_path):
    yolo_set(tmp_path, {name: GOOD for name in "abcdefghij"})
    folder = tmp_path / "images" / "train"
    (folder / "a.jpg").write_bytes(b"")
    (folder / "c.jpg").write_bytes(b"not an image")
    whole = (folder / "d.jpg").read_bytes()
    (folder / "d.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "e.jpg").unlink()
    (folder / "e.jpg").symlink_to(tmp_path / "gone")
    index = index_of(tmp_path)
    assert [Path(path).stem for path in index.paths] == list("bfghij")
    assert len(index.classes) == 6
    assert [problem.path for problem in index.problems] == [f"images/train/{n}.jpg" for n in "acde"]
    assert [problem.action for problem in index.problems] == ["image left out"] * 4
    faults = ("empty", "not in a known image format", "cut off", "does not exist")
    for problem, fault in zip(index.problems, faults, strict=True):
        assert fault in problem.what
    for name in "bf":
        (folder / f"{name}.jpg").write_bytes(b"")
    with pytest.raises(DataError, match="6 of 10 images cannot be used"):
        index_of(tmp_path)


def test_a_label_file_that_cannot_be_read_takes_its_image_along(tmp_path):
    yolo_set(tmp_path, {"a": GOOD, "b": None, "c": GOOD})
    (tmp_path / "labels" / "train" / "b.txt").mkdir()
    index = index_of(tmp_path)
    assert [Path(path).stem for path in index.paths] == ["a", "c"]
    assert index.problems[0].path == "labels/train/b.txt"


# COCO and VOC


def coco_set(root):
    for number, name in enumerate(("x", "y", "z z")):
        write_picture(root / "val2017" / f"{name}.jpg", seed=number)
    equal = {"bbox": [32, 12, 16, 24], "category": 9, "area": 200.5}
    annotations = [
        label(5, 30, **equal),
        label(6, 30, **equal),
        label(7, 10, [0, 0, 64, 48], 4, area=7) | {"iscrowd": 1},
        label(8, 10, [60, 0, 10, 10], 4, segmentation=[[1, 2]]),
        label(9, 10, [5, 5, 0, 3], 4),
        label(10, 99, [5, 5, 1, 3], 4),
        label(11, [], "no", 4),
    ]
    images = [image(30, "z z.jpg"), image(10, "x.jpg"), image(20, "y.jpg", 128, 96)]
    path = root / "annotations" / "instances_val2017.json"
    return write_coco(path, images, annotations, [(9, "dog"), (4, "cat")])


def test_coco_annotations_keep_ids_crowds_and_areas(tmp_path):
    index = index_of(coco_set(tmp_path), "val")
    assert index.image_ids.tolist() == [10, 20, 30]
    assert [Path(path).name for path in index.paths] == ["x.jpg", "y.jpg", "z z.jpg"]
    assert index.offsets.tolist() == [0, 2, 2, 4]
    assert index.classes.tolist() == [0, 0, 1, 1]  # cat is 4, dog is 9; equal boxes stay, as in COCO's tools
    assert index.crowd.tolist() == [True, False, False, False]
    # 60..70 of 64 pixels is clipped to 60..64; its area is not given: 4 x 10
    assert np.allclose(index.area_px, [7, 40, 200.5, 200.5], rtol=1e-6)
    assert np.allclose(rows_of(index.labels(2)), [[1, 40 / 64, 24 / 48, 16 / 64, 24 / 48]] * 2)
    assert len(index.labels(0)) == 1  # a crowd is not learned
    text = index.problems_text()
    assert "annotations/instances_val2017.json: annotation 8 of x.jpg: box" in text
    assert "annotation 9 of x.jpg: box" in text
    assert "annotation 10 belongs to no listed image" in text
    assert "annotation 11: it has no bbox of four numbers" in text
    assert "val2017/y.jpg: is 64 x 48 pixels" in text


def test_coco_json_is_parsed_once_for_all_processes(tmp_path):
    path = coco_set(tmp_path)
    first = index_of(path, "val")
    from yolofleet.data.datasets import cocojson

    cocojson._load_table.cache_clear()
    [json_file] = tmp_path.rglob("instances_val*.json")
    text, about = json_file.read_text(), json_file.stat()
    json_file.write_text("x" * len(text))  # whoever parses it again fails
    os.utime(json_file, ns=(about.st_atime_ns, about.st_mtime_ns))
    again = index_of(path, "val")
    assert again.key == first.key
    json_file.write_text(text)
    os.utime(json_file, ns=(about.st_atime_ns, about.st_mtime_ns))
    for file in stored_files():
        file.unlink()
    assert index_of(path, "val").digest == first.digest
    cocojson._load_table.cache_clear()  # closes the stored table


def test_voc_boxes_count_pixels_from_one(tmp_path):
    part = "<part><name>head</name><bndbox><xmin>3</xmin></bndbox></part>"
    person = voc_object("person", (1, 1, 64, 48), part)
    dog = voc_object("dog", (33, 13, 48, "36.0"), "<difficult>1</difficult>")
    index = index_of(voc_set(tmp_path, {"a": person + dog, "b": None}))
    assert index.names == ("dog", "person")
    assert rows_of(index.labels(0)).tolist() == [[1, 0.5, 0.5, 1, 1]]
    assert index.crowd.tolist() == [False, True]
    assert np.allclose(index.boxes_cxcywh_unit[1], [40 / 64, 24 / 48, 16 / 64, 24 / 48])
    assert index.unlabelled == 1


BOMB = '<!DOCTYPE a [<!ENTITY b "ccc">]><annotation>&b;</annotation>'


def test_voc_files_that_cannot_be_used_take_their_image_along(tmp_path):
    good = voc_object("dog", (1, 1, 9, 9))
    root = voc_set(tmp_path, {name: good for name in "abcdefgh"})
    for name, text in {"a": BOMB, "b": "<annotation>", "c": "\0\0"}.items():
        (root / "Annotations" / f"{name}.xml").write_text(text)
    (root / "Annotations" / "d.xml").write_text(
        f"<annotation>{good}<object><name>dog</name></object></annotation>"
    )
    index = index_of(root)
    assert len(index) == 5
    text = index.problems_text()
    assert "a.xml: has a document type (DOCTYPE), which is not allowed: remove it -> image left out" in text
    assert "b.xml: is not XML" in text
    assert "d.xml:1: object 2 (dog) has no complete bndbox -> dropped" in text


def test_a_voc_class_that_names_does_not_have_is_an_error(tmp_path):
    two = voc_object("dgo", (1, 1, 9, 9)) + voc_object("cat", (1, 1, 5, 5))
    voc_set(tmp_path / "VOC", {"a": two, "b": None})
    (tmp_path / "data.yaml").write_text("train: VOC\nnames: [cat, dog]\n")
    with pytest.raises(DataError, match="class 'dgo' is not one of the 2 names \\(nearest: dog\\)"):
        index_of(tmp_path)


# where it is kept


def test_an_index_is_found_again_and_made_anew_when_a_file_changes(tmp_path):
    yolo_set(tmp_path, {"a": GOOD, "b": GOOD})
    first = index_of(tmp_path)
    assert file_of(first).parent == cache_root() / "index"
    assert index_of(tmp_path).key == first.key
    assert len(stored_files()) == 1
    label = tmp_path / "labels" / "train" / "b.txt"
    label.write_text("1 .5 .5 .3 .3\n" * 1)
    assert index_of(tmp_path).classes.tolist() == [0, 1]
    assert index_of(tmp_path).key != first.key
    (tmp_path / "data.yaml").write_text("train: images/train\nnames: [a, b]\n")
    assert index_of(tmp_path).names == ("a", "b")
    label.unlink()
    assert len(index_of(tmp_path).classes) == 1


def test_the_data_folder_is_left_as_it_was(tmp_path):
    yolo_set(tmp_path / "d", {"a": GOOD})
    before = sorted((tmp_path / "d").rglob("*"))
    index_of(tmp_path / "d")
    assert sorted((tmp_path / "d").rglob("*")) == before


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "random", "name", "other version"])
def test_a_spoilt_index_is_made_again(tmp_path, damage):
    yolo_set(tmp_path, {"a": GOOD, "b": "1 .5 .5 .3 .3"})
    index = index_of(tmp_path)
    data = bytearray(file_of(index).read_bytes())
    if damage == "cut":
        data = data[:-8]
    elif damage == "flip":
        data[-3] ^= 1
    elif damage == "empty":
        data = bytearray()
    elif damage == "random":
        data = bytearray(np.random.default_rng(0).bytes(len(data)))
    elif damage == "name":
        data = data.replace(b'"crowd"', b'"crowe"')
    else:
        data = data.replace(b'"format": "13"', b'"format": "00"')
    assert bytes(data) != file_of(index).read_bytes()
    file_of(index).unlink()  # the mapped file stays readable
    file_of(index).write_bytes(bytes(data))
    again = index_of(tmp_path)
    assert again.classes.tolist() == [0, 1]
    assert again.digest == index.digest
    assert DataIndex.load(file_of(again)) is not None


def test_damaged_array_files_are_read_right_or_not_at_all(tmp_path):
    path = tmp_path / "a.arrays"
    arrays: dict[str, np.ndarray] = {"a": np.arange(5), "b": np.ones((2, 3), np.float32)}
    arrays |= {"c": np.array([True]), "d": np.zeros(0)}
    write_arrays(path, arrays, {"x": "ü"})
    good = path.read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(500):
        data = bytearray(good)
        for place in rng.integers(0, len(data), rng.integers(1, 4)):
            data[place] = rng.integers(0, 256)
        path.write_bytes(bytes(data[: len(data) if rng.random() < 0.7 else rng.integers(0, len(data))]))
        read = read_arrays(path)
        if read is not None and read[0].keys() == arrays.keys():
            assert all(value.size >= 0 for value in read[0].values())
    path.write_bytes(good)
    whole = read_arrays(path)
    assert whole is not None
    found, meta = whole
    assert meta["x"] == "ü"
    for name, value in arrays.items():
        assert np.array_equal(found[name], value) and found[name].dtype == value.dtype
    from safetensors.numpy import load

    assert np.array_equal(load(good)["b"], arrays["b"])


def test_without_a_place_to_write_the_index_stays_in_memory(tmp_path, monkeypatch):
    yolo_set(tmp_path, {"a": GOOD})
    (tmp_path / "file").touch()
    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path / "file"))
    index = index_of(tmp_path)
    assert index.file is None
    assert rows_of(pickle.loads(pickle.dumps(index)).labels(0)).tolist() == rows_of(index.labels(0)).tolist()


def test_another_process_gets_the_file_not_the_arrays(tmp_path):
    yolo_set(tmp_path, {"a": GOOD * 1, "b": "bad\n" + GOOD})
    index = index_of(tmp_path)
    sent = pickle.dumps(index)
    assert len(sent) < 500
    again = pickle.loads(sent)
    assert rows_of(again.labels(1)).tolist() == rows_of(index.labels(1)).tolist()
    assert again.problems == index.problems
    file_of(index).unlink()
    with pytest.raises(DataError, match="was deleted during the run"):
        pickle.loads(sent)


def _build(root, start, results):
    calls: list[tuple[int, ...]] = []

    def on_progress(*read):
        if not calls:
            time.sleep(0.3)  # the others come meanwhile
        calls.append(read)

    start.wait()
    index = index_of(root, on_progress=on_progress)
    results.put((index.digest, bool(calls)))


def test_of_several_processes_one_builds_the_index_and_the_others_wait(tmp_path):
    yolo_set(tmp_path, {f"{i}": GOOD for i in range(40)})
    # The stub of get_context with a variable name returns a class that lacks Process.
    context: Any = multiprocessing.get_context("fork" if hasattr(os, "fork") else "spawn")
    start, results = context.Event(), context.Queue()
    processes = [context.Process(target=_build, args=(tmp_path, start, results)) for _ in range(4)]
    for process in processes:
        process.start()
    start.set()
    found = [results.get(timeout=900) for _ in processes]
    for process in processes:
        process.join(900)
        assert process.exitcode == 0
    assert {digest for digest, _ in found} == {index_of(tmp_path).digest}
    assert sum(has_built for _, has_built in found) == 1 and len(stored_files()) == 1


def _divide(world, root, cache):
    os.environ["YOLOFLEET_CACHE"] = str(cache / (str(world.rank) if cache.name == "each" else "one"))
    told = []
    index = index_of(root, ranks=world, on_progress=lambda *progress: told.append(progress))
    again = index_of(root, ranks=world, on_progress=lambda *progress: told.append(progress))
    assert again.digest == index.digest
    names = ("offsets", "classes", "sizes_wh", "stamps", "image_ids")
    columns = [getattr(index, name).tolist() for name in names]
    counts = [index.problem_count, dict(index.problem_kinds), index.unlabelled]
    problems = [*counts, list(map(str, index.problems))]
    return (index.digest, index.outline_digest()), list(index.paths), columns, problems, told


@pytest.mark.parametrize("caches", ["together", "each"])
def test_ranks_that_need_the_same_index_divide_the_files(tmp_path, caches):
    labels: dict[str, str | None] = {f"it's {i:04}": f"{i % 3} .5 .5 .2 .{1 + i % 8}\n" for i in range(1300)}
    labels |= {
        "it's 0700": "1 .5 .5 .2 2.5\n",
        "it's 0801": "0 .5 .5 3 .1\n0 .5 .5 .2 .1\n",
        "it's 0900": "1 0.1 0.1 0.5 0.1 0.3 0.6\n",  # a polygon
        "it's 1250": None,
    }
    data = encoded(picture(32, 24))
    root = tmp_path / "set"
    yolo_set(root, {})
    for folder in ("images", "labels"):
        (root / folder / "train").mkdir(parents=True)
    for name, text in labels.items():
        (root / "images" / "train" / f"{name}.jpg").write_bytes(data)
        if text is not None:
            (root / "labels" / "train" / f"{name}.txt").write_text(text)
    (root / "images" / "train" / "it's 0003.jpg").write_bytes(data[:40])
    alone = on_fleet(1, tmp_path, _divide, root, tmp_path / "alone")[0]
    ranks = on_fleet(2, tmp_path, _divide, root, tmp_path / caches)
    assert [rank[:4] for rank in ranks] == [alone[:4]] * 2
    assert alone[4][-1] == (1300, 1300)
    # and nothing the second time
    assert [rank[4] for rank in ranks] == [[(512, 788), (788, 788)], [(512, 512)]]


def _has_it(world, root, cache):
    os.environ["YOLOFLEET_CACHE"] = str(cache / str(world.rank))
    if world.rank:
        index_of(root)
    told = []
    return index_of(root, ranks=world, on_progress=lambda *progress: told.append(progress)).digest, told


def test_a_rank_without_the_index_that_others_have_builds_it_alone(tmp_path):
    yolo_set(tmp_path / "set", {str(i): GOOD for i in range(3)})
    first, second = on_fleet(2, tmp_path, _has_it, tmp_path / "set", tmp_path / "caches")
    assert first[0] == second[0]
    assert (first[1], second[1]) == ([(3, 3)], [])


def test_threads_do_not_change_the_index_and_progress_is_told(tmp_path):
    rng = np.random.default_rng(0)
    data = encoded(picture(32, 32))
    yolo_set(tmp_path, {})
    for folder in ("images", "labels"):
        (tmp_path / folder / "train").mkdir(parents=True)
    for i in range(1200):
        (tmp_path / "images" / "train" / f"{i:05d}.jpg").write_bytes(data)
        text = "".join(f"{rng.integers(0, 3)} .5 .5 {rng.uniform(0.1, 1.1):.3f} .2\n" for _ in range(3))
        (tmp_path / "labels" / "train" / f"{i:05d}.txt").write_text(text)
    told = []
    one = index_of(tmp_path, workers=1, on_progress=lambda *progress: told.append(progress))
    file_of(one).rename(tmp_path / "kept")
    many = index_of(tmp_path, workers=5)
    assert many.digest == one.digest
    assert many.problems == one.problems
    assert told == [(512, 1200), (1024, 1200), (1200, 1200)]


# real data


def test_the_blood_cells_are_read_whole():
    index = index_of(reference("data/bccd/data.yaml"))
    assert (len(index), len(index.classes), index.problem_count) == (205, 2804, 0)
    assert index.class_counts().tolist() == [2381, 214, 209]
    assert read_image(index.path(0)).shape == (480, 640, 3)


def test_a_list_that_names_a_folder_with_a_nul_character_loses_that_image_alone(tmp_path):
    root = tmp_path / "set"
    yolo_set(root, {"a": "0 .5 .5 .1 .1", "b": "0 .5 .5 .1 .1"})
    (root / "train.txt").write_bytes(b"./images/train/a.jpg\n./images/train/b.jpg\n./images/x\0y/c.jpg\n")
    (root / "data.yaml").write_text("train: train.txt\nval: images/train\nnames: [cat]\n")
    index = index_of(root)
    assert len(index) == 2 and index.problem_kinds == {"image-missing": 1}


def test_polygons_of_yolo_labels_are_kept_in_the_index(tmp_path):
    labels = {
        "a": "0 0.5 0.5 0.2 0.2\n1 0.1 0.1 0.5 0.1 0.3 0.6\n2 0.2 0.2 0.9 0.2 1.2 0.9 0.2 0.8\n",
        "b": None,
        "c": "0 0 0 1 0 1 1 0 1\n",
    }
    index = index_of(yolo_set(tmp_path, labels))
    box, triangle, square = index.outlines(0)
    assert box == [] and len(triangle) == len(square) == 1 and index.outlines(1) == []
    assert triangle[0] == pytest.approx(np.array([[0.1, 0.1], [0.5, 0.1], [0.3, 0.6]]), abs=1e-5)
    assert square[0][2].tolist() == pytest.approx([1, 0.9], abs=1e-5)  # limited to the image
    part = index.part(np.array([1, 2]))
    assert len(part) == 2 and part.path(1) == index.path(2)
    assert part.image_ids.tolist() == index.image_ids[1:].tolist()
    assert part.outlines(0) == [] and part.outlines(1)[0][0].tolist() == [[0, 0], [1, 0], [1, 1], [0, 1]]
    assert np.array_equal(rows_of(part.labels(1)), rows_of(index.labels(2))) and part.unlabelled == 1
    assert part.digest != index.digest == replace(index, points=index.points[:0]).digest
    assert index.outline_digest() != replace(index, points=index.points + 1).outline_digest()


def test_polygons_of_coco_are_kept_in_the_index(tmp_path):
    for name in ("a", "b"):
        write_picture(tmp_path / f"{name}.jpg", 64, 48)
    triangle, other = [0, 0, 32, 0, 32, 24], [16, 12, 64, 12, 64, 48, 16, 48]
    box = [0, 0, 64, 48]
    mask = {"counts": [1, 2], "size": [48, 64]}
    broken = [[1, 2], "x", triangle, [1, 2, 3, 4, 5, 6, 7], [None] * 6]
    annotations = [
        label(1, 2, box, segmentation=[triangle, other]),
        label(2, 1, box, segmentation=[other]),
        label(3, 2, box, segmentation=mask) | {"iscrowd": 1},
        label(4, 2, box, segmentation=broken),
        label(5, 1, box),
    ]
    write_coco(tmp_path / "train.json", [image(2, "b.jpg"), image(1, "a.jpg")], annotations)
    index = index_of(tmp_path / "train.json")
    first, second = index.outlines(0), index.outlines(1)
    assert [list(map(len, polygons)) for polygons in (first, second)] == [[1, 0], [2, 1]]
    assert first[0][0][1].tolist() == pytest.approx([1, 0.25], abs=1e-5)
    assert (
        second[0][0].tolist()
        == second[1][0].tolist()
        == [[0, 0], *[[pytest.approx(0.5, abs=1e-5), y] for y in (0, pytest.approx(0.5, abs=1e-5))]]
    )
    assert second[0][1].shape == (4, 2)
