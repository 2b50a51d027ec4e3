from pathlib import Path

import numpy as np
import pytest
import yaml
from coco_files import image, label, write_coco
from commands import called
from small_data import ODD_NAMES, voc_object, voc_set, write_picture, yolo_set

from yolofleet.data.datasets.built_in import BUILT_IN, NAMED, YAML, built_in_of
from yolofleet.data.datasets.index import build_index
from yolofleet.data.datasets.sources import load_dataset
from yolofleet.data.datasets.spec import FORMATS, format_of
from yolofleet.support.errors import ConfigError, DataError

BOX = (1, 1, 9, 9)


def paths(spec, split):
    return [source.path for source in spec.sources(split)]


def write_yaml(root, text, name="data.yaml"):
    root.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text, encoding="utf-8")
    return str(root / name)


def coco_json(path, *, categories=((3, "dog"), (1, "cat")), annotations=()):
    return write_coco(path, [image(1, "a.jpg")], list(annotations), categories)


@pytest.mark.parametrize("folder", ODD_NAMES)
def test_paths_start_at_the_folder_of_the_yaml(tmp_path, folder):
    root = tmp_path / folder
    yolo_set(root, {"a": "0 .5 .5 .1 .1"})
    spec = load_dataset(str(root / "data.yaml"))
    assert spec.names == ("cat", "dog", "bird")
    assert spec.name == folder
    assert paths(spec, "train") == paths(spec, "val") == [root / "images" / "train"]
    assert load_dataset(str(root)).splits == spec.splits


def test_path_may_be_relative_to_the_yaml_or_to_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "sets" / "x" / "images").mkdir(parents=True)
    text = "path: ../sets/x\ntrain: images\nnames: [a]\n"
    assert paths(load_dataset(write_yaml(tmp_path / "configs", text)), "train") == [
        tmp_path / "sets" / "x" / "images"
    ]
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    far = write_yaml(tmp_path / "far" / "away", text)
    assert paths(load_dataset(far), "train") == [tmp_path / "sets" / "x" / "images"]
    assert load_dataset(far).root == tmp_path / "work" / ".." / "sets" / "x"


def test_a_split_may_be_a_folder_a_list_file_or_several(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "two.txt").write_text("./one/a.jpg\n")
    spec = load_dataset(write_yaml(tmp_path, "train: [one, two.txt]\nval: one\ntest:\nnames: {0: a, 1: b}\n"))
    assert paths(spec, "train") == [tmp_path / "one", tmp_path / "two.txt"]
    assert "test" not in spec.splits
    with pytest.raises(ConfigError, match="no split 'test'"):
        spec.sources("test")


def test_a_missing_split_is_an_error_when_it_is_asked_for(tmp_path):
    for split in ("train", "val"):
        (tmp_path / "images" / split).mkdir(parents=True)
    text = "train: images/train\nval: images/vall\ntest: elsewhere/x\nnames: [a]\n"
    spec = load_dataset(write_yaml(tmp_path, text))
    with pytest.raises(DataError) as caught:
        spec.sources("val")
    assert "images/vall do not exist" in caught.value.what
    assert caught.value.source is not None and caught.value.source.endswith("data.yaml:2")
    assert caught.value.hint == f"{tmp_path / 'images' / 'val'}?"
    with pytest.raises(DataError) as caught:
        spec.sources("test")
    assert str(tmp_path / "elsewhere" / "x") in caught.value.hint


def test_without_any_split_the_error_comes_at_once(tmp_path):
    with pytest.raises(DataError, match="train images a do not exist"):
        load_dataset(write_yaml(tmp_path, "train: a\nval: b\nnames: [x]\n"))
    with pytest.raises(ConfigError, match="train, val and test are missing"):
        load_dataset(write_yaml(tmp_path, "names: [x]\n"))


