"""Shards: the same data set as its folder, a tar file that other programs read, and no damage that is believed."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tarfile
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from label_rows import index_of
from small_data import write_picture

from yolofleet.data.datasets.convert import convert
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
            theirs, ours = index_of(name, split), index_of(data, split)
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
    index = index_of(out)
    assert [path for path in asked if path.startswith("images/")] == ["images/train/000.jpg"]
    assert [problem.kind for problem in index.problems] == ["image-unreadable"]
    assert index.digest == index_of(data).digest


def test_an_image_of_another_size_than_the_index_says_is_refused(data: Path):
    out = shards_of(data)
    lines = (out / INDEX).read_text().splitlines()
    at = next(at for at, line in enumerate(lines) if "images/train/003" in line)
    lines[at] = json.dumps([*json.loads(lines[at])[:6], 48, 64])
    (out / INDEX).write_bytes(sealed(*lines[:-1]))
    images = ImageCache(index_of(out), 64, "none")
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
        index_of(f"file://{data}")


def test_a_description_on_a_disk_names_no_address(data: Path):
    data.write_text("train: https://internal/images\nval: images/val\nnames: [cat, dog]\n")
    with pytest.raises(ConfigError, match="only an address that you type"):
        load_dataset(str(data))


def test_a_list_names_the_files_themselves(data: Path, tmp_path: Path):
    path, count = write_list(str(data), nothing)
    before = path.read_bytes()
    found = read_index(before, "")
    assert path == data.parent / LIST and count == len(found) == 30
    for key, about in found.items():
        content = (data.parent / key).read_bytes()
        assert (about.size, about.shard, about.offset) == (len(content), "", 0)
        assert about.digest == hashlib.sha256(content).hexdigest()
        assert (about.width > 0) == key.endswith(".jpg")
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


DIGEST = 64 * "0"
HEAD = {"format": "yolofleet shards 1", "shards": [["a.tar", 1000]]}
ROW, OTHER = (["images/a.jpg", 0, 0, 100, 7, DIGEST, 64, 48], ["images/b.jpg", 0, 100, 100, 7, DIGEST])


def sealed(*lines: Any, **end: Any) -> bytes:
    """An index of these lines, as values or as text, and the last line that belongs to them but for ``end``."""
    body = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    last = {"sha256": hashlib.sha256(body.encode()).hexdigest(), "files": len(lines) - 1} | end
    return f"{body}{json.dumps(last)}\n".encode()


def damaged_indexes() -> Iterator[bytes]:
    """Indexes with one fault each; the last line is right unless it has the fault."""
    fields: dict[int, list[Any]] = {
        0: ["../evil", "/etc/passwd", "a\x1b[2J", 7, OTHER[0]],
        1: [10**6, -2],
        2: [10**9],
        3: [1 << 40],
        4: [1 << 80],
        5: ["no digest", 64 * "g"],
        6: [0, 1 << 31],
    }
    for place, values in fields.items():
        for value in values:
            yield sealed(HEAD, [*ROW[:place], value, *ROW[place + 1 :]], OTHER)
    for row in (ROW[:5], ROW[:7], ["images/a.jpg", -1, 8, *ROW[3:]]):  # the last is a part of a file
        yield sealed(HEAD, row, OTHER)
    for shards in ({"a": 1}, [[5, 1000]], [["a.tar", float("inf")]], [["../evil.tar", 1000]]):
        yield sealed(HEAD | {"shards": shards}, ROW, OTHER)
    yield sealed(HEAD | {"shards": [["a.tar", 1 << 80]]}, [*ROW[:2], 1 << 79, *ROW[3:]], OTHER)
    yield sealed(HEAD | {"format": "another"}, ROW, OTHER)
    whole = sealed(HEAD, ROW, OTHER)
    yield from (sealed(HEAD, ROW, OTHER, files=1), whole.replace(b"files", b"fools"), whole[:-100])
    yield from (whole.replace(b"images", b"imagez", 1), b"", b"{\n" + whole, b"[" * 100_000)


def test_a_damaged_or_hostile_index_is_refused():
    assert list(read_index(sealed(HEAD, ROW, OTHER), "x")) == ["images/a.jpg", "images/b.jpg"]
    for content in damaged_indexes():
        with pytest.raises(StorageError, match="damaged") as refused:
            read_index(content, "x")
        assert "\x1b" not in refused.value.render(), content[:300]


@pytest.mark.parametrize(
    "row", ["[]", "[1]", "{}", [*ROW[:6], 1], f'["a.txt",0,0,{5000 * "9"},0,"{DIGEST}"]']
)
def test_a_damaged_index_is_described_without_words_of_python(row: Any):
    with pytest.raises(StorageError) as refused:
        read_index(sealed(HEAD, row), "x")
    assert refused.value.what == "x is damaged: its lines are not those of an index"
    with pytest.raises(StorageError, match="x is damaged: a file lies outside its shard"):
        read_index(sealed(HEAD, [*ROW[:3], 1001, *ROW[4:]]), "x")


def index_of_paths(*paths: str) -> bytes:
    """An index of a web server's files; they need not exist."""
    rows = ([path, -1, 0, 4, 1_795_887_281_815_085_761, DIGEST] for path in paths)
    return sealed({"format": "yolofleet shards 1", "shards": []}, *rows)


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
    images = ImageCache(index_of(out), 64, "none")
    with pytest.raises(StorageError, match=r"images/train/003\.jpg"):
        images.get(3)
    (out / about.shard).write_bytes(whole)
    assert index_of(out).digest == index_of(data).digest
