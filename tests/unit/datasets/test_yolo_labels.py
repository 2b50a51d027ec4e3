"""Rows of YOLO label files that other programs or people wrote: poses, rotated boxes, and text that is no row."""

import tracemalloc
from contextlib import suppress

import pytest
from label_rows import index_of, rows_of
from small_data import yolo_set
from walks import sampled

from yolofleet.data.datasets import yolotxt
from yolofleet.data.datasets.index import build_index
from yolofleet.data.datasets.sources import load_dataset
from yolofleet.support.errors import ConfigError, DataError

GOOD = "0 0.5 0.5 0.2 0.4\n"
# so that few bad rows are no refusal
MANY = GOOD + "1 0.2 0.2 0.1 0.1\n2 0.8 0.8 0.1 0.1\n1 0.3 0.8 0.1 0.1\n"
POSE_3 = "0 0.5 0.5 0.2 0.1 0.42 0.46 2 0.58 0.47 2 0.44 0.54 2 0.57 0.53 2\n"  # 5 + 4 * 3 columns
POSE_2 = "0 0.5 0.5 0.2 0.1 0.42 0.46 0.58 0.47\n"  # 5 + 2 * 2


def index_with(root, **labels):
    yolo_set(root, {**labels, "good": MANY})
    return index_of(root, strict=False)


def boxes(index, image=0):
    return rows_of(index.labels(image)).astype(float).round(4).tolist()


def kinds(index):
    return [(problem.path, problem.line, problem.kind) for problem in index.problems]


@pytest.mark.parametrize(
    ("shape", "row"), [("[4, 3]", POSE_3), ("[2, 2]", POSE_2), ("[1, 3]", "0 .5 .5 .2 .1 0 0 0")]
)
def test_kpt_shape_says_that_columns_two_to_five_are_the_box(tmp_path, shape, row):
    yaml = yolo_set(tmp_path, {"a": f"{row}\n{GOOD}", "b": MANY})
    yaml.write_text(yaml.read_text() + f"kpt_shape: {shape}\nflip_idx: [0]\n")
    index = index_of(yaml)
    assert boxes(index) == [[0, 0.5, 0.5, 0.2, 0.1], [0, 0.5, 0.5, 0.2, 0.4]]
    assert index.problems == () and not len(index.points)


def test_rows_that_kpt_shape_does_not_allow_are_dropped_by_file_and_line(tmp_path):
    yaml = yolo_set(tmp_path, {"a": POSE_3 + POSE_2, "b": MANY})
    yaml.write_text(yaml.read_text() + "kpt_shape: [4, 3]\n")
    index = index_of(yaml)
    (problem,) = index.problems
    assert (problem.path, problem.line) == ("labels/train/a.txt", 2)
    assert "9 columns; kpt_shape [4, 3] means 17" in problem.what


def test_another_kpt_shape_makes_another_index(tmp_path):
    yaml = yolo_set(tmp_path, {"a": POSE_3 + POSE_2, "b": MANY})
    text = yaml.read_text()
    keys = set()
    for shape in ("[4, 3]", "[2, 2]"):
        yaml.write_text(f"{text}kpt_shape: {shape}\n")
        keys.add(index_of(yaml).key)
    assert len(keys) == 2


@pytest.mark.parametrize("shape", ["17", "[17]", "[0, 3]", "[17, 4]", "[a, 3]", "[17.5, 3]", "[1, 2, 3]"])
def test_a_kpt_shape_of_another_form_is_an_error_with_its_line(tmp_path, shape):
    yaml = yolo_set(tmp_path, {"a": GOOD})
    yaml.write_text(yaml.read_text() + f"kpt_shape: {shape}\n")
    with pytest.raises(ConfigError, match="not two numbers") as caught:
        load_dataset(str(yaml))
    assert caught.value.source == f"{yaml}:4"


@pytest.mark.parametrize(
    ("row", "shape"),
    [
        (POSE_3, "[4, 3]"),
        (POSE_2, "[2, 2]"),
        ("0 0.5 0.5 0.2 0.1 0.42 0.46 2", "[1, 3]"),  # 8 columns are no polygon
        ("0 0.5 0.5 0.2 0.1 0 0 0 0.45 0.48 1", "[2, 3]"),  # a key point that is not labelled is at 0, 0
        ("0 0.2 0.3 0.1 0.1 0.16 0.26 0.24 0.26 0.2 0.34", "[3, 2]"),
        ("0 .5 .5 .9 .9 " + " ".join(f".{n} .5 {n % 3}" for n in range(10, 27)), "[17, 3]"),  # as of COCO
    ],
)
def test_a_pose_without_kpt_shape_is_no_polygon_in_silence(tmp_path, row, shape):
    index = index_with(tmp_path, a=row)
    (problem,) = index.problems
    assert (problem.path, problem.line, problem.kind) == ("labels/train/a.txt", 1, "label-of-pose")
    assert f"kpt_shape: {shape}" in problem.what
    assert boxes(index) == [] and index.totals()["labels left out"] == 1