@pytest.mark.parametrize(
    ("text", "what", "line"),
    [
        ("names: [a, b]\nnc: 3", "nc is 3 but names has 2: a, b", 3),
        ("names: {0: a, 2: b}", "numbers 0, 2, not 0..1", 2),
        ("names: [a, true]", "names[1] is true", 2),
        ("names: cat", "names is cat", 2),
        ("names: [a]\nnc: many", "nc is many", 3),
        ("names: [a, [b]]", "names[1] is a list of 1", 2),
        ("nc: 2", "has no class names, only nc: 2", None),
        ("classes: 2", "has no class names", None),
        ("name: [a]", "unknown key name", 2),
        ("names: [a", "not YAML", 3),
        ("names: {1: a, 2: b}", "numbers 1, 2, not 0..1", 2),
        ("names: {a: 0, b: 1}", "numbers a, b, not 0..1", 2),
        ("names: a, b", "names is a, b, not a list", 2),
        ("names: coco.names", "names is coco.names", 2),
        ("names: [yes, no]", "yes is true or false for many readers of YAML", 2),
        ("names:\n  0: a\n  1: Off", "Off is true or false for many readers of YAML", 4),
        ("names: [a, null]", "names[1] is null", 2),
        ("names: [a, ~]", "names[1] is null", 2),
        ("names: [a, '']", "names[1] is ''", 2),
        ("names: [a, '  ']", "names[1] is '  '", 2),
        ("names:\n\t- a", "cannot start any token", 3),
        ("nc: '1'\nnames: [a]", "nc is 1, not a number", 2),
        ("nc: 1.5\nnames: [a]", "nc is 1.5, not a number", 2),
        ("nc: 80\nnames: [a]", "nc is 80 but names has 1", 2),
    ],
)
def test_mistakes_in_the_yaml_are_named_with_their_line(tmp_path, text, what, line):
    (tmp_path / "images").mkdir()
    file = write_yaml(tmp_path, f"train: images\n{text}\n")
    with pytest.raises(ConfigError) as caught:
        load_dataset(file)
    assert what in str(caught.value)
    assert caught.value.exit_code == 2
    if line:
        assert caught.value.source == f"{file}:{line}"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("[010, 0o10, 1e3, 12:30, 2024-01-01]", ("010", "0o10", "1e3", "12:30", "2024-01-01")),
        ("[.5, -1]", (".5", "-1")),
        ("{0: 007, 1: 1_000}", ("007", "1_000")),
        ("['yes', \"no\", n, y]", ("yes", "no", "n", "y")),
        ("{'0': cat, '1': dog}", ("cat", "dog")),
        ("[cat, dog]\nnc: 2.0", ("cat", "dog")),
    ],
)
@pytest.mark.parametrize(("mark", "end"), [("", "\n"), ("\ufeff", "\r\n")])
def test_names_are_those_that_the_file_has(tmp_path, text, names, mark, end):
    (tmp_path / "images").mkdir()
    (tmp_path / "data.yaml").write_bytes(f"{mark}train: images\nnames: {text}\n".replace("\n", end).encode())
    assert load_dataset(str(tmp_path)).names == names


def test_a_name_of_two_classes_is_said_in_every_format(tmp_path):
    (tmp_path / "images").mkdir()
    notes = load_dataset(write_yaml(tmp_path, "train: images\nnames: [cat, dog, cat]\n")).notes
    assert "names of several classes: cat" in notes
    file = coco_json(tmp_path / "coco.json", categories=((1, "dog"), (2, "dog"), (3, "cat")))
    assert "names of several classes: dog" in load_dataset(str(file)).notes


@pytest.mark.parametrize(
    ("data", "what", "line"),
    [
        ("train: images\nnames: [caf\u00e9]\n".encode("latin-1"), "it is not UTF-8", 2),
        ("train: images\nnames: [a]\n".encode("utf-16"), "it is in UTF-16", 1),
    ],
)
def test_a_yaml_in_another_encoding_is_named_with_its_line(tmp_path, data, what, line):
    (tmp_path / "data.yaml").write_bytes(data)
    with pytest.raises(ConfigError, match=what) as caught:
        load_dataset(str(tmp_path))
    assert caught.value.source == f"{tmp_path / 'data.yaml'}:{line}" and "UTF-8" in caught.value.hint


def test_a_download_script_is_never_executed(tmp_path):
    (tmp_path / "images").mkdir()
    marker = tmp_path / "ran"
    text = f"train: images\nnames: [a]\ndownload: |\n  import pathlib; pathlib.Path(r'{marker}').touch()\n"
    spec = load_dataset(write_yaml(tmp_path, text))
    assert not marker.exists()
    assert "not executed" in spec.notes[0]


def test_a_name_that_does_not_exist_offers_the_nearest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for data, near in (("coco123.yaml", "coco128.yaml"), ("shape", "shapes")):
        with pytest.raises(ConfigError) as caught:
            load_dataset(data)
        assert near in caught.value.hint
    write_yaml(tmp_path, "", "mydata.yaml")
    with pytest.raises(ConfigError, match=r"mydata\.yaml"):
        load_dataset("mydatas.yaml")
    for data in ("", "a\0b", "~nobody-here-xyz/a.yaml"):
        with pytest.raises(ConfigError):
            load_dataset(data)


