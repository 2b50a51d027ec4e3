"""The files of a store on this machine: what a reader gets, also after the next read, update, fault or lack of space."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from yolofleet.storage import mirror as mirrors
from yolofleet.storage import object_store
from yolofleet.storage.caches import DISK_CACHE
from yolofleet.storage.foreign import read_foreign
from yolofleet.storage.mirror import local_path
from yolofleet.storage.mirrored import download, listed_by_store
from yolofleet.storage.object_store import check_address, folder_of, reason, without_secrets
from yolofleet.support.errors import ConfigError, StorageError

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="mirrors need file modes and locks")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A folder that stands for a bucket; fsspec lists and reads it."""
    folder = tmp_path / "store"
    for number in range(20):
        path = folder / f"part {number % 3}" / f"{number:03d}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([number]) * (1000 + number))
        os.utime(path, ns=(0, 10**18 + 1000 * number))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """What a user of the mirror reads."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): read_foreign(path, limit_bytes=1 << 20) for path in files}


def plain(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def here(tree: Path) -> int:
    """How many contents are on this machine."""
    return sum(
        stat.S_IMODE(path.stat().st_mode) == mirrors.PRESENT for path in tree.rglob("*") if path.is_file()
    )


def test_names_sizes_and_times_come_first_and_contents_when_read(store: Path):
    tree = local_path(f"file://{store}")
    listed = {
        p.relative_to(tree): (p.stat().st_size, p.stat().st_mtime_ns) for p in tree.rglob("*") if p.is_file()
    }
    assert listed == {
        p.relative_to(store): (p.stat().st_size, p.stat().st_mtime_ns)
        for p in store.rglob("*")
        if p.is_file()
    }
    assert here(tree) == 0
    one = tree / "part 0" / "000.bin"
    assert read_foreign(one, limit_bytes=2000) == bytes(1000) and here(tree) == 1
    assert contents(tree) == plain(store) and here(tree) == 20
    assert one.stat().st_mtime_ns == 10**18  # reading changes no time that an index depends on


def test_an_update_keeps_what_has_not_changed(store: Path, monkeypatch: pytest.MonkeyPatch):
    tree = local_path(f"file://{store}")
    before = contents(tree)
    (store / "part 0" / "000.bin").write_bytes(b"another")
    (store / "part 1" / "001.bin").unlink()
    (store / "part 1" / "001.bin").mkdir()
    (store / "part 1" / "001.bin" / "new").write_bytes(b"new")
    assert local_path(f"file://{store}") == tree and here(tree) == 18
    assert contents(tree) == plain(store) != before
    monkeypatch.setattr(object_store.ObjectStore, "read", None)  # nothing is read again
    assert local_path(f"file://{store}") == tree and contents(tree) == plain(store)


def test_many_are_brought_together(store: Path):
    tree = local_path(f"file://{store}")
    paths = [str(path) for path in tree.rglob("*") if path.is_file()]
    assert download(paths) == 20 == here(tree) and download(paths) == 0
    assert contents(tree) == plain(store)
    assert download([str(path) for path in store.rglob("*")]) == 0  # files of the user are not of a mirror


def test_contents_give_way_and_come_back(store: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(DISK_CACHE, "5.0KB")
    tree = local_path(f"file://{store}")
    for _ in range(3):
        assert contents(tree) == plain(store)
        assert 1 <= here(tree) <= 5
    last = sorted(path for path in tree.rglob("*") if path.is_file())[-1]
    assert stat.S_IMODE(last.stat().st_mode) == mirrors.PRESENT  # the first to go was read longest ago
    monkeypatch.setenv(DISK_CACHE, "1GiB")
    assert contents(tree) == plain(store) and here(tree) == 20


def test_a_file_larger_than_a_group_is_copied(store: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mirrors, "AT_ONCE_BYTES", 1010)
    tree = local_path(f"file://{store}")
    assert download([str(path) for path in tree.rglob("*") if path.is_file()]) == 20
    assert contents(tree) == plain(store)


@pytest.mark.parametrize("damage", ["longer", "shorter", "gone"])
def test_an_object_that_is_not_the_listed_one_is_refused_and_leaves_nothing(
    store: Path, damage: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(object_store, "DAMAGED_TRIES", 1)
    tree = local_path(f"file://{store}")
    victim, whole = store / "part 0" / "000.bin", (store / "part 0" / "000.bin").read_bytes()
    if damage == "gone":
        victim.unlink()
    else:
        victim.write_bytes(whole + b"x" if damage == "longer" else whole[:-1])
    with pytest.raises(StorageError, match=r"part 0/000\.bin"):
        read_foreign(tree / "part 0" / "000.bin", limit_bytes=2000)
    assert here(tree) == 0 and not list(tree.parent.glob("new-*"))
    victim.write_bytes(whole)
    assert read_foreign(tree / "part 0" / "000.bin", limit_bytes=2000) == whole


def test_contents_are_compared_after_a_new_start_of_the_machine(store: Path):
    from yolofleet.data.datasets.pack import write_shards

    shards = store.parent / "shards"
    shards.mkdir()
    write_shards([("a.bin", "a.bin", store / "part 0" / "000.bin")], shards, 10**6, lambda file: None)
    tree = local_path(f"file://{shards}")
    assert contents(tree) == {"a.bin": bytes(1000)}
    about = (tree / "a.bin").stat()
    (tree / "a.bin").chmod(0o600)
    (tree / "a.bin").write_bytes(b"\1" * 1000)  # what a disk may hold after a power failure
    (tree / "a.bin").chmod(mirrors.PRESENT)
    os.utime(tree / "a.bin", ns=(about.st_atime_ns, about.st_mtime_ns))
    (tree.parent / "boot").write_text("another")
    assert contents(local_path(f"file://{shards}")) == {"a.bin": bytes(1000)}


@pytest.mark.parametrize("name", ["b[1].bin", "c*.bin", "d?.bin", "e#1%20.bin"])
def test_a_name_is_no_pattern(store: Path, name: str):
    (store / name).write_bytes(b"content")
    (store / "b1.bin").write_bytes(b"another")
    tree = local_path(f"file://{store}")
    assert read_foreign(tree / name, limit_bytes=100) == b"content"


def test_a_damaged_table_is_a_message_and_is_made_again(store: Path):
    tree = local_path(f"file://{store}")
    paths = [str(path) for path in tree.rglob("*") if path.is_file()]
    (tree.parent / "files.sqlite").write_bytes(b"damaged")
    for read in (listed_by_store, mirrors.read_anew, download):
        with pytest.raises(StorageError, match=r"files\.sqlite"):
            read(paths)
    local_path(f"file://{store}")
    assert download(paths) == len(paths)


def test_two_processes_read_each_object_once(store: Path, tmp_path: Path):
    tree = local_path(f"file://{store}")
    script = f"""
