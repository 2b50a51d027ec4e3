"""Archives that are right, wrong and hostile."""

from __future__ import annotations

import gzip
import io
import stat
import struct
import tarfile
import zipfile
from collections import namedtuple
from contextlib import nullcontext
from pathlib import Path

import pytest

from yolofleet.data.datasets import archive as archives
from yolofleet.data.datasets.archive import unpack
from yolofleet.support.errors import DataError, StorageError

GOOD = {
    "set/images/a.jpg": b"a" * 1000,
    "set/images/b.jpg": b"",
    "set/labels/a.txt": b"0 .5 .5 1 1\n",
    "set/x": b"x" * 512,
}
KINDS = ("zip", "tar", "tar.gz")


def make(path: Path, files: dict[str, bytes], kind: str) -> Path:
    path = path / f"archive.{kind}"
    if kind == "zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
            for name, content in files.items():
                file.writestr(zipfile.ZipInfo(name) if name.endswith("/") else name, content)
        return path
    with tarfile.open(path, "w:gz" if kind == "tar.gz" else "w") as file:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            info.type = tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
            file.addfile(info, io.BytesIO(content))
    return path


def tar_of(path: Path, *members: tarfile.TarInfo) -> Path:
    with tarfile.open(path / "archive.tar", "w") as file:
        for info in members:
            file.addfile(info)
    return path / "archive.tar"


def found(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


def refusal(archive: Path, folder: Path, *, strip: str = "") -> str:
    """Fails with one message; nothing is left in ``folder``."""
    before = found(folder)
    with pytest.raises(DataError) as caught:
        unpack(archive, folder, strip=strip)
    assert found(folder) == before and not list(folder.glob(".unpacking*"))
    assert caught.value.exit_code == 3 and str(archive) in caught.value.what
    return caught.value.what


@pytest.mark.parametrize("kind", KINDS)
def test_files_come_out_below_the_folder_with_the_usual_permissions(kind, tmp_path):
    archive = make(tmp_path, {"set/": b"", "set/images/": b"", **GOOD}, kind)
    out = tmp_path / "out put"
    assert unpack(archive, out, strip="set") == 4
    assert found(out) == {name.removeprefix("set/"): content for name, content in GOOD.items()}
    assert [p.name for p in out.iterdir() if p.name[0] == "."] == []
    plain = tmp_path / "plain"
    plain.mkdir()
    assert stat.S_IMODE((out / "images").stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


@pytest.mark.parametrize("kind", KINDS)
def test_unpacking_again_changes_nothing_and_other_files_stay(kind, tmp_path):
    archive, out = make(tmp_path, GOOD, kind), tmp_path / "out"
    (out / "set" / "images").mkdir(parents=True)
    (out / "set" / "images" / "mine.jpg").write_bytes(b"mine")
    for _ in range(2):
        unpack(archive, out)
        assert found(out) == {**GOOD, "set/images/mine.jpg": b"mine"}


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_that_exists_is_overwritten(kind, tmp_path):
    archive, out = make(tmp_path, GOOD, kind), tmp_path / "out"
    (out / "set" / "images").mkdir(parents=True)
    (out / "set" / "images" / "a.jpg").write_bytes(b"mine")
    assert "would overwrite" in refusal(archive, out)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name",
    [
        "../evil", "a/../../evil", "/etc/evil", "//evil", "..", "a/..", "C:/evil", "C:evil", "a\\..\\evil", "a/b:c",
        "a\n", "\x1b[31m", "a" * 1001, "/".join("a" * 40), "nul", "a/COM1.txt", "a. /b", "a./b", "a?", "|rm",
    ],
)  # fmt: skip
def test_names_that_leave_the_folder_or_fool_a_system_are_refused(kind, name, tmp_path):
    archive = make(tmp_path, {**GOOD, name: b"evil"}, kind)
    said = refusal(archive, tmp_path / "in" / "out")
    assert "unsafe name" in said and len(said) < 600 and said.isprintable()
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {archive.name}


@pytest.mark.parametrize("kind", KINDS)
def test_members_outside_what_is_stripped_are_refused_and_litter_is_left_out(kind, tmp_path):
    litter = {"__MACOSX/set/._a": b"x", "set/.DS_Store": b"x"}
    unpack(make(tmp_path, {**GOOD, **litter}, kind), tmp_path / "out", strip="set")
    assert len(found(tmp_path / "out")) == 4
    assert "outside set" in refusal(
        make(tmp_path, {**GOOD, "other": b""}, kind), tmp_path / "out2", strip="set"
    )


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE]
)
def test_links_and_devices_in_a_tar_are_refused(kind, tmp_path):
    info = tarfile.TarInfo("link")
    info.type, info.linkname = kind, "/etc/passwd"
    assert "link or device" in refusal(tar_of(tmp_path, info), tmp_path / "out")