def test_a_bare_name_is_also_looked_for_in_the_folder_data_before_those_that_come_along(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for folder in ("images", "data/images", "data/sub"):
        (tmp_path / folder).mkdir(parents=True)
    write_yaml(tmp_path / "data", "train: images\nval: images\nnames: [kept]\n", "coco.yaml")
    assert load_dataset("coco.yaml").names == ("kept",)
    write_yaml(tmp_path, "train: images\nval: images\nnames: [here]\n", "coco.yaml")
    assert load_dataset("coco.yaml").names == ("here",)
    with pytest.raises(ConfigError, match="does not exist"):
        load_dataset("sub/coco.yaml")


@pytest.mark.parametrize(("name", "classes"), [("coco128.yaml", 80), ("coco", 80), ("voc.yaml", 20)])
def test_descriptions_that_come_along_are_used_by_name(tmp_path, monkeypatch, name, classes):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as caught:
        load_dataset(name)
    assert str(tmp_path / "datasets") in caught.value.hint
    for file in BUILT_IN.glob("*.yaml"):
        content = yaml.safe_load(file.read_text())
        assert "download" not in content
        for split in ("train", "val"):
            for entry in np.atleast_1d(content[split]).tolist():
                made = tmp_path / content["path"] / entry
                made.parent.mkdir(parents=True, exist_ok=True)
                made.touch() if entry.endswith(".txt") else made.mkdir(exist_ok=True)
    assert len(load_dataset(name).names) == classes
    assert load_dataset(f"data/{name}").splits == load_dataset(name).splits  # as guides write it


def test_coco_json_alone_brings_its_names(tmp_path):
    train = coco_json(tmp_path / "annotations" / "instances_train2017.json")
    coco_json(tmp_path / "annotations" / "instances_val2017.json")
    spec = load_dataset(str(train))
    assert spec.names == ("cat", "dog")
    assert spec.category_ids == (1, 3)
    assert [path.name for path in paths(spec, "val")] == ["instances_val2017.json"]
    roots = spec.sources("train")[0].image_roots
    assert tmp_path / "train2017" in roots
    assert tmp_path / "images" / "train2017" in roots
    assert load_dataset(str(tmp_path)).category_ids == (1, 3)


def test_images_of_a_coco_json_that_are_not_found_name_the_folders(tmp_path):
    coco_json(tmp_path / "ann" / "train.json", annotations=[label(1, 1, [4, 4, 20, 20])])
    (tmp_path / "images").mkdir()
    yaml = write_yaml(tmp_path, "path: pictures\ntrain: ann/train.json\nval: ann/train.json\n")
    spec = load_dataset(yaml)
    assert spec.notes == ("path pictures does not exist; used the folder of data.yaml",)
    with pytest.raises(DataError, match=r"1 of 1 images cannot be used") as caught:
        build_index(spec, "train")
    places = f"{tmp_path / 'ann'}, {tmp_path}, {tmp_path / 'images'}"
    assert f"Images were looked for in {places}; path:" in caught.value.hint
    (tmp_path / "pictures").mkdir()
    write_picture(tmp_path / "pictures" / "a.jpg", width=64, height=48)
    spec = load_dataset(yaml)
    assert spec.notes == ()
    assert len(build_index(spec, "train")) == 1


def test_coco_categories_meet_given_names_by_name(tmp_path):
    coco_json(tmp_path / "a.json")
    spec = load_dataset(write_yaml(tmp_path, "train: a.json\nnames: [dog, bird, cat]\n"))
    assert spec.category_ids == (3, -1, 1)
    with pytest.raises(ConfigError, match="category 'cat'") as caught:
        load_dataset(write_yaml(tmp_path, "train: a.json\nnames: [dog, cats]\n"))
    assert caught.value.hint == "nearest: cats"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        "{",
        "[" * 100_000,
        '{"images": 3}',
        '{"images": [3], "categories": []}',
        '{"images": [{"id": 1}], "categories": []}',
        '{"images": [{"id": 1, "file_name": "a"}, {"id": 1, "file_name": "b"}], "categories": []}',
        '{"images": [], "categories": [{"id": 1e400, "name": "a"}]}',
        '{"images": [], "categories": [{"id": 1}]}',
        '{"images": [{"id": 1, "file_name": "a"}], "categories": [{"id": 1, "name": "a"}],'
        ' "annotations": [{"image_id": 1, "category_id": 2, "bbox": [1, 2, 3, 4]}]}',
    ],
)
def test_json_that_is_not_coco_is_named(tmp_path, content):
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(DataError, match=r"x\.json"):
        load_dataset(str(path))


