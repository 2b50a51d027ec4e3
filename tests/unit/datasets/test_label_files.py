"""Which label file belongs to which image, names in lists, and folders without a data.yaml, as tools and people leave them."""

import os

import pytest
from label_rows import index_of
from small_data import encoded, picture, write_picture, yolo_set

from yolofleet.cli import main
from yolofleet.data.datasets.sources import load_dataset
from yolofleet.data.datasets.yolotxt import YoloFiles
from yolofleet.support.errors import ConfigError, DataError, YolofleetError

GOOD = "0 0.5 0.5 0.2 0.4\n"
NAMES = "names: [cat, dog, bird]\n"


def write(path, content=GOOD):
    """Write text, or bytes, or an image where the suffix is that of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix.lower() in (".jpg", ".png"):
        path.write_bytes(encoded(picture(64, 48), path.suffix.lower()))
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def files(root, *names, **contents):
    for name in names:
        write(root / name)
    for name, content in contents.items():
        write(root / f"{name}.yaml", content)


def totals(root, split="train"):
    return index_of(root, split).totals()


def counted(root, split="train"):
    """Images, labels, images without a label file, label files without an image."""
    found = totals(root, split)
    names = ("images", "labels", "images without a label file", "label files without an image")
    return tuple(found[name] for name in names)


def strays(root, split="train"):
    index = index_of(root, split)
    return [problem.what for problem in index.problems if problem.kind == "labels-without-image"]


# the label file of an image


def test_a_suffix_in_capitals_is_taken_and_said_once(tmp_path):
    files(
        tmp_path,
        "images/a.JPG",
        "labels/a.TXT",
        "images/b.jpg",
        "labels/b.Txt",
        "images/c.PNG",
        "labels/c.txt",
    )
    files(tmp_path, data="train: images\n" + NAMES)
    index = index_of(tmp_path)
    assert index.totals()["labels"] == 3 and index.problem_kinds["name-assumed"] == 2
    (said,) = index.assumed
    assert said.endswith(
        f"names without a file: 2; others are used, as a.txt -> {tmp_path / 'labels' / 'a.TXT'}"
    )


@pytest.mark.parametrize(
    ("images", "labels"), [("Images", "Labels"), ("IMAGES", "LABELS"), ("Images", "labels")]
)
def test_folders_in_capitals_are_label_folders_too(tmp_path, images, labels):
    files(
        tmp_path,
        f"Train/{images}/a.png",
        f"Train/{labels}/a.txt",
        f"{images}/Val/b.png",
        f"{labels}/Val/b.txt",
    )
    files(tmp_path, data=f"train: Train/{images}\nval: {images}/Val\n{NAMES}")
    assert counted(tmp_path) == counted(tmp_path, "val") == (1, 1, 0, 0)


@pytest.mark.parametrize(
    "beside",
    ["classes.txt", "predefined_classes.txt", "README.md.txt", "train.txt", "notes.txt", "old_1.txt"],
)
def test_a_labels_folder_without_labels_of_the_images_does_not_hide_those_beside_them(tmp_path, beside):
    files(tmp_path, "some/i1.png", "some/i1.txt", "third/images/i3.png", "third/images/i3.txt")
    files(tmp_path, data="train: [some, third]\n" + NAMES)
    write(tmp_path / "third" / "labels" / beside, "cat\ndog\n")
    assert counted(tmp_path) == (2, 2, 0, int(beside == "old_1.txt"))


def test_half_of_the_labels_beside_the_images_are_used_and_said(tmp_path):
    files(
        tmp_path,
        "images/a.jpg",
        "labels/a.txt",
        "images/b.jpg",
        "images/b.txt",
        data="train: images\n" + NAMES,
    )
    index = index_of(tmp_path)
    assert index.totals()["labels"] == 2
    assert [str(tmp_path / "images" / "b.txt") in said for said in index.assumed] == [True]


def test_texts_beside_images_that_have_labels_elsewhere_are_no_labels_of_the_others(tmp_path):
    captions = ("images/a.txt", "images/b.txt")
    files(tmp_path, "images/a.jpg", "labels/a.txt", "images/b.jpg", *captions, data="train: images\n" + NAMES)
    assert counted(tmp_path) == (2, 1, 1, 0)


def test_labels_of_sub_folders_in_one_folder_are_used_where_they_are_certain(tmp_path):
    files(
        tmp_path, "images/train/x/a.jpg", "images/train/y/b.jpg", "labels/train/a.txt", "labels/train/b.txt"
    )
    files(tmp_path, data="train: images/train\n" + NAMES)
    assert counted(tmp_path) == (2, 2, 0, 0)
    files(tmp_path, "images/train/z/b.jpg")  # whose labels is b.txt?
    assert counted(tmp_path) == (3, 1, 2, 1)
    files(tmp_path, "images/train/b.jpg")  # now it is clear
    assert counted(tmp_path) == (4, 2, 2, 0)


# label files without an image


def test_renamed_images_and_their_labels_are_counted_apart_with_the_nearest_pair(tmp_path):
    yolo_set(tmp_path, {"a": GOOD, "img_001": None, "img_002": None})
    files(tmp_path, "labels/train/IMG_001.txt", "labels/train/IMG_002.txt", "labels/train/classes.txt")
    assert counted(tmp_path) == (3, 1, 2, 2)
    (said,) = strays(tmp_path)
    assert said.startswith("label files without an image: 2, as IMG_001.txt; is ")
    assert f"{tmp_path / 'images/train/img_001.jpg'}, which has none?" in said
    (tmp_path / "labels/train/IMG_002.txt").unlink()  # a stored index must not answer
    (tmp_path / "images/train/img_002.jpg").unlink()
    assert counted(tmp_path) == (2, 1, 1, 1)


def test_labels_in_a_folder_of_no_image_are_counted(tmp_path):
    files(
        tmp_path,
        "images/train/a.jpg",
        "labels/train/a.txt",
        "labels/train/old/b.txt",
        data="train: images/train\n" + NAMES,
    )
    assert counted(tmp_path) == (1, 1, 0, 1)


def test_no_label_at_all_names_the_label_files_that_are_there(tmp_path):
    yolo_set(tmp_path, {"img_1": None})
    files(tmp_path, "labels/train/IMG_1.txt")
    with pytest.raises(DataError, match="none of the 1 train images has a label") as caught:
        totals(tmp_path)
    assert "IMG_1.txt" in caught.value.hint and "put the labels of" in caught.value.hint


def test_labels_of_other_splits_and_of_images_that_no_list_names_are_not_stray(tmp_path):
    for name in "abcd":
        files(tmp_path, f"images/{name}.jpg", f"labels/{name}.txt")
    files(tmp_path, "labels/gone.txt", data="train: train.txt\nval: val.txt\n" + NAMES)
    write(tmp_path / "train.txt", "images/a.jpg\nimages/b.jpg\n")
    write(tmp_path / "val.txt", "images/c.jpg\n")
    assert counted(tmp_path) == (2, 2, 0, 1)


def test_two_folders_of_images_may_share_one_of_labels(tmp_path):
    files(tmp_path, "train_set/a.jpg", "val_set/b.jpg", "labels/a.txt", "labels/b.txt")
    files(tmp_path, data="train: train_set\nval: val_set\n" + NAMES)
    assert counted(tmp_path) == counted(tmp_path, "val") == (1, 1, 0, 0)


def test_labels_below_a_folder_of_labels_may_belong_to_another_split(tmp_path):
    files(tmp_path, "images/a.jpg", "labels/a.txt", "images/val/b.jpg", "labels/val/b.txt")
    files(tmp_path, "train.txt", data="train: train.txt\nval: images/val\n" + NAMES)
    write(tmp_path / "train.txt", "images/a.jpg\n")
    assert counted(tmp_path) == counted(tmp_path, "val") == (1, 1, 0, 0)


def test_label_folders_of_other_data_sets_are_not_searched(tmp_path):
    root = tmp_path / "images" / "mine"  # beside other people's data
    files(root, "train/a.jpg", "train/a.txt", "train/b.jpg", data="train: train\n" + NAMES)
    files(tmp_path, "labels/other/c.txt", "labels/d.txt")
    assert counted(root) == (2, 1, 1, 0)


def test_images_in_formats_that_are_not_read_do_not_vanish(tmp_path, capsys):
    yolo_set(tmp_path, {"a": GOOD})
    for name in ("b.gif", "c.HEIC", "d.avif"):
        write(tmp_path / "images/train" / name, b"x")
    files(tmp_path, "labels/train/b.txt", "labels/train/c.txt")
    index = index_of(tmp_path)
    (problem,) = index.problems
    assert problem.kind == "image-unread" and index.totals()["images left out"] == 3
    for word in (".gif: 1", ".heic: 1", ".avif: 1", "convert them"):
        assert word in problem.what
    assert main(["data", "check", str(tmp_path)]) == 3
    (tmp_path / "images/train/a.jpg").unlink()
    with pytest.raises(DataError, match="no images in") as caught:
        totals(tmp_path)
    assert ".gif: 1" in caught.value.hint


# lists


@pytest.mark.parametrize(
    "line",
    [
        r"images\train\a.jpg",
        r".\images\train\a.jpg",
        r"C:\Users\me\data\images\train\a.jpg",
        "/home/me/data/images/train/a.jpg",
        "data/images/train/a.jpg",
        "'images/train/a.jpg'",
        '"images/train/a.jpg"   ',
        "images/train/a.jpg labels/train/a.txt",
        "images/train/a.jpg\tlabels\\train\\a.txt",
    ],
)
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_list_from_another_machine_is_read(tmp_path, line, end, encoding):
    files(tmp_path, "images/train/a.jpg", "labels/train/a.txt", "images/train/b.jpg", "labels/train/b.txt")
    files(tmp_path, data="train: train.txt\n" + NAMES)
    text = end.join(["# made by hand", line, "", "images/train/b.jpg", ""])
    write(tmp_path / "train.txt", text.encode(encoding))
    index = index_of(tmp_path)
    assert [path.rpartition("images")[2] for path in index.paths] == [
        f"{os.sep}train{os.sep}a.jpg",
        f"{os.sep}train{os.sep}b.jpg",
    ]
    assert index.totals()["labels"] == 2 and index.problems == ()


def test_each_name_of_a_list_is_tried_by_itself_and_the_number_is_said(tmp_path):
    files(
        tmp_path,
        "images/a.jpg",
        "labels/a.txt",
        "images/b.jpg",
        "labels/b.txt",
        data="train: train.txt\n" + NAMES,
    )
    write(tmp_path / "train.txt", "data/images/a.jpg\nimages/b.jpg\ndata/images/gone.jpg\n")
    index = index_of(tmp_path)
    assert len(index) == 2 and [problem.kind for problem in index.problems] == ["image-missing"]
    assert [said.partition(": ")[2] for said in index.assumed] == [
        f"names without a file: 1; others are used, as data/images/a.jpg -> {tmp_path / 'images' / 'a.jpg'}"
    ]


def test_the_label_file_that_a_list_names_is_used(tmp_path):
    files(tmp_path, "pictures/a.jpg", "boxes/of_a.txt", data="train: train.txt\n" + NAMES)
    write(tmp_path / "train.txt", "pictures/a.jpg boxes/of_a.txt\n")
    assert counted(tmp_path) == (1, 1, 0, 0)


@pytest.mark.parametrize("second", ["12,34,56,78,0", "0 0.5 0.5 0.1 0.1", "b.json"])
def test_a_list_of_images_and_annotations_is_named(tmp_path, second):
    files(tmp_path, "images/a.jpg", "Annotations/a.xml", data="train: train.txt\n" + NAMES)
    write(tmp_path / "train.txt", f"./images/a.jpg ./{second}\n")  # the end of the line is a file, too
    with pytest.raises(DataError, match=r"train\.txt:1 has an image and") as caught:
        totals(tmp_path)
    assert "list of image files alone" in caught.value.hint


def test_a_name_with_spaces_is_a_name_first(tmp_path):
    files(tmp_path, "images/my photo.jpg", "labels/my photo.txt", "images/a.jpg b.jpg", "labels/a.jpg b.txt")
    files(tmp_path, data="train: train.txt\n" + NAMES)
    write(tmp_path / "train.txt", "images/my photo.jpg\nimages/a.jpg b.jpg\n")
    assert counted(tmp_path) == (2, 2, 0, 0)


# entries of the YAML


@pytest.mark.parametrize(
    ("train", "val"),
    [
        (r"images\train", r"images\val"),
        ("/content/data/images/train", "/content/data/images/val"),
        (r"D:\data\images\train", r"D:\data\images\val"),
        ("images/train/", ".//images/val"),
    ],
)
@pytest.mark.parametrize("path", ["", "path: .\n", "path: 'C:\\Users\\me'\n", "path: /home/nobody/data\n"])
def test_entries_from_another_machine_are_found_below_the_yaml(tmp_path, train, val, path):
    yolo_set(tmp_path, {"a": GOOD})
    files(tmp_path, "images/val/b.jpg", "labels/val/b.txt", data=f"{path}train: {train}\nval: {val}\n{NAMES}")
    spec = load_dataset(str(tmp_path))
    assert [spec.sources(split)[0].path for split in ("train", "val")] == [
        tmp_path / "images" / "train",
        tmp_path / "images" / "val",
    ]
    assert any(train in note for note in spec.notes) == (train != "images/train/")


def test_path_with_backslashes_is_found(tmp_path):
    yolo_set(tmp_path / "a" / "set", {"a": GOOD})
    files(tmp_path, data="path: a\\set\ntrain: images\\train\n" + NAMES)
    assert counted(tmp_path) == (1, 1, 0, 0)


def test_what_is_left_of_an_entry_never_names_the_images_of_another_split(tmp_path):
    files(tmp_path, "images/a.jpg", "labels/a.txt", data="train: images\nval: /data/val/images\n" + NAMES)
    with pytest.raises(DataError, match="val images /data/val/images do not exist"):
        load_dataset(str(tmp_path)).sources("val")


@pytest.mark.parametrize(
    ("train", "val"), [("train_images", "val_images"), ("images", "image"), ("set_1", "set_2")]
)
def test_no_hint_proposes_the_images_of_another_split(tmp_path, train, val):
    files(tmp_path, f"{train}/a.jpg", f"{train}/a.txt", data=f"train: {train}\nval: {val}\n{NAMES}")
    with pytest.raises(DataError, match=f"val images {val} do not exist") as caught:
        load_dataset(str(tmp_path)).sources("val")
    assert "?" not in caught.value.hint


def test_a_stray_quotation_mark_is_shown_with_the_folder_that_is_meant(tmp_path):
    yolo_set(tmp_path, {"a": GOOD})
    write(tmp_path / "data.yaml", "train: ./images/train'\n" + NAMES)
    with pytest.raises(DataError, match=r"train images \./images/train' do not exist") as caught:
        load_dataset(str(tmp_path)).sources("train")
    assert caught.value.source == f"{tmp_path / 'data.yaml'}:1"
    assert caught.value.hint == f"{tmp_path / 'images' / 'train'}?"


def test_a_windows_path_in_double_quotes_says_what_the_backslash_does(tmp_path):
    write(tmp_path / "data.yaml", 'path: "C:\\Users\\me"\ntrain: images\n' + NAMES)
    with pytest.raises(ConfigError, match="escape") as caught:
        load_dataset(str(tmp_path))
    assert str(caught.value.source).endswith("data.yaml:1") and "write / in a path" in str(caught.value.hint)


# folders without a data.yaml


def test_a_folder_of_darknet_is_read_as_its_data_file_says(tmp_path):
    files(
        tmp_path,
        "obj_train_data/a.PNG",
        "obj_train_data/a.txt",
        "obj_valid_data/b.PNG",
        "obj_valid_data/b.txt",
    )
    write(
        tmp_path / "obj.data",
        "classes = 2\ntrain = data/train.txt\nvalid = data/val.txt\nnames = data/obj.names\nbackup = x/\n",
    )
    write(tmp_path / "obj.names", "car\r\nbus\r\n")
    write(tmp_path / "train.txt", "data/obj_train_data/a.PNG\n")
    write(tmp_path / "val.txt", "data/obj_valid_data/b.PNG\n")
    spec = load_dataset(str(tmp_path))
    assert spec.names == ("car", "bus") and any("obj.names" in note for note in spec.notes)
    assert counted(tmp_path) == counted(tmp_path, "val") == (1, 1, 0, 0)
    assert main(["data", "check", str(tmp_path)]) == 0


def test_a_data_file_of_darknet_names_files_of_its_folder_only(tmp_path):
    write(tmp_path / "private" / "secret.txt", "word\n")
    files(tmp_path / "set", "images/a.jpg", "labels/a.txt")
    write(tmp_path / "set" / "obj.data", "names = ../private/secret.txt\ntrain = ../private/secret.txt\n")
    with pytest.raises(ConfigError, match="not a data set in a known layout") as caught:
        load_dataset(str(tmp_path / "set"))
    assert "word" not in str(caught.value)


def test_a_folder_of_darknet_without_validation_says_what_a_training_needs(tmp_path):
    files(tmp_path, "obj_train_data/a.jpg", "obj_train_data/a.txt")
    write(tmp_path / "obj.data", "names = data/obj.names\ntrain = data/train.txt\n")
    write(tmp_path / "obj.names", "car\n")
    write(tmp_path / "train.txt", "data/obj_train_data/a.jpg\n")
    assert counted(tmp_path) == (1, 1, 0, 0)
    assert main(["data", "check", str(tmp_path)]) == 0
    with pytest.raises(ConfigError, match="no split 'val'") as caught:
        load_dataset(str(tmp_path)).sources("val")
    assert "a data.yaml with train, val and names" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("train", "val"), [("images/train", "images/val"), ("train/images", "valid/images"), ("train", "test")]
)
def test_folders_of_splits_without_a_data_yaml_get_the_lines_to_write(tmp_path, train, val):
    files(tmp_path, f"{train}/a.jpg", f"{val}/b.jpg", f"{train.replace('images', 'labels')}/a.txt")
    with pytest.raises(ConfigError, match="not a data set in a known layout") as caught:
        load_dataset(str(tmp_path))
    split = "test" if val == "test" else "val"
    assert f"train: {train}  {split}: {val}" in caught.value.hint
    assert str(tmp_path / "data.yaml") in caught.value.hint
    write(tmp_path / "classes.txt", "cat\n")
    assert load_dataset(str(tmp_path)).sources(split)[0].path == tmp_path / val


def test_a_folder_of_images_alone_gets_the_lines_to_write(tmp_path):
    write_picture(tmp_path / "a.jpg")
    with pytest.raises(ConfigError, match="not a data set in a known layout") as caught:
        load_dataset(str(tmp_path))
    assert "train: .  val: FOLDER  names: [FIRST, SECOND]" in caught.value.hint


def test_each_folder_is_listed_as_often_as_one_reader_needs(tmp_path, monkeypatch):
    """Listing takes most of the time until an index is found again."""
    files(
        tmp_path, *(f"images/train/{n}.jpg" for n in range(3)), *(f"labels/train/{n}.txt" for n in range(3))
    )
    files(tmp_path, data="train: images/train\nval: images/train\n" + NAMES)
    spec, listed, scandir = load_dataset(str(tmp_path)), [], os.scandir

    def counted_scandir(folder):
        listed.append(str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", counted_scandir)
    YoloFiles(tmp_path / "images" / "train")
    once = sorted(listed)
    listed.clear()
    spec.readers("train")
    assert sorted(listed) == once


KITTI = "Car 0.00 0 -1.58 587.01 173.33 614.12 200.12 1.65 1.67 3.64 -0.65 1.71 46.70 -1.59\n"
DOTA = "imagesource:GoogleEarth\ngsd:0.146\n2753 2408 2861 2385 2888 2468 2805 2502 plane 0\n"
RAW = {  # of public data sets: file name, content, what the message says
    "VisDrone": ("annotations/a.txt", "684,8,273,116,0,0,0,0\n406,119,265,70,1,4,0,0\n", "VisDrone's"),
    "DOTA": ("labelTxt/a.txt", DOTA, "DOTA's"),
    "DOTA without a header": ("labelTxt/a.txt", DOTA.split("\n", 2)[2], "DOTA's"),
    "KITTI": ("label_2/a.txt", KITTI, "KITTI's"),
    "WIDER": ("bbx.txt", "0--Parade/0_Parade_849.jpg\n1\n449 330 122 149 0 0 0 0 0 0\n", "WIDER FACE's"),
    "CrowdHuman": ("a.odgt", '{"ID": "a", "gtboxes": [{"tag": "person", "fbox": [1, 2, 3, 4]}]}\n', "CrowdHuman's"),
    "BDD100K": ("b.json", '[{"name": "a.jpg", "labels": [{"category": "car", "box2d": {"x1": 1}}]}]', "BDD100K's"),
    "SuperAnnotate": ("a.json", '{"metadata": {}, "instances": [{"type": "bbox", "className": "a"}]}', "SuperAnnotate's"),
    "Open Images": ("oid.csv", "ImageID,Source,LabelName,Confidence,XMin,XMax,YMin,YMax\n", "CSV table"),
    "wheat": ("train.csv", "image_id,width,height,bbox,source\n", "CSV table"),
    "pandas": ("train.csv", "id,class,x_min,y_min,x_max,y_max\n", "CSV table"),
    "zip": ("set.zip", "PK\x03\x04", "unpack it"),
}  # fmt: skip


@pytest.mark.parametrize("name", RAW)
@pytest.mark.parametrize("given", ["file", "folder"])
def test_raw_labels_of_public_data_sets_are_named_with_a_way_out(tmp_path, name, given):
    file, content, says = RAW[name]
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(content)
    if given == "folder" and name == "zip":
        pytest.skip("a folder with an archive may be anything")
    with pytest.raises(YolofleetError) as caught:
        load_dataset(str(tmp_path / file if given == "file" else tmp_path))
    assert says in str(caught.value) and ("convert" in str(caught.value) or "export" in str(caught.value) or "unpack" in str(caught.value))  # fmt: skip


@pytest.mark.parametrize(
    ("text", "says"), [(RAW["VisDrone"][1], "VisDrone's"), (DOTA, "DOTA's"), (KITTI, "KITTI's")]
)
def test_raw_rows_beside_images_of_a_description_are_named(tmp_path, text, says):
    data = yolo_set(tmp_path, {"a": text})
    with pytest.raises(DataError) as caught:
        index_of(data)
    assert f"it is {says} label" in str(caught.value) and "column" in str(caught.value)