def test_a_data_set_of_poses_without_kpt_shape_is_refused_and_trains_as_the_message_says(tmp_path):
    yaml = yolo_set(tmp_path, {"a": POSE_3, "b": POSE_3})
    with pytest.raises(DataError, match=r"kpt_shape: \[4, 3\] in the YAML"):
        index_of(yaml)
    yaml.write_text(yaml.read_text() + "kpt_shape: [4, 3]\n")
    assert index_of(yaml).totals()["labels"] == 2


@pytest.mark.parametrize(
    "row",
    [
        "0 0.1 0.1 0.2 0.1 0.2 0.3",  # a triangle
        "0 0.4 0.3 0.6 0.4 0.5 0.25",  # a triangle, or a box with one point
        "0 0.30 0.30 0.34 0.30 0.34 0.36 0.30 0.36 0.28 0.33",  # small, so that columns 2 to 5 could be a box around it
        "0 0.5 0.5 0.52 0.5 0.53 0.52 0.5 0.54 0.48 0.52",
        "0 0 0 1 0 1 1 0 1 0 0.5",
        "0 0.1 0.9 0.9 0.9 0.9 0.1 0.5 0.05 0.1 0.1 0.08 0.5",
    ],
)
def test_a_polygon_stays_one(tmp_path, row):
    index = index_with(tmp_path, a=row)
    x, y = [[*map(float, row.split()[start::2])] for start in (1, 2)]
    (box,) = boxes(index)
    assert box[1:] == pytest.approx(
        [(min(x) + max(x)) / 2, (min(y) + max(y)) / 2, max(x) - min(x), max(y) - min(y)], abs=1e-4
    )
    assert index.problems == () and all("polygons or poses" in said for said in index.assumed)


def test_rows_with_four_corners_are_boxes_around_them_and_said_once(tmp_path):
    rotated = "0 0.5 0.3 0.7 0.5 0.5 0.7 0.3 0.5\n"  # a square on its corner
    index = index_with(tmp_path, a=rotated + rotated.replace("0 ", "1 ", 1), b=rotated + GOOD)
    assert boxes(index)[0] == pytest.approx([0, 0.5, 0.5, 0.4, 0.4], abs=1e-6)
    assert index.totals()["labels"] == 8 and index.problems == ()
    assert list(index.assumed) == [
        "labels/train/a.txt:1: rows of 9 columns, read as the box around 4 corners: 3"
    ]


def test_polygons_that_may_all_be_poses_are_said_once_with_their_number(tmp_path):
    large = "0 0.5 0.5 0.5 0.6 0.4 0.3 0.6 0.3 0.5 0.7\n"  # a person that fills the image, with 3 key points
    index = index_with(tmp_path, a=large, b=large.replace("0.4 0.3", "0.41 0.3"))
    (said,) = index.assumed
    assert "may be polygons or poses, read as polygons: 2;" in said and index.problems == ()
    index = index_with(tmp_path, a=large, b=large, c="0 0.1 0.1 0.2 0.1 0.2 0.3")
    assert list(index.assumed) == [] and index.problem_kinds == {}


def test_assumptions_of_many_ranges_are_said_once(tmp_path, monkeypatch):
    monkeypatch.setattr("yolofleet.data.datasets.scan.CHUNK", 2)
    rotated = "0 0.5 0.3 0.7 0.5 0.5 0.7 0.3 0.5\n"
    index = index_with(tmp_path, **{f"a{number}": rotated for number in range(7)})
    (said,) = index.assumed
    assert said.endswith("4 corners: 7") and index.problem_kinds == {"corners-boxed": 7}


@pytest.mark.parametrize(
    ("row", "cause"),
    [
        ("0,0.375,0.375,0.25,0.25", "commas or semicolons between the columns"),
        ("0;0.375;0.375;0.25;0.25", "commas or semicolons between the columns"),
        ("0, 0.375, 0.375, 0.25, 0.25", "commas or semicolons between the columns"),
        ("0 0,375 0,375 0,25 0,25", "decimal commas"),
        ("text 0.375 0.375 0.25 0.25", "begins with the name of a class"),
        ("traffic light 0.375 0.375 0.25 0.25", "begins with the name of a class"),
        ("text,0.375,0.375,0.25,0.25", "begins with the name of a class"),
        ("class cx cy w h", "a header or a comment"),
        ("# made by hand", "a header or a comment"),
        ("\x00\x01\ufffd", "not a row of numbers"),
        ("0 0.5_0 0.5 0.5 0.5", "not a row of numbers"),
        ("0 0.375 0.375\0 0.25 0.25", "NUL bytes"),
        ("0", "1 columns"),
        ("0 0.5 0.5 0.1", "4 columns"),
        ("0 0.375 0.375 0.25 0.25 0.91", "is column 6 a confidence or a track?"),
        ("0 0.375 0.375 0.25 0.25 7", "is column 6 a confidence or a track?"),
        ("0 nan 0.5 0.1 0.1", "is not finite"),
        ("0 0.5 0.5 inf 0.1", "is not finite"),
        ("0 1e300 0.5 0.1 0.1", "is not finite"),
        ("0 nan 0.1 0.2 0.1 0.2 0.2", "is not finite"),
        ("0 60 45 40 30", "pixels?"),
        ("0 0.5 0.5 0 0.1", "no width or height"),
        ("0 0.5 0.5 0.1 -0.1", "no width or height"),
        ("0 0.5 0.5 1e-60 0.1", "no width or height"),
        ("0 1.5 0.5 0.1 0.1", "outside the image"),
        ("0 -0.5 0.5 0.1 0.1", "outside the image"),
        ("0 0.5 0.5 0.2 0.4", "repeats the class and box"),
    ],
)
def test_a_row_that_is_not_used_says_why_with_file_and_line(tmp_path, row, cause):
    index = index_with(tmp_path, a=GOOD + row + "\n")
    (problem,) = index.problems
    assert (problem.path, problem.line) == ("labels/train/a.txt", 2) and cause in problem.what
    assert problem.action == ("counted once" if "repeats" in cause else "dropped")
    assert len(boxes(index)) == 1 and str(problem) in index.problems_text()


