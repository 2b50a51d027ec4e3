"""Shards: the same data set as its folder, a tar file that other programs read, and no damage that is believed."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tarfile
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from small_data import write_picture

from yolofleet.data.datasets.convert import convert
from yolofleet.data.datasets.index import build_index
from yolofleet.data.datasets.pack import members_of, shard, unshard, write_list
from yolofleet.data.datasets.sources import load_dataset
from yolofleet.data.datasets.writers import Images
from yolofleet.data.images.decode import read_image
from yolofleet.data.input.cache import ImageCache
from yolofleet.storage.caches import INDEX
from yolofleet.storage.object_store import ObjectStore
from yolofleet.storage.shards import LIST, Stored, read_index
from yolofleet.support.errors import ConfigError, DataError, StorageError, YolofleetError

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="mirrors need file modes and locks")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "set"
    for split, count in (("train", 12), ("val", 5)):
        for number in range(count):
            write_picture(folder / "images" / split / f"{number:03d}.jpg", 64, 48, number)
            if number % 4:
                label = folder / "labels" / split / f"{number:03d}.txt"
                label.parent.mkdir(parents=True, exist_ok=True)
                label.write_text(f"{number % 2} 0.5 0.5 0.25 0.{number + 1}\n")
    (folder / "data.yaml").write_text("train: images/train\nval: images/val\nnames: [cat, dog]\n")
    return folder / "data.yaml"


def nothing(*_: object) -> None:
    pass


def shards_of(data: Path, size: int = 8000) -> Path:
    out = data.parent.parent / "shards"
    shard(str(data), str(out), size, nothing)
    return out


def files(folder: Path) -> dict[str, tuple[bytes, int]]:
    found = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in found}


def test_shards_are_the_same_data_set(data: Path):
    out = shards_of(data)
    assert len(list(out.glob("shard-*.tar"))) > 2
    for name in (str(out), f"file://{out}/data.yaml", f"file://{out}"):
        for split in ("train", "val"):
            theirs, ours = build_index(load_dataset(name), split), build_index(load_dataset(str(data)), split)
            assert theirs.digest == ours.digest
            for image in range(len(ours)):
                assert (read_image(theirs.path(image)) == read_image(ours.path(image))).all()
    assert load_dataset(str(out)).name == "shards" and load_dataset(str(out)).origin == str(out)


def test_they_come_out_as_they_went_in(data: Path, tmp_path: Path):
    assert unshard(str(shards_of(data)), str(tmp_path / "back"), nothing) == 30
    assert files(tmp_path / "back") == files(data.parent)
    with pytest.raises(ConfigError, match="not an empty folder"):
        unshard(str(tmp_path / "shards"), str(tmp_path / "back"), nothing)


@pytest.mark.parametrize("images", ["link", "symlink", "copy"])
def test_a_conversion_has_images_that_outlive_the_cache(data: Path, tmp_path: Path, images: Images):
    done = convert(load_dataset(str(shards_of(data))), tmp_path / "coco", "coco", images=images)
    assert done.folder == tmp_path / "coco"
    shutil.rmtree(tmp_path / "cache")
    found = sorted((tmp_path / "coco").rglob("*.jpg"))
    assert [path.read_bytes() for path in found] == [
        path.read_bytes() for path in sorted(data.parent.rglob("*.jpg"))
    ]


def test_they_can_be_packed_again(data: Path, tmp_path: Path):
    out = shards_of(data)
    shard(str(out), str(tmp_path / "again"), 8000, nothing)
    assert {k: v for k, (v, _) in files(tmp_path / "again").items()} == {
        k: v for k, (v, _) in files(out).items()
    }


def test_other_programs_read_them_as_samples(data: Path):
    together: dict[str, list[str]] = {}
    for path in sorted(shards_of(data).glob("shard-*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                suffix = Path(member.name).suffix
                together.setdefault(member.name.removesuffix(suffix), []).append(suffix)
                key = member.name.replace("images/", "labels/") if suffix == ".txt" else member.name
                file = tar.extractfile(member)
                assert file is not None and file.read() == (data.parent / key).read_bytes()
    assert together["images/train/001"] == [".jpg", ".txt"] and together["images/train/000"] == [".jpg"]
    assert list(together) == sorted(together)


def test_the_index_names_the_place_of_each_file(data: Path):
    out = shards_of(data)
    for path, about in read_index((out / INDEX).read_bytes(), "").items():
        content = (out / about.shard).read_bytes()[about.offset : about.offset + about.size]
        assert content == (data.parent / path).read_bytes()
        is_image = path.endswith(".jpg")
        assert (about.width, about.height) == ((64, 48) if is_image else (0, 0))
        assert about.shard.startswith("shard-" if is_image else "labels-")


def test_an_index_of_labels_reads_no_image(data: Path, monkeypatch: pytest.MonkeyPatch):
    (data.parent / "images" / "train" / "000.jpg").write_bytes(b"no image")
    out, asked = shards_of(data), list[str]()
    read = ObjectStore.read

    def recorded(store: ObjectStore, objects: Mapping[str, Stored]) -> dict[str, bytes]:
        asked.extend(objects)
        return read(store, objects)

    monkeypatch.setattr(ObjectStore, "read", recorded)
    index = build_index(load_dataset(str(out)), "train")
    assert [path for path in asked if path.startswith("images/")] == ["images/train/000.jpg"]
    assert [problem.kind for problem in index.problems] == ["image-unreadable"]
    assert index.digest == build_index(load_dataset(str(data)), "train").digest


def test_an_image_of_another_size_than_the_index_says_is_refused(data: Path):
    out = shards_of(data)
    lines = (out / INDEX).read_text().splitlines()
    at = next(at for at, line in enumerate(lines) if "images/train/003" in line)
    lines[at] = json.dumps([*json.loads(lines[at])[:6], 48, 64])
    (out / INDEX).write_bytes(damaged(lines, "none"))
    images = ImageCache(build_index(load_dataset(str(out)), "train"), 64, "none")
    images.get(0)
    with pytest.raises(DataError, match=r"003\.jpg has 64 x 48 pixels; the index has 48 x 64"):
        images.get(3)


def test_members_keep_long_and_foreign_names(data: Path, tmp_path: Path):
    odd = data.parent / "images" / "train" / ("Übung-猫 " + "n" * 120 + ".jpg")
    write_picture(odd)
    unshard(str(shards_of(data)), str(tmp_path / "back"), nothing)
    assert files(tmp_path / "back") == files(data.parent)


def test_only_a_label_of_an_image_takes_its_name():
    paths = ["images/a.png", "labels/a.txt", "labels/b.txt", "x/labels/a.txt", "notes.txt"]
    assert dict(members_of(paths)) == {
        "images/a.png": "images/a.png",
        "labels/a.txt": "images/a.txt",
        "labels/b.txt": "labels/b.txt",
        "x/labels/a.txt": "x/labels/a.txt",
        "notes.txt": "notes.txt",
    }


def test_a_link_out_of_the_folder_is_not_packed(data: Path, tmp_path: Path):
    (tmp_path / "private").write_text("secret")
    (data.parent / "images" / "train" / "link.jpg").symlink_to(tmp_path / "private")
    with pytest.raises(ConfigError, match="link"):
        shards_of(data)
    assert not (tmp_path / "shards").exists()


def test_a_data_set_in_several_folders_is_refused(data: Path, tmp_path: Path):
    other = tmp_path / "other"
    write_picture(other / "a.jpg")
    data.write_text(f"train: images/train\nval: {other}\nnames: [cat, dog]\n")
    with pytest.raises(ConfigError, match="which is not in"):
        shards_of(data)


@pytest.mark.parametrize(
    ("description", "reason"),
    [
        ("path: /etc\ntrain: images/train\n", "leads out"),
        ("path: ../..\ntrain: images/train\n", "leads out"),
        ("train: /etc\n", "leads out"),
        ("train: ../../images/train\n", "leads out"),
        ("train: s3://key:word@other/images\n", "address s3?://other|address other"),
        ("train: http://169.254.169.254/latest\n", "only an address that you type"),
        ("path: http://10.0.0.1/\ntrain: images/train\n", "only an address that you type"),
    ],
)
def test_a_description_in_a_store_names_its_own_files_only(data: Path, description: str, reason: str):
    data.write_text(f"{description}val: images/val\nnames: [cat, dog]\n")
    with pytest.raises(ConfigError, match=reason) as refused:
        load_dataset(f"file://{data}")
    assert "word" not in refused.value.render()


@pytest.mark.parametrize("outside", ["/etc/private.jpg", "../../private.jpg"])
def test_a_list_in_a_store_names_its_own_images_only(data: Path, outside: str):
    (data.parent / "train.txt").write_text(f"./images/train/000.jpg\n{outside}\n")
    data.write_text("train: train.txt\nval: images/val\nnames: [cat, dog]\n")
    with pytest.raises(DataError, match="outside of the data set"):
        build_index(load_dataset(f"file://{data}"), "train")


def test_a_description_on_a_disk_names_no_address(data: Path):
    data.write_text("train: https://internal/images\nval: images/val\nnames: [cat, dog]\n")
    with pytest.raises(ConfigError, match="only an address that you type"):
        load_dataset(str(data))


def damaged(lines: list[str], damage: str) -> bytes:
    """An index with one fault and a valid last line, unless that is the fault."""
    head, first = json.loads(lines[0]), json.loads(lines[1])
    end = json.loads(lines[-1])
    changes = {
        "above": lambda: first.__setitem__(0, "../evil"),
        "absolute": lambda: first.__setitem__(0, "/etc/passwd"),
        "control": lambda: first.__setitem__(0, "a\x1b[2J"),
        "no text": lambda: first.__setitem__(0, 7),
        "shard": lambda: first.__setitem__(1, 10**6),
        "negative": lambda: first.__setitem__(1, -2),
        "part of a file": lambda: (first.__setitem__(1, -1), first.__setitem__(2, 8)),
        "outside": lambda: first.__setitem__(2, 10**9),
        "huge": lambda: first.__setitem__(3, 1 << 40),
        "time": lambda: first.__setitem__(4, 1 << 80),
        "no width": lambda: first.append(0),
        "no size": lambda: first.extend([0, 48]),
        "wide": lambda: first.extend([1 << 31, 48]),
        "digest": lambda: first.__setitem__(5, "no digest"),
        "no digest": lambda: first.__setitem__(5, 64 * "g"),
        "short": lambda: first.pop(),
        "format": lambda: head.__setitem__("format", "another"),
        "shards": lambda: head.__setitem__("shards", {"a": 1}),
        "shard of a number": lambda: head["shards"].__setitem__(0, [5, 10]),
        "endless shard": lambda: head["shards"].__setitem__(0, ["a.tar", float("inf")]),
        "huge shard": lambda: (
            head["shards"].__setitem__(0, ["a.tar", 1 << 80]),
            first.__setitem__(2, 1 << 79),
        ),
        "no count": lambda: end.pop("files"),
        "shard above": lambda: head["shards"].__setitem__(0, ["../evil.tar", 10**9]),
        "twice": lambda: first.__setitem__(0, json.loads(lines[2])[0]),
        "count": lambda: end.__setitem__("files", 1),
    }
    changes.get(damage, nothing)()
    body = "".join(f"{line}\n" for line in [json.dumps(head), json.dumps(first), *lines[2:-1]])
    end["sha256"] = hashlib.sha256(body.encode()).hexdigest()
    whole = body + json.dumps(end) + "\n"
    others = {
        "cut": whole[:-100],
        "flipped": whole.replace("images", "imagez", 1),
        "empty": "",
        "no JSON": "{\n" + whole,
        "deep": "[" * 100000,
    }
    return others.get(damage, whole).encode()


DAMAGES = [
    *(
        "above",
        "absolute",
        "control",
        "no text",
        "shard",
        "negative",
        "part of a file",
        "outside",
        "huge",
        "time",
        "no width",
        "no size",
        "wide",
        "digest",
        "no digest",
    ),
    *(
        "short",
        "format",
        "shards",
        "shard above",
        "shard of a number",
        "endless shard",
        "huge shard",
        "no count",
        "twice",
        "count",
        "cut",
        "flipped",
        "empty",
        "no JSON",
        "deep",
    ),
]


def test_a_list_names_the_files_themselves(data: Path, tmp_path: Path):
    path, count = write_list(str(data), nothing)
    before = path.read_bytes()
    found = read_index(before, "")
    assert path == data.parent / LIST and count == len(found) == 30
    for key, about in found.items():
        content = (data.parent / key).read_bytes()
        assert (about.size, about.shard, about.offset) == (len(content), "", 0)
        assert about.digest == hashlib.sha256(content).hexdigest() and (about.width > 0) == key.endswith(
            ".jpg"
        )
    assert write_list(str(data), nothing)[0].read_bytes() == before  # it does not list itself
    with pytest.raises(ConfigError, match="not a folder of a disk"):
        write_list(str(shards_of(data)), nothing)
    assert LIST not in read_index((tmp_path / "shards" / INDEX).read_bytes(), "")


@pytest.mark.parametrize(
    "write", [lambda d, o: shard(d, o, 8000, nothing), lambda d, o: write_list(d, nothing)]
)
def test_a_name_that_no_index_can_have_is_refused(
    data: Path, tmp_path: Path, write: Callable[[str, str], object]
):
    (data.parent / "no\te.txt").write_text("x")
    with pytest.raises(DataError, match="has a name that not every disk can have") as refused:
        write(str(data), str(tmp_path / "out"))
    assert "\t" not in refused.value.render()
    assert not (tmp_path / "out").exists() and not (data.parent / LIST).exists()


def test_no_list_is_written_through_a_link(data: Path, tmp_path: Path):
    (tmp_path / "other").write_text("mine")
    (data.parent / LIST).symlink_to(tmp_path / "other")
    with pytest.raises(ConfigError, match="symbolic link"):
        write_list(str(data), nothing)
    assert (tmp_path / "other").read_text() == "mine"


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_or_hostile_index_is_refused(data: Path, damage: str):
    out = shards_of(data)
    lines = (out / INDEX).read_text().splitlines()
    assert damaged(lines, "none") == (out / INDEX).read_bytes()
    (out / INDEX).write_bytes(damaged(lines, damage))
    with pytest.raises(StorageError, match="damaged") as refused:
        load_dataset(str(out))
    assert "\x1b" not in refused.value.render()


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("[]", "its lines are not those of an index"),
        ("[1]", "its lines are not those of an index"),
        ('["a.txt",0,0,5,0,"' + 64 * "0" + '",1]', "its lines are not those of an index"),
        ('["a.txt",0,0,' + 5000 * "9" + ',0,"' + 64 * "0" + '"]', "its lines are not those of an index"),
        ("{}", "its lines are not those of an index"),
        ('["a.txt",0,0,50,0,"' + 64 * "0" + '"]', "a file lies outside its shard"),
    ],
)
def test_a_damaged_index_is_described_without_words_of_python(row: str, says: str):
    body = f'{{"format": "yolofleet shards 1", "shards": [["a.tar", 10]]}}\n{row}\n'
    end = json.dumps({"sha256": hashlib.sha256(body.encode()).hexdigest(), "files": 1})
    with pytest.raises(StorageError, match="x is damaged") as refused:
        read_index(f"{body}{end}\n".encode(), "x")
    assert refused.value.what == f"x is damaged: {says}"


def index_of_paths(*paths: str) -> bytes:
    """An index of a web server's files; they need not exist."""
    rows = [json.dumps([path, -1, 0, 4, 1_795_887_281_815_085_761, 64 * "0"]) for path in paths]
    body = "\n".join(['{"format": "yolofleet shards 1", "shards": []}', *rows, ""]).encode()
    end = json.dumps({"sha256": hashlib.sha256(body).hexdigest(), "files": len(paths)})
    return body + end.encode() + b"\n"


