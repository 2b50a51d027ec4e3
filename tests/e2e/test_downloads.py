"""Data sets and weights by name, from a server on this machine to where `--data NAME` and `--weights NAME` find them."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import yaml
from hostile import zipped
from web import Web, item_of, status, web, whole

from yolofleet import config
from yolofleet.cli import main
from yolofleet.data.datasets import catalogue
from yolofleet.data.datasets.catalogue import PublicDataset, datasets
from yolofleet.data.datasets.download import download_dataset
from yolofleet.data.datasets.index import build_index
from yolofleet.data.datasets.sources import load_dataset
from yolofleet.families.darknet.cfg import preset, read_cfg
from yolofleet.families.networks.description import preset_names
from yolofleet.families.weights import catalogue as weights_catalogue
from yolofleet.families.weights.catalogue import find_or_download, import_weights, known_weights
from yolofleet.storage.atomic import exclusive
from yolofleet.storage.fetch import DIGESTS, DownloadError, Patience
from yolofleet.support.errors import CheckpointError, ConfigError

BUILT_IN = Path(config.__file__).parent / "datasets"
COCO_NAMES = list(yaml.safe_load((BUILT_IN / "coco.yaml").read_text())["names"].values())
IMPATIENT = Patience(timeout_s=2, attempts=2, first_wait_s=0.01)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Web]:
    """The person works in an empty folder with an empty cache."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "YOLOFLEET_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path / "cache"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    with web() as state:
        yield state


def image(value: int, width: int = 40, height: int = 20) -> bytes:
    return cv2.imencode(".png", np.full((height, width, 3), value, np.uint8))[1].tobytes()