@pytest.mark.parametrize(
    "text",
    [
        "0\t0.375\t0.375\t0.25\t0.25",
        "\ufeff0 0.375 0.375 0.25 0.25",
        "0 0.375 0.375 0.25 0.25\r",  # an old Mac
        "0.0 0.375 0.375 0.25 0.25",
        "+0 0.375 0.375 0.25 0.25",
        "0e0 3.75e-1 3.75e-1 2.5e-1 2.5e-1",  # numpy.savetxt
    ],
)
def test_rows_that_mean_one_thing_are_read(tmp_path, text):
    index = index_with(tmp_path, a=text)
    assert boxes(index) == [[0, 0.375, 0.375, 0.25, 0.25]] and index.problems == ()


@pytest.mark.parametrize(
    ("data", "cause"),
    [(GOOD.encode("utf-16"), "UTF-16"), (GOOD.encode("utf-16-le"), "NUL"), (bytes(50), "NUL")],
)
def test_an_image_whose_labels_are_not_text_is_not_background(tmp_path, data, cause):
    yolo_set(tmp_path, {"a": GOOD, "b": MANY, "c": MANY})
    (tmp_path / "labels" / "train" / "a.txt").write_bytes(data)
    index = index_of(tmp_path)
    (problem,) = index.problems
    assert problem.path == "labels/train/a.txt" and cause in problem.what
    assert len(index) == 2 and index.totals()["images left out"] == 1


def test_a_polygon_that_resembles_a_pose_is_one_where_most_rows_are_polygons(tmp_path):
    like_a_pose = "0 0.5 0.5 0.9 0.9 0.6 0.6 0.4 0.55\n"  # four points, or a box with two key points
    assert index_with(tmp_path, a=like_a_pose, b=GOOD).problem_kinds == {"label-of-pose": 1}
    ordinary = "0 0.1 0.1 0.2 0.1 0.2 0.3 0.1 0.3\n0 0.1 0.9 0.9 0.9 0.9 0.1 0.5 0.05 0.1 0.1 0.08 0.5\n"
    index = index_with(tmp_path, a=like_a_pose, b=ordinary, c=ordinary)
    assert index.problem_kinds == {} and not index.assumed
    box = [0, (0.4 + 0.9) / 2, (0.5 + 0.9) / 2, 0.5, 0.4]
    assert boxes(index)[0] == pytest.approx(box, abs=1e-6)


@pytest.mark.parametrize("row", sampled(["0 1 1 0 1 1 0\n", "0 0 0 1 1\n", "0 1\n"], 3))
def test_the_largest_file_of_labels_needs_less_than_2_gib(tmp_path, row):
    size = 1 << 18
    yaml = yolo_set(tmp_path, {"a": row * (size // len(row)), "good": MANY})
    spec = load_dataset(str(yaml))
    tracemalloc.start()
    try:
        with suppress(DataError):
            build_index(spec, "train", strict=False)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak * (yolotxt._MAX_LABEL_BYTES // size) < 2 << 30


def test_images_in_a_folder_with_the_name_of_a_picture_are_found(tmp_path):
    """Frames often lie in a folder with the name of their video, such as clip.gif."""
    yaml = yolo_set(tmp_path, {"a": MANY, "b": MANY})
    (image,), (label,) = tmp_path.rglob("b.[pj]*g"), tmp_path.rglob("b.txt")
    for file in (image, label):
        for name in ("clip.gif", "clip.png"):
            (file.parent / name).mkdir()
            (file.parent / name / f"{name[5:]}{file.suffix}").write_bytes(file.read_bytes())
    index = index_of(yaml)
    assert len(index) == 4 and set((index.offsets[1:] - index.offsets[:-1]).tolist()) == {4}
    assert index.problems == ()