@pytest.mark.parametrize("parts", [513, 2000, 100_000])
def test_a_path_that_no_disk_can_have_makes_an_index_damaged(parts: int, tmp_path: Path):
    (tmp_path / INDEX).write_bytes(index_of_paths("data.yaml", "a/" * parts + "x.png"))
    with pytest.raises(StorageError, match=r"shards\.jsonl is damaged: its lines are not those of an index"):
        load_dataset(str(tmp_path))


def test_the_memory_of_an_index_grows_with_its_length():
    """Of each path all folders were kept: 131,000 characters for one of 1024."""
    content = index_of_paths(*(f"{number:03d}" + "/a" * 510 for number in range(200)))
    tracemalloc.start()
    try:
        found = read_index(content, "x")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(found) == 200 and peak < 10 * len(content)


def test_a_deep_path_of_an_index_can_be_read(tmp_path: Path):
    deep = "a/" * 500 + "x.png"
    (tmp_path / INDEX).write_bytes(index_of_paths("data.yaml", deep))
    (tmp_path / "data.yaml").write_bytes(b"a: 1")
    with pytest.raises(YolofleetError) as refused:  # the file is not the one that the index lists
        load_dataset(str(tmp_path))
    assert "recursion" not in refused.value.render() and "data.yaml" in refused.value.render()
    (tree,) = (tmp_path / "cache").glob("objects/*/tree")
    assert (tree / deep).is_file()


def test_an_empty_index_is_damaged(data: Path):
    out = shards_of(data)
    (out / INDEX).write_bytes(b"")
    with pytest.raises(StorageError, match=r"shards\.jsonl is damaged: it is empty"):
        load_dataset(str(out))
    assert not list((data.parent.parent / "cache" / "objects").glob("*/tree/*"))


def test_a_flipped_bit_in_a_shard_is_never_read(data: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("yolofleet.storage.object_store.DAMAGED_TRIES", 1)
    out = shards_of(data)
    about = read_index((out / INDEX).read_bytes(), "")["images/train/003.jpg"]
    whole = (out / about.shard).read_bytes()
    at = about.offset + about.size // 2
    (out / about.shard).write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    images = ImageCache(build_index(load_dataset(str(out)), "train"), 64, "none")
    with pytest.raises(StorageError, match=r"images/train/003\.jpg"):
        images.get(3)
    (out / about.shard).write_bytes(whole)
    assert (
        build_index(load_dataset(str(out)), "train").digest
        == build_index(load_dataset(str(data)), "train").digest
    )