def test_voc_folders_bring_their_names_and_lists(tmp_path):
    root = voc_set(tmp_path / "VOC2007", {"a": voc_object("zebra", BOX) + voc_object("ant", BOX)})
    spec = load_dataset(str(root))
    assert spec.names == ("ant", "zebra")
    assert [source.kind for source in spec.sources("train")] == ["voc"]
    with pytest.raises(ConfigError, match="has no split 'test'"):
        spec.sources("test")
    assert load_dataset(str(root)).names == spec.names  # from the cache this time


def test_voc_lists_may_stand_in_a_yaml(tmp_path):
    voc_set(tmp_path / "VOC2007", {"a": voc_object("ant", BOX)}, trainval="a", test="a")
    text = "train: VOC2007\nval: [VOC2007/ImageSets/Main/test.txt]\nnames: [zebra, ant]\n"
    spec = load_dataset(write_yaml(tmp_path, text))
    assert [path.name for path in paths(spec, "train") + paths(spec, "val")] == ["trainval.txt", "test.txt"]
    assert spec.names == ("zebra", "ant")


def test_a_folder_that_is_no_data_set_says_what_would_be(tmp_path):
    with pytest.raises(ConfigError, match="is not a data set in a known layout"):
        load_dataset(str(tmp_path))
    write_yaml(tmp_path, "", "a.yaml")
    write_yaml(tmp_path, "", "b.yaml")
    with pytest.raises(ConfigError, match=r"2 YAML files: a\.yaml, b\.yaml"):
        load_dataset(str(tmp_path))


def test_shapes_are_made_once(tmp_path):
    def made():
        files = (tmp_path / "cache" / "datasets").rglob("*")
        return {file: (file.stat().st_ino, file.stat().st_mtime_ns) for file in files}

    spec = load_dataset("shapes:4")
    assert spec.name == "shapes"
    assert set(spec.splits) >= {"train", "val"}
    before = made()
    assert load_dataset("shapes:4").splits == spec.splits
    assert made() == before


DATA = Path(__file__).resolve().parents[3] / "data"


def test_the_folder_data_has_the_descriptions_that_come_with_yolofleet():
    ours, theirs = ({f.name: f.read_bytes() for f in folder.iterdir()} for folder in (DATA, BUILT_IN))
    assert ours == theirs


def test_a_copy_of_a_description_is_found_by_name_and_finds_the_images_as_the_original(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("data/coco_profile.yaml").write_bytes((DATA / "coco.yaml").read_bytes())
    assert built_in_of("coco_profile.yaml") == built_in_of("data/coco.yaml") == "coco"
    with pytest.raises(DataError) as caught:
        load_dataset("coco_profile.yaml")
    assert "yolofleet data download coco" in str(caught.value.hint)
    for split in ("train2017", "val2017"):
        Path("datasets/coco").mkdir(parents=True, exist_ok=True)
        Path(f"datasets/coco/{split}.txt").write_text("./images/0.jpg\n")
    spec = load_dataset("coco_profile.yaml")
    assert spec.name == "coco_profile"
    assert spec.sources("train")[0].path == tmp_path / "datasets/coco/train2017.txt"
    with Path("data/coco_profile.yaml").open("a") as file:
        file.write("# mine\n")
    assert built_in_of("coco_profile.yaml") == ""
    assert load_dataset("coco_profile.yaml").sources("val")[0].path == tmp_path / "datasets/coco/val2017.txt"


@pytest.mark.parametrize("absent", ["test", "val"])
def test_check_agrees_with_train_about_a_split_whose_folder_is_absent(tmp_path, absent):
    root = tmp_path / "export"
    for split in {"train", "valid", "test"} - {"valid" if absent == "val" else absent}:
        write_picture(root / split / "images" / "a.jpg")
        (root / split / "labels").mkdir()
        (root / split / "labels" / "a.txt").write_text("0 0.5 0.5 0.2 0.2\n")
    text = "train: ../train/images\nval: ../valid/images\ntest: ../test/images\nnames: [cup]\n"
    (root / "data.yaml").write_text(text)
    checked = called("data", "check", root / "data.yaml")
    spec = load_dataset(str(root / "data.yaml"))
    if absent == "test":
        assert checked.code == 0 and checked.err == ""
        assert [len(build_index(spec, split)) for split in ("train", "val")] == [1, 1]  # as train reads them
        assert "test images ../test/images do not exist: test is left out" in checked.out
        assert called("data", "check", root / "data.yaml", "--split", "test").code == 3
    else:
        with pytest.raises(DataError, match="valid/images do not exist"):
            build_index(spec, "val")
        assert checked.code == 3
        assert "cannot be used: val" in checked.err and "loses" not in checked.err


def test_a_file_may_be_named_if_a_format_reads_its_suffix():
    assert set(NAMED) == {*YAML, *(format_of(kind).suffix for kind in FORMATS)} - {""}