def tar_of(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as file:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def publish(
    server: Web, monkeypatch: pytest.MonkeyPatch, name: str, files: dict[str, bytes]
) -> PublicDataset:
    """The data set ``name`` of the table, with its files (by their names) on ``server``, and no others."""
    real = next(dataset for dataset in datasets() if dataset.name == name)
    parts = []
    for part in real.parts:
        if part.item.name in files:
            body = files[part.item.name]
            url = server.put(f"/{part.item.name}", whole(body))
            digest = "" if part.item.digest else None
            parts.append(replace(part, item=item_of(body, url, name=part.item.name, digest=digest)))
    assert len(parts) == len(files)
    fake = replace(real, parts=tuple(parts))
    monkeypatch.setattr(catalogue, "_TABLE", (fake,))
    return fake


def get(name: str, **how: object) -> Path:
    return download_dataset(name, tell=lambda text: None, patience=IMPATIENT, **how)  # type: ignore[arg-type]


# -- the tables


def test_the_tables_say_all_that_is_needed():
    items = [part.item for dataset in datasets() for part in dataset.parts]
    items += [entry.item for entry in known_weights()]
    for item in items:
        assert item.licence and item.origin.startswith("http") and Path(item.name).name == item.name
        assert item.urls and all(url.startswith(("http://", "https://")) for url in item.urls)
        if item.digest:
            kind, text = item.digest.split(":")
            assert len(text) == DIGESTS[kind] and text == text.lower() and int(text, 16)
    for dataset in datasets():
        names = [part.item.name for part in dataset.parts]
        assert len(set(names)) == len(names)
    digests = [item.digest for item in items if item.digest]
    assert len(set(digests)) == len(digests)


def test_every_published_weights_are_of_a_built_in_model_and_names_are_unique():
    entries = known_weights()
    assert {entry.name.removesuffix("-obj2coco") for entry in entries} <= set(preset_names())
    assert len({entry.name for entry in entries} | {e.item.name for e in entries}) == 2 * len(entries)
    for entry in entries:
        assert weights_catalogue.entry_of(entry.name) == entry == weights_catalogue.entry_of(entry.item.name)
    published = weights_catalogue.entry_of("yolov5s")
    assert published is not None and "AGPL" in published.item.licence


# -- data sets


def test_coco128_comes_to_where_its_name_is_looked_for(server, monkeypatch):
    files = {
        "coco128/images/train2017/000000000009.png": image(3),
        "coco128/labels/train2017/000000000009.txt": b"45 0.5 0.5 0.2 0.4\n",
        "coco128/README.txt": b"read me",
    }
    publish(server, monkeypatch, "coco128", {"coco128.zip": zipped(files)})
    assert get("coco128") == Path("datasets/coco128")
    index = build_index(load_dataset("coco128"), "train")
    assert (len(index), index.classes.tolist()) == (1, [45])
    assert not Path("datasets/coco128/downloads/coco128.zip").exists()  # unpacked
    get("coco128")
    assert len(server.asked) == 1


class Terminal(io.StringIO):
    """A keyboard or screen."""

    def isatty(self) -> bool:
        return True


def test_a_data_set_is_downloaded_when_the_user_says_so_and_never_silently(server, monkeypatch, capsys):
    files = {f"coco128/images/train2017/{i}.jpg": image(i) for i in range(2)}
    files |= {f"coco128/labels/train2017/{i}.txt": b"0 0.5 0.5 0.5 0.5\n" for i in range(2)}
    publish(server, monkeypatch, "coco128", {"coco128.zip": zipped(files)})
    # layers that the network lacks end the run after its data set was read
    train = ["train", "--data", "coco128.yaml", "--model", "yolov5n", "--freeze", "99", "--device", "cpu"]
    assert main(train) == 3  # no terminal here: the message says how
    assert "yolofleet data download coco128, or --download" in capsys.readouterr().err
    assert not server.asked and not Path("datasets").exists()
    assert main([*train, "--download"]) == 2
    assert "--freeze 99" in capsys.readouterr().err and len(server.asked) == 1
    assert main([*train, "--download"]) == 2 and len(server.asked) == 1  # it is here
    assert main(["train", "--data", "shapes", "--model", "yolov5n", "--download"]) == 2
    assert "shapes is not one of them" in capsys.readouterr().err


def test_at_a_terminal_a_download_is_offered(server, monkeypatch):
    publish(
        server, monkeypatch, "coco128", {"coco128.zip": zipped({"coco128/images/train2017/0.jpg": image(0)})}
    )

    def answered(text: str) -> tuple[int, str]:
        screen = Terminal()
        monkeypatch.setattr("sys.stdin", Terminal(text))
        monkeypatch.setattr("sys.stderr", screen)
        return main(
            ["val", "--weights", "none-such", "--data", "coco128", "--device", "cpu"]
        ), screen.getvalue()

    for answer in ("n\n", "\n"):
        code, said = answered(answer)
        assert code == 3 and "is not here. Download" in said and "[y/N]" in said
        assert not Path("datasets").exists()
    answered("y\n")
    assert Path("datasets/coco128/images/train2017/0.jpg").is_file()
    assert "[y/N]" not in answered("")[1]  # it is here


def coco_files() -> dict[str, bytes]:
    ids = [i for i in range(1, 91) if i not in (12, 26, 29, 30, 45, 66, 68, 69, 71, 83)]
    categories = [{"id": i, "name": name} for i, name in zip(ids, COCO_NAMES, strict=True)]

    def instances(first: int) -> bytes:
        images = [
            {"id": first + i, "file_name": f"{first + i:012}.png", "width": 40, "height": 20} for i in (0, 1)
        ]
        boxes = [
            {
                "id": 1,
                "image_id": first,
                "category_id": 3,
                "bbox": [10, 5, 20, 10],
                "iscrowd": 0,
                "area": 150,
            },
            {"id": 2, "image_id": first, "category_id": 90, "bbox": [0, 0, 40, 20], "iscrowd": 1, "area": 9},
        ]
        return json.dumps({"images": images, "annotations": boxes, "categories": categories}).encode()

    def pictures(split: str, first: int) -> bytes:
        return zipped({f"{split}/{first + i:012}.png": image(i) for i in (0, 1)})

    annotations = {
        f"annotations/instances_{s}2017.json": instances(n) for s, n in (("train", 1), ("val", 11))
    }
    about = {"images": [{"file_name": "7.png", "id": 7, "width": 1, "height": 1}], "categories": []}
    return {
        "annotations_trainval2017.zip": zipped(annotations),
        "train2017.zip": pictures("train2017", 1),
        "val2017.zip": pictures("val2017", 11),
        "test2017.zip": zipped({"test2017/7.png": image(7)}),
        "image_info_test2017.zip": zipped(
            {"annotations/image_info_test-dev2017.json": json.dumps(about).encode()}
        ),
    }


def test_coco_gets_the_lists_and_labels_that_its_description_names(server, monkeypatch):
    publish(server, monkeypatch, "coco", coco_files())
    root = get("coco")
    spec = load_dataset("coco")
    assert sorted(spec.splits) == ["train", "val"] and not (root / "images" / "test2017").exists()
    for split in ("train", "val"):
        index = build_index(spec, split)
        assert (len(index), index.classes.tolist()) == (2, [2])  # the crowd region is no label
        assert index.boxes_cxcywh_unit.tolist() == [[0.5, 0.5, 0.5, 0.5]]
    from_json = build_index(load_dataset(str(root / "annotations/instances_val2017.json")), "val")
    assert (len(from_json), int(from_json.crowd.sum())) == (2, 1)
    get("coco", parts=("test",))
    assert "test" in load_dataset("coco").splits
    assert (root / "test-dev2017.txt").read_text() == "./images/test2017/7.png\n"


def test_the_verb_passes_its_options_on(server, monkeypatch, capsys):
    publish(server, monkeypatch, "coco", coco_files())
    some = ["data", "download", "coco", "--parts", "val,annotations"]
    assert main([*some, "--out", "sets", "--keep-archives"]) == 0
    assert capsys.readouterr().out == f"{Path('sets/coco')}\n" and len(server.asked) == 2
    assert main(some) == 0
    assert capsys.readouterr().out == f"{Path('datasets/coco')}\n" and len(server.asked) == 4
    assert len(list(Path("sets/coco/downloads").glob("*.zip"))) == 2
    assert not list(Path("datasets/coco/downloads").glob("*.zip"))


def voc_files(year: int, split: str, stem: str) -> dict[str, bytes]:
    xml = b"<annotation><object><name>dog</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>20</xmax><ymax>10</ymax></bndbox></object></annotation>"
    root = f"VOCdevkit/VOC{year}"
    return {
        f"{root}/JPEGImages/{stem}.jpg": image(1),
        f"{root}/Annotations/{stem}.xml": xml,
        f"{root}/ImageSets/Main/{split}.txt": f"{stem}\n".encode(),
    }


def test_archives_of_voc_share_a_folder(server, monkeypatch):
    files = {
        "VOCtrainval_06-Nov-2007.tar": tar_of(voc_files(2007, "trainval", "000001")),
        "VOCtest_06-Nov-2007.tar": tar_of(voc_files(2007, "test", "000002")),
        "VOCtrainval_11-May-2012.tar": tar_of(voc_files(2012, "trainval", "2008_1")),
    }
    publish(server, monkeypatch, "voc", files)
    assert get("voc") == Path("datasets/VOCdevkit")
    spec = load_dataset("voc")
    assert [len(build_index(spec, split)) for split in ("train", "val")] == [2, 1]


def test_files_without_a_digest_are_taken_from_where_a_person_put_them(server, monkeypatch):
    table = {
        "images": [{"id": 1, "file_name": "images/v1/patch0/a.jpg", "width": 40, "height": 20}],
        "annotations": [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 1, 9, 9]}],
        "categories": [{"id": 1, "name": "person"}],
    }
    files = {
        "zhiyuan_objv2_val.json": json.dumps(table).encode(),
        "val-patch0.tar.gz": tar_of({"patch0/a.jpg": image(1)}),
    }
    publish(server, monkeypatch, "objects365", files)
    with pytest.raises(DownloadError) as caught:
        get("objects365")
    assert "1 files of objects365 have no published digest" in caught.value.what and not server.asked
    downloads = Path("datasets/objects365/downloads")
    assert "val-patch0.tar.gz" in caught.value.hint and str(downloads) in caught.value.hint
    downloads.mkdir(parents=True)
    (downloads / "val-patch0.tar.gz").write_bytes(files["val-patch0.tar.gz"])
    root = get("objects365", keep_archives=True)
    assert (downloads / "val-patch0.tar.gz").is_file()
    assert len(build_index(load_dataset(str(root)), "val")) == 1