@pytest.mark.parametrize("mode", [stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR, stat.S_IFSOCK])
def test_links_and_devices_in_a_zip_are_refused(mode, tmp_path):
    info = zipfile.ZipInfo("link")
    info.external_attr = (mode | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as file:
        file.writestr(info, "/etc/passwd")
    assert "link or device" in refusal(tmp_path / "archive.zip", tmp_path / "out")


def test_a_link_that_a_person_made_is_followed_but_none_comes_out_of_an_archive(tmp_path):
    (tmp_path / "big disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "big disk")
    unpack(make(tmp_path, GOOD, "zip"), tmp_path / "out")
    assert found(tmp_path / "big disk") == GOOD


@pytest.mark.parametrize("kind", ["zip", "tar.gz"])
def test_a_bomb_is_noticed_before_it_fills_the_disk(kind, tmp_path):
    bomb = make(tmp_path, {f"{i}": bytes(1 << 20) for i in range(40)}, kind)
    assert bomb.stat().st_size < 100_000
    assert "more than 30 times its size" in refusal(bomb, tmp_path / "out")


def test_a_bomb_in_headers_of_a_tar_is_noticed(tmp_path):
    long = tarfile.TarInfo("././@LongLink")
    long.type, long.size = tarfile.GNUTYPE_LONGNAME, 1 << 33
    path = tmp_path / "archive.tar.gz"
    with gzip.open(path, "wb") as file:
        file.write(long.tobuf(tarfile.GNU_FORMAT) + bytes(1 << 20))
    problem = refusal(path, tmp_path / "out")
    assert "header that is too long" in problem or "damaged" in problem  # Python 3.14 notices it first


def test_a_sparse_member_is_refused(tmp_path):
    info = tarfile.TarInfo("holes")
    info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(1 << 40)}
    content = b"1\n0\n1\n" + bytes(506)
    info.size = len(content)
    with tarfile.open(tmp_path / "archive.tar", "w", format=tarfile.PAX_FORMAT) as file:
        file.addfile(info, io.BytesIO(content))
    refusal(tmp_path / "archive.tar", tmp_path / "out")


def test_a_size_that_a_zip_states_wrongly_is_noticed(tmp_path):
    archive = make(tmp_path, {"a": b"x" * 1000}, "zip")
    content = bytearray(archive.read_bytes())
    for size in (10, 5000):
        at = content.rindex(b"PK\1\2") + 24  # uncompressed size in the directory
        content[at : at + 4] = struct.pack("<I", size)
        archive.write_bytes(content)
        refusal(archive, tmp_path / "out")


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_name_twice_is_refused(kind, tmp_path):
    with pytest.warns(UserWarning) if kind == "zip" else nullcontext():
        pair = _twice(tmp_path, kind)
    assert "twice" in refusal(pair, tmp_path / "out")


def _twice(folder: Path, kind: str) -> Path:
    path = folder / f"archive.{kind}"
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("a", "1")
            file.writestr("a", "2")
    else:
        with tarfile.open(path, "w:gz" if kind == "tar.gz" else "w") as file:
            for content in (b"1", b"2"):
                info = tarfile.TarInfo("a")
                info.size = 1
                file.addfile(info, io.BytesIO(content))
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_where_a_folder_must_be_is_refused(kind, tmp_path):
    assert "twice" in refusal(make(tmp_path, {"a": b"1", "a/b": b"2"}, kind), tmp_path / "out")

    # a tar has no checksum of contents, so a flipped byte in one passes: digests are compared before


def test_an_encrypted_or_oddly_packed_zip_is_refused(tmp_path):
    for method in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        with zipfile.ZipFile(tmp_path / "x.zip", "w", method) as file:
            file.writestr("a", "x" * 1000)
        assert "has an unsupported compression" in refusal(tmp_path / "x.zip", tmp_path / "out")
    archive = make(tmp_path, {"a": b"x"}, "zip")
    content = bytearray(archive.read_bytes())
    content[content.rindex(b"PK\1\2") + 8] |= 1
    archive.write_bytes(content)
    assert "encrypted" in refusal(archive, tmp_path / "out")


@pytest.mark.parametrize("kind", KINDS)
def test_too_little_space_is_said_and_nothing_is_left(kind, tmp_path, monkeypatch):
    archive, out = make(tmp_path, GOOD, kind), tmp_path / "out"
    Usage = namedtuple("Usage", "total used free")
    monkeypatch.setattr(archives.shutil, "disk_usage", lambda path: Usage(1, 1, archives.SPARE_BYTES + 1200))
    with pytest.raises(StorageError, match="are free"):
        unpack(archive, out)
    assert list(out.iterdir()) == []


def test_a_missing_archive_and_a_folder_that_is_a_file_are_said(tmp_path):
    with pytest.raises(StorageError):
        unpack(tmp_path / "absent.zip", tmp_path / "out")
    archive = make(tmp_path, GOOD, "zip")
    with pytest.raises(StorageError):
        unpack(archive, archive / "below")
