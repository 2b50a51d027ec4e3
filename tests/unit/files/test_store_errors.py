"""Errors of stores and of the disk of the cache: which object they name, which of them are final, and what to do."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import called, environment
from terminal import pseudo_terminal

from yolofleet.data.datasets.pack import shard
from yolofleet.data.datasets.sources import load_dataset
from yolofleet.storage import mirror as mirrors
from yolofleet.storage import object_store
from yolofleet.storage.atomic import storage_error
from yolofleet.storage.caches import INDEX
from yolofleet.storage.foreign import read_foreign
from yolofleet.storage.mirror import local_path
from yolofleet.storage.mirrored import download
from yolofleet.storage.object_store import ObjectStore
from yolofleet.storage.request import Refused, check_redirect, may_pass
from yolofleet.storage.shards import read_index
from yolofleet.support.errors import ConfigError, StorageError

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="mirrors need file modes and locks")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def folder_of_files(folder: Path, count: int) -> Path:
    folder.mkdir()
    for number in range(count):
        (folder / f"{number:04d}.bin").write_bytes(bytes([number % 256]) * 100)
    return folder


# -- which object


@pytest.mark.parametrize("damage", ["gone", "longer"])
def test_an_error_names_the_object_that_is_wrong_and_not_the_first_of_its_group(tmp_path: Path, damage: str):
    store = folder_of_files(tmp_path / "store", 20)
    tree = local_path(f"file://{store}")
    victim = store / "0013.bin"
    if damage == "gone":
        victim.unlink()
    else:
        victim.write_bytes(bytes(101))
    with pytest.raises(StorageError) as refused:
        download([str(path) for path in sorted(tree.iterdir())])
    assert "0013.bin" in refused.value.what and "0000.bin" not in refused.value.what
    assert read_foreign(tree / "0012.bin", limit_bytes=200) == bytes([12]) * 100


def test_an_error_names_the_shard_that_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(object_store, "DAMAGED_TRIES", 1)
    data = load_dataset("shapes:4")
    shard(data.origin, str(tmp_path / "shards"), 3000, lambda *_: None)
    tree = local_path(f"file://{tmp_path / 'shards'}")
    about = read_index((tmp_path / "shards" / INDEX).read_bytes(), "")
    victim = sorted(key for key in about if key.endswith(".png"))[-1]
    (tmp_path / "shards" / about[victim].shard).unlink()
    with pytest.raises(StorageError, match="does not exist") as refused:
        download([str(path) for path in sorted(tree.rglob("*.png"))])
    assert about[victim].shard in refused.value.what


class Listing:
    """What the file system of fsspec answers for a bucket."""

    def __init__(self, keys: list[str]) -> None:
        self.keys = keys

    def find(self, below: str, detail: bool) -> dict[str, dict[str, Any]]:
        return {f"bucket/set/{key}": {"type": "file", "size": 1} for key in self.keys}


def test_keys_that_begin_with_a_slash_are_left_out_like_those_with_two_slashes():
    store = ObjectStore("s3://bucket/set")
    store._system, store._made_by = (
        Listing(["a.png", "/a.png", "/images/b.png", "images//c.png"]),
        os.getpid(),
    )
    files, odd = store.objects()
    assert list(files) == ["a.png"] and odd == ["/a.png", "/images/b.png", "images//c.png"]


# -- final, or tried again


def error(name: str, *bases: type[BaseException], **attributes: object) -> Exception:
    """An error as a library of stores raises it; the libraries need not be here."""
    made: Exception = type(name, bases or (Exception,), {})("what happened")
    for key, value in attributes.items():
        setattr(made, key, value)
    return made


def of_s3(
    status: int, code: str = "", kind: Callable[[], Exception] = lambda: OSError(22, "no")
) -> Exception:
    """An error of s3fs, whose cause is that of botocore."""
    found = kind()
    answer = {"Error": {"Code": code or str(status)}, "ResponseMetadata": {"HTTPStatusCode": status}}
    found.__cause__ = error("ClientError", response=answer)
    return found


BOTOCORE = type("BotoCoreError", (Exception,), {})
HTTP_CLIENT = type("HTTPClientError", (BOTOCORE,), {})
FINAL = {
    "expired token": of_s3(400),
    "bad request": of_s3(400, "InvalidRequest"),
    "signature": of_s3(403, "SignatureDoesNotMatch", PermissionError),
    "empty object": of_s3(416, "InvalidRange"),
    "moved bucket": of_s3(301, "PermanentRedirect"),
    "web 404": error("ClientResponseError", status=404),
    "web 410": error("ClientResponseError", status=410),
    "redirect loop": error("TooManyRedirects", status=302),
    "other scheme": error("NonHttpUrlRedirectClientError", ValueError),
    "refused redirect": Refused("it redirects"),
    "Azure": error("HttpResponseError", status_code=400),
    "Google": error("HttpError", code=400),
    "endpoint": ValueError("Invalid endpoint: not-a-url"),
    "port": OverflowError("port must be 0-65535"),
    "region": error("InvalidRegionError", BOTOCORE, ValueError),
    "no region": error("NoRegionError", BOTOCORE),
    "wrapped user data": error(
        "HTTPClientError", HTTP_CLIENT, kwargs={"error": ValueError("Cannot combine AUTHORIZATION header")}
    ),
    "wrapped bundle": error("HTTPClientError", HTTP_CLIENT, kwargs={"error": FileNotFoundError(2, "no")}),
    "certificate": error(
        "SSLError",
        type("ConnectionError", (BOTOCORE,), {}),
        kwargs={"error": error("ClientConnectorCertificateError", OSError, ValueError)},
    ),
    "login": error("UnauthorizedSSOTokenError", type("SSOError", (BOTOCORE,), {})),
}
PASSING = {
    "S3 503": of_s3(503, "SlowDown"),
    "S3 500": of_s3(500, "InternalError"),
    "S3 429": of_s3(429),
    "S3 timeout": of_s3(400, "RequestTimeout", TimeoutError),
    "S3 cut upload": of_s3(400, "IncompleteBody"),
    "S3 damaged upload": of_s3(400, "BadDigest"),
    "S3 two writers": of_s3(409, "ConditionalRequestConflict"),
    "web 408": error("ClientResponseError", status=408),
    "web 425": error("ClientResponseError", status=425),
    "web 520": error("ClientResponseError", status=520),
    "no connection": error("EndpointConnectionError", type("ConnectionError", (BOTOCORE,), {})),
    "wrapped connection": error("HTTPClientError", HTTP_CLIENT, kwargs={"error": OSError(104, "reset")}),
    "wrapped text": error("HTTPClientError", HTTP_CLIENT, kwargs={"error": "reset"}),
    "timeout": TimeoutError(),
    "cut answer": error("ClientPayloadError"),
    "cut list": json.JSONDecodeError("no", "", 0),
    "damaged": object_store.Damaged("it has 5 bytes"),
    "own server of credentials": error("CredentialRetrievalError", BOTOCORE),
}


def test_an_answer_that_makes_no_sense_is_not_the_status_that_aiohttp_states():
    found = error("ClientResponseError", status=400)
    found.__cause__ = error("BadStatusLine")
    assert object_store._may_pass(found)


@pytest.mark.parametrize("what", FINAL)
def test_what_can_never_succeed_is_tried_once(what: str, monkeypatch: pytest.MonkeyPatch):
    tries: list[int] = []

    def work() -> None:
        tries.append(1)
        raise FINAL[what]

    for store in (ObjectStore("s3://bucket/set"), ObjectStore("https://host/set")):
        tries.clear()
        with pytest.raises(StorageError, match="cannot read x") as refused:
            store._trying("read x", work)
        assert len(tries) == 1 and "check the network" not in refused.value.hint


@pytest.mark.parametrize("what", PASSING)
def test_what_may_pass_is_tried_again(what: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(object_store, "LONGEST_WAIT_S", 0.0)
    tries: list[int] = []

    def work() -> str:
        tries.append(1)
        if len(tries) < 3:
            raise PASSING[what]
        return "done"

    assert ObjectStore("s3://bucket/set")._trying("read x", work) == "done" and len(tries) == 3


def test_downloads_and_stores_have_one_rule_for_statuses_and_redirects(monkeypatch: pytest.MonkeyPatch):
    assert [status for status in range(300, 500) if may_pass(status)] == [408, 425, 429]
    assert all(map(may_pass, (500, 502, 503, 504, 520))) and not may_pass(501)
    for url, target in (("https://a/", "http://a/"), ("http://a/", "file:///etc/passwd"), ("https://a/", "")):
        with pytest.raises(Refused):
            check_redirect(url, target)
    monkeypatch.delenv("YOLOFLEET_OFFLINE", raising=False)
    check_redirect("http://a/", "https://b/")
    monkeypatch.setenv("YOLOFLEET_OFFLINE", "1")
    check_redirect("http://127.0.0.1/", "http://127.0.0.1/b")
    with pytest.raises(Refused, match="YOLOFLEET_OFFLINE"):
        check_redirect("http://127.0.0.1/", "http://192.0.2.2/b")


# -- the disk and the limits of the process


@pytest.mark.parametrize(
    ("code", "words"),
    [(errno.ENOSPC, "free some space"), (errno.EROFS, "read-only"), (errno.EIO, "check the disk")],
)
def test_the_hint_for_a_disk_is_that_of_the_cache_or_of_the_runs(
    cache: Path, tmp_path: Path, code: int, words: str
):
    inside = storage_error(OSError(code, "refused"), cache / "objects" / "x").hint
    outside = storage_error(OSError(code, "refused"), tmp_path / "runs" / "x").hint
    assert words in inside and words in outside
    assert "YOLOFLEET_CACHE" in inside and "YOLOFLEET_DISK_CACHE" in inside and "--project" not in inside
    assert "--project" in outside and "YOLOFLEET_CACHE" not in outside


def test_too_many_open_files_has_a_hint_of_its_own(cache: Path):
    hint = storage_error(OSError(errno.EMFILE, "Too many open files"), cache / "objects").hint
    assert "ulimit -n" in hint and "--project" not in hint


def test_many_files_are_read_with_few_open_ones(tmp_path: Path):
    store = folder_of_files(tmp_path / "store", 200)
    script = (
        "import sys; from pathlib import Path; from yolofleet.storage.foreign import read_foreign; from yolofleet.storage.mirrored import download; "
        "from yolofleet.storage.mirror import local_path; tree = local_path('file://' + sys.argv[1]); "
        "paths = sorted(map(str, tree.iterdir())); assert download(paths) == 200; "
        "assert [read_foreign(path, limit_bytes=200)[0] for path in paths] == list(range(200))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(store)],
        env=environment(tmp_path),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


# -- before a file is made


def test_no_file_is_made_if_the_named_one_does_not_exist(tmp_path: Path, cache: Path):
    store = folder_of_files(tmp_path / "store", 20)
    options = ("--model", "yolov5n", "--device", "cpu", "--dry-run")
    told = called("train", "--data", f"file://{store}/data.yaml", *options)
    assert told.code == 2 and f"{store}/data.yaml does not exist" in told.err
    assert not list((cache / "objects").glob("*/tree/*"))
    (store / "data.yaml").write_text("train: .\nnames: [a]\n")
    assert load_dataset(f"file://{store}/data.yaml").within is not None


def test_a_folder_with_a_dot_in_its_name_needs_no_slash(tmp_path: Path):
    (tmp_path / "sets").mkdir()
    folder_of_files(tmp_path / "sets" / "v1.5", 2)
    assert len(list(local_path(f"file://{tmp_path}/sets/v1.5").iterdir())) == 2


def test_progress_is_shown_while_many_files_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mirrors, "SHOWN_EVERY", 10)
    monkeypatch.setenv("TERM", "xterm")
    store = folder_of_files(tmp_path / "store", 40)
    with pseudo_terminal(24, 120) as screen:
        monkeypatch.setattr(sys, "stderr", screen.stream)
        tree = local_path(f"file://{store}")
        text = screen.text()
    assert "10/40" in text and len(list(tree.iterdir())) == 40


def test_an_update_that_was_killed_between_making_and_sizing_a_file_is_made_good(tmp_path: Path):
    store = folder_of_files(tmp_path / "store", 5)
    tree = local_path(f"file://{store}")
    (tree / "0003.bin").unlink()
    os.close(os.open(tree / "0003.bin", os.O_CREAT | os.O_WRONLY, mirrors.ABSENT))
    assert read_foreign(local_path(f"file://{store}") / "0003.bin", limit_bytes=200) == bytes([3]) * 100


@pytest.mark.parametrize("data", ["file:///usr/share/", "http://10.0.0.1/set/"])
def test_no_file_of_a_stranger_chooses_a_disk_or_a_web_server(tmp_path: Path, cache: Path, data: str):
    (tmp_path / "config.yaml").write_text(f"data: {data}\nmodel: yolov5n\n")
    told = called("train", "--config", tmp_path / "config.yaml", "--dry-run")
    assert told.code == 2 and "a file must not choose" in told.err
    assert "config.yaml:1" in told.err and f"--data {data}" in told.err
    assert not list((cache / "objects").glob("*/tree/*"))


def test_a_description_names_no_file_address(tmp_path: Path):
    (tmp_path / "data.yaml").write_text("path: file:///etc/\ntrain: .\nnames: [a]\n")
    with pytest.raises(ConfigError, match="only an address that you type"):
        load_dataset(str(tmp_path / "data.yaml"))