def test_a_download_that_was_cut_off_continues_with_what_is_missing(server, monkeypatch):
    files = coco_files()
    publish(server, monkeypatch, "coco", files)
    server.put("/train2017.zip", status(404))
    with pytest.raises(DownloadError, match=r"train2017\.zip could not be downloaded"):
        get("coco")
    server.put("/train2017.zip", whole(files["train2017.zip"]))
    server.asked.clear()
    get("coco")
    assert [path for path, _ in server.asked] == ["/train2017.zip"]
    assert not list(Path("datasets/coco").rglob("*.part")) and not list(Path("datasets/coco").rglob("*.lock"))


def test_wrong_names_are_answered_with_right_ones(server, monkeypatch):
    publish(server, monkeypatch, "coco", coco_files())
    with pytest.raises(ConfigError, match="has no part 'trian'") as caught:
        get("coco", parts=("trian",))
    assert "train" in caught.value.hint
    with pytest.raises(ConfigError) as caught:
        get("cocoo")
    assert "coco" in caught.value.hint
    assert not Path("datasets").exists()


def test_two_at_once_do_not_disturb_each_other(server, monkeypatch):
    publish(server, monkeypatch, "coco", coco_files())
    Path("datasets/coco").mkdir(parents=True)
    with (
        exclusive(Path("datasets/coco/.lock")),
        pytest.raises(DownloadError, match="another process is downloading"),
    ):
        get("coco")
    get("coco")


# -- weights


@pytest.fixture
def table(server: Web, monkeypatch: pytest.MonkeyPatch) -> Web:
    """The table of weights with its files on ``server``: 1,000 bytes each, whatever their name."""

    def moved(entry: weights_catalogue.KnownWeights) -> weights_catalogue.KnownWeights:
        body = entry.name.encode().ljust(1000)
        url = server.put(f"/{entry.item.name}", whole(body))
        item = item_of(body, url, name=entry.item.name, digest="" if entry.item.digest else None)
        return replace(entry, item=replace(item, licence=entry.item.licence))

    every = list(map(moved, known_weights()))
    monkeypatch.setattr(weights_catalogue, "known_weights", lambda: every)
    return server