import sys, time
from collections.abc import Iterator
from pathlib import Path
from yolofleet.storage.mirrored import download
from yolofleet.storage.object_store import ObjectStore
read = ObjectStore.read
def slow(self, objects):
    with open({str(tmp_path / "log")!r}, "a") as log:
        log.write("".join(f"{{key}}\\n" for key in objects))
    time.sleep(0.5)
    return read(self, objects)
ObjectStore.read = slow
download([str(path) for path in Path({str(tree)!r}).rglob("*") if path.is_file()])
"""
    processes = [subprocess.Popen([sys.executable, "-c", script]) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert sorted((tmp_path / "log").read_text().splitlines()) == sorted(plain(store))
    assert here(tree) == 20 and contents(tree) == plain(store)


def test_a_process_that_is_killed_leaves_no_half_content(store: Path):
    tree = local_path(f"file://{store}")
    script = f"""
import os, signal
from collections.abc import Iterator
from pathlib import Path
from yolofleet.storage.mirrored import download
write, count = Path.write_bytes, 0
def killed(path, content):
    global count
    count += 1
    write(path, content[:10] if count == 5 else content)
def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)
Path.write_bytes = killed
os.utime, utime = (lambda *a, **k: kill() if count == 5 else utime(*a, **k)), os.utime
download([str(path) for path in Path({str(tree)!r}).rglob("*") if path.is_file()])
"""
    assert subprocess.run([sys.executable, "-c", script]).returncode == -9
    assert here(tree) == 4
    assert contents(tree) == plain(store)
    (leftover,) = tree.parent.glob("new-*")
    os.utime(leftover)
    local_path(f"file://{store}")
    assert leftover.exists()  # another process may be writing it
    mirrors._STALE_S, kept = -1.0, mirrors._STALE_S
    try:
        local_path(f"file://{store}")
    finally:
        mirrors._STALE_S = kept
    assert not leftover.exists() and contents(tree) == plain(store)


def test_keys_that_are_no_paths_are_left_out(store: Path, capsys: pytest.CaptureFixture[str]):
    (store / "part 0" / "back\\slash").write_bytes(b"x")
    (store / "part 0" / "new\nline").write_bytes(b"x")
    tree = local_path(f"file://{store}")
    assert len(contents(tree)) == 20
    said = capsys.readouterr()
    assert "2 objects are left out" in said.out + said.err and "new\nline" not in said.out + said.err


def test_links_to_contents_and_to_the_cache_lead_to_contents(store: Path, cache: Path, tmp_path: Path):
    (tmp_path / "elsewhere").mkdir()
    cache.symlink_to(tmp_path / "elsewhere")
    tree = local_path(f"file://{store}")
    (tmp_path / "link").symlink_to(tree / "part 0" / "000.bin")
    (tmp_path / "folder").symlink_to(tree)
    assert read_foreign(tmp_path / "link", limit_bytes=2000) == bytes(1000)
    assert contents(cache / tree.relative_to((tmp_path / "elsewhere").resolve())) == plain(store)
    assert contents(tmp_path / "folder") == plain(store)


def test_files_of_the_user_with_the_same_modes_are_read_as_they_are(tmp_path: Path):
    for mode in (mirrors.PRESENT, mirrors.ABSENT):
        (tmp_path / "mine").write_bytes(b"mine")
        (tmp_path / "mine").chmod(mode)
        assert read_foreign(tmp_path / "mine", limit_bytes=10) == b"mine"
        (tmp_path / "mine").unlink()


@pytest.mark.parametrize(
    "address",
    [
        "s3://key:hush@bucket/data.yaml",
        "s3://bucket/data.yaml?token=hush",
        "s3://bucket/data.yaml#hush",
        "https://user:hush@host/set",
    ],
)
def test_an_address_with_a_secret_is_refused_without_showing_it(address: str):
    with pytest.raises(ConfigError, match="credentials belong") as refused:
        check_address(address)
    assert "hush" not in refused.value.render()


@pytest.mark.parametrize(
    "address",
    [
        "ftp://host/a",
        "s3://bucket/../a",
        "s3:///a",
        "s3://bucket//a",
        "s3://bucket/a\x1b[2J",
        "file://host/a",
        "s3://",
    ],
)
def test_an_address_that_is_not_plain_is_refused(address: str):
    with pytest.raises(ConfigError) as refused:
        check_address(address)
    assert "\x1b" not in refused.value.render()


@pytest.mark.parametrize("refused", [PermissionError(None), OSError(errno.EINVAL, None)])
def test_a_refusal_without_a_message_is_told_by_its_code(refused: OSError):
    answer = {"Error": {"Code": "SignatureDoesNotMatch", "Message": None}}  # of Ceph's radosgw
    refused.__cause__ = type("ClientError", (Exception,), {"response": answer})()
    assert reason(refused) == "SignatureDoesNotMatch"


def test_the_secrets_of_an_address_are_not_shown():
    assert without_secrets("s3://key:word@bucket/a/data.yaml?x=y#z") == "s3://bucket/a/data.yaml"


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("s3://bucket/coco/data.yaml", ("s3://bucket/coco", "data.yaml")),
        ("s3://bucket/coco", ("s3://bucket/coco", "")),
        ("s3://bucket/v1.5/", ("s3://bucket/v1.5", "")),
        ("s3://my.bucket", ("s3://my.bucket", "")),
        ("s3://bucket/data.yaml", ("s3://bucket", "data.yaml")),
    ],
)
def test_a_last_part_with_a_suffix_names_a_file(address: str, parts: tuple[str, str]):
    assert folder_of(address) == parts


def test_offline_forbids_stores_but_not_those_of_this_machine(store: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("YOLOFLEET_OFFLINE", "1")
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    with pytest.raises(ConfigError, match="needs a connection"):
        local_path("s3://bucket/coco")
    with pytest.raises(ConfigError, match="needs a connection"):
        local_path("https://example.org/coco")
    assert contents(local_path(f"file://{store}")) == plain(store)


def test_a_disk_without_modes_is_refused(store: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "fchmod", lambda *_: None)
    with pytest.raises(StorageError, match="does not keep the modes"):
        local_path(f"file://{store}")


def test_an_empty_or_missing_address_is_named(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    for name in ("empty", "absent", "absent/data.yaml"):
        with pytest.raises(ConfigError, match="does not exist"):
            local_path(f"file://{tmp_path / name}")


# -- a store that changes while a process reads its files ------------------------------------------------------

READER = """
import sys
from collections.abc import Iterator
from pathlib import Path
from yolofleet.storage.foreign import read_foreign
from yolofleet.storage.mirror import local_path
tree = local_path(sys.argv[1])
print(tree, flush=True)
for name in sys.stdin:
    print(read_foreign(tree / name.strip(), limit_bytes=1 << 20)[:7].hex(), flush=True)
"""


class Reader:
    """Another process that reads the files of a store until it is ended."""

    def __init__(self, address: str) -> None:
        command = [sys.executable, "-c", READER, address]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.tree = Path(self._answer())

    def _answer(self) -> str:
        assert self.process.stdout is not None
        while (line := self.process.stdout.readline()).startswith("note:"):
            pass
        return line.strip()

    def read(self, name: str) -> bytes:
        assert self.process.stdin is not None
        print(name, file=self.process.stdin, flush=True)
        return bytes.fromhex(self._answer())

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def reader(store: Path) -> Iterator[Reader]:
    reading = Reader(f"file://{store}")
    yield reading
    reading.kill()


def trees(cache: Path) -> list[Path]:
    return sorted(tree for tree in (cache / "objects").glob("*/tree") if any(tree.iterdir()))


def test_files_of_a_reader_stay_when_the_store_changes(store: Path, cache: Path, reader: Reader):
    old, kept = "part 0/000.bin", "part 1/001.bin"
    assert reader.read(old) == bytes(7) and reader.read(kept) == b"\1" * 7
    (store / old).write_bytes(b"another")
    (store / "part 2/002.bin").unlink()
    tree = local_path(f"file://{store}")  # what any other command does
    assert tree != reader.tree and trees(cache) == sorted([tree, reader.tree])
    assert reader.read(old) == bytes(7) and (reader.tree / "part 2/002.bin").exists()
    assert (tree / kept).samefile(reader.tree / kept)  # the disk has it once, and it is not read again
    assert contents(tree) == plain(store)
    assert reader.read("part 1/004.bin") == b"\4" * 7  # not yet here then, and unchanged in the store


def test_a_reader_of_the_same_store_gets_the_same_files(store: Path, cache: Path, reader: Reader):
    assert local_path(f"file://{store}") == reader.tree and trees(cache) == [reader.tree]


def test_files_that_nobody_reads_any_more_are_deleted(store: Path, cache: Path, reader: Reader):
    (store / "part 0/000.bin").write_bytes(b"another")
    tree = local_path(f"file://{store}")
    reader.kill()  # its lock dies with it
    assert local_path(f"file://{store}") == tree and trees(cache) == [tree]
    (store / "part 0/000.bin").write_bytes(b"a third")
    assert local_path(f"file://{store}") == tree and trees(cache) == [tree]  # this process alone reads it
    assert contents(tree) == plain(store)


def test_a_generation_that_a_killed_update_has_left_is_made_again(store: Path, cache: Path, reader: Reader):
    half = reader.tree.parent.with_name(f"{reader.tree.parent.name}-2")
    (half / "tree").mkdir(parents=True)
    (half / "tree" / "wrong").write_bytes(b"wrong")
    (store / "part 0/000.bin").write_bytes(b"another")
    assert local_path(f"file://{store}") == half / "tree" and contents(half / "tree") == plain(store)


def test_generations_share_the_limit_of_the_disk(
    store: Path, cache: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(DISK_CACHE, "5.0KB")
    contents(reader.tree)
    (store / "part 0/000.bin").write_bytes(b"another")
    tree = local_path(f"file://{store}")
    for _ in range(2):
        assert contents(tree) == plain(store)
        found = {path.stat().st_ino: path.stat() for root in trees(cache) for path in root.rglob("*.bin")}
        here_bytes = sum(
            one.st_size for one in found.values() if stat.S_IMODE(one.st_mode) == mirrors.PRESENT
        )
        assert 1000 <= here_bytes <= 5000
        assert reader.read("part 1/001.bin") == b"\1" * 7


def test_the_files_of_a_run_that_goes_on_follow_the_store(store: Path, cache: Path):
    tree = local_path(f"file://{store}", may_change=True)
    code = "import sys; from yolofleet.storage.mirror import local_path; print(local_path(sys.argv[1], may_change=True))"
    (store / "part 0/000.bin").write_bytes(b"another")
    done = subprocess.run(
        [sys.executable, "-c", code, f"file://{store}"], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == str(tree) and contents(tree) == plain(store)