@pytest.mark.parametrize("name", ["yolov5s", "yolov5s.pt"])
def test_weights_come_by_name_once_and_their_licence_is_told(name, table):
    told: list[str] = []
    path = find_or_download(name, tell=told.append)
    assert path.name == "yolov5s.pt" and path.read_bytes().startswith(b"yolov5s ")
    assert sum("AGPL-3.0" in text for text in told) == 1
    assert find_or_download("yolov5s", tell=told.append) == path and len(table.asked) == 1
    assert sum("AGPL-3.0" in text for text in told) == 1


@pytest.mark.parametrize("name", ["darknet-yolov3-tiny", "yolov3-tiny.weights"])
def test_darknets_weights_get_their_cfg_beside_them(name, table):
    path = find_or_download(name, tell=lambda text: None)
    assert path.name == "yolov3-tiny.weights"
    assert replace(read_cfg(path.with_suffix(".cfg")), name="x") == replace(
        preset("darknet-yolov3-tiny"), name="x"
    )
    path.with_suffix(".cfg").write_text("mine")
    find_or_download(name)
    assert path.with_suffix(".cfg").read_text() == "mine"


def test_a_file_that_a_person_put_into_the_cache_comes_first(table):
    folder = weights_catalogue.weights_folder()
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("yolov5s.safetensors", "yolov3-tiny.weights", "own.pt"):
        (folder / name).write_bytes(b"mine")
    assert find_or_download("yolov5s") == folder / "yolov5s.safetensors"
    assert find_or_download("own") == find_or_download("own.pt") == folder / "own.pt"
    assert find_or_download("darknet-yolov3-tiny").name == "yolov3-tiny.weights"
    # another network than Darknet's
    with pytest.raises(CheckpointError, match=r"cannot download yolov3-tiny\.pt"):
        find_or_download("yolov3-tiny")
    assert not table.asked


def test_weights_without_a_digest_are_not_downloaded_unless_a_person_gives_one(table):
    entry = weights_catalogue.entry_of("ppyoloe-s")
    assert entry is not None
    with pytest.raises(CheckpointError) as caught:
        find_or_download("ppyoloe-s")
    assert "no published digest" in caught.value.what and "Apache-2.0" in caught.value.what
    assert entry.item.urls[0] in caught.value.hint and not table.asked
    assert "yolofleet weights download ppyoloe-s --from FILE" in caught.value.hint
    digest = item_of(b"ppyoloe-s".ljust(1000)).digest
    assert digest is not None
    right = digest.split(":")[1]
    with pytest.raises(DownloadError, match=right):
        find_or_download("ppyoloe-s", sha256="0" * 64, tell=lambda text: None)
    path = find_or_download("ppyoloe-s", sha256=right, tell=lambda text: None)
    assert find_or_download("ppyoloe-s") == path == find_or_download("ppyoloe-s", sha256=right)
    with pytest.raises(DownloadError, match="is not the"):
        find_or_download("ppyoloe-s", sha256="1" * 64)


def test_a_digest_that_contradicts_the_table_is_refused(table):
    with pytest.raises(DownloadError, match="published digest of yolov5s"):
        find_or_download("yolov5s", sha256="0" * 64)
    for text in ("0" * 63, "g" * 64, "0x" + "0" * 62):
        with pytest.raises(ConfigError, match="is not a SHA-256"):
            find_or_download("yolov5s", sha256=text)
    assert not table.asked


def test_weights_got_by_hand_are_checked_and_put_under_their_name(table, tmp_path):
    mine = tmp_path / "Downloads"
    mine.write_bytes(b"yolov5n".ljust(1000))
    assert import_weights("yolov5n", mine) == find_or_download("yolov5n") and not table.asked
    with pytest.raises(DownloadError, match=r"not the published yolov5s\.pt"):
        import_weights("yolov5s", mine)
    assert import_weights("yolov3", mine).name == "yolov3.pt"  # no digest is known
    with pytest.raises(CheckpointError, match="is not a file"):
        import_weights("yolov3", tmp_path)


def test_without_network_the_message_says_what_to_do_by_hand(table, monkeypatch):
    monkeypatch.setenv("YOLOFLEET_OFFLINE", "1")
    with pytest.raises(DownloadError) as caught:
        find_or_download("yolov5s")
    for part in ("/yolov5s.pt", "1000 bytes", "sha256", str(weights_catalogue.weights_folder())):
        assert part in caught.value.hint
    assert not table.asked
