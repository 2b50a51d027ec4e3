"""Data in a bucket whose store or network fails: what a reader gets, and what it gets afterwards."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
from commands import SMALL_YOLOV5N as SMALL
from commands import small_shapes, yolofleet
from server import BUCKET, Faults, Store, web_server

from yolofleet.data.datasets.index import build_index
from yolofleet.data.datasets.pack import shard, write_list
from yolofleet.data.datasets.sources import load_dataset
from yolofleet.inference.predict.sources import Source
from yolofleet.storage import object_store
from yolofleet.storage.caches import DISK_CACHE
from yolofleet.storage.foreign import read_foreign
from yolofleet.storage.mirror import local_path
from yolofleet.storage.mirrored import download
from yolofleet.storage.shards import LIST
from yolofleet.support.errors import ConfigError, StorageError


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, store: Store) -> Path:
    """A small data set on this disk, in the bucket as ``files``, and there as ``shards``."""
    made = small_shapes(tmp_path_factory.mktemp("data"))
    store.upload(made.parent, "files")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in store.environment().items():
            patch.setenv(name, value)
        patch.setenv("YOLOFLEET_CACHE", str(tmp_path_factory.mktemp("cache")))
        shard(str(made), f"s3://{BUCKET}/shards", 100_000, lambda *_: None)
    return made


FORMS = ("files", "shards")


def everything(form: str) -> dict[str, bytes]:
    """All files of a data set in the bucket, as a reader gets them."""
    tree = local_path(f"s3://{BUCKET}/{form}")
    paths = [path for path in sorted(tree.rglob("*")) if path.is_file()]
    download(list(map(str, paths)))
    return {str(path.relative_to(tree)): read_foreign(path, limit_bytes=1 << 24) for path in paths}


def local(data: Path) -> dict[str, bytes]:
    folder = data.parent
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("form", FORMS)
def test_a_bucket_is_the_same_data_set(faults: Faults, data: Path, form: str):
    assert everything(form) == local(data)
    index = build_index(load_dataset(f"s3://{BUCKET}/{form}/data.yaml"), "train")
    assert index.digest == build_index(load_dataset(str(data)), "train").digest
    requests = faults.counts["GET object"]
    assert everything(form) == local(data)
    assert faults.counts["GET object"] - requests <= 1  # the index of shards


def test_pictures_of_a_bucket_are_those_of_the_disk(faults: Faults, data: Path):
    theirs = list(Source(f"s3://{BUCKET}/files/images/val/", is_argument=True))
    ours = list(Source(str(data.parent / "images" / "val")))
    assert len(theirs) == len(ours) > 1
    for a, b in zip(theirs, ours, strict=True):
        assert a.path == f"s3://{BUCKET}/files/images/val/{Path(b.path).name}" and (a.image == b.image).all()


def test_near_parts_of_a_shard_are_read_together(faults: Faults, data: Path):
    everything("shards")
    assert faults.counts["GET object"] < len(local(data)) / 5


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fault", ["flip", "cut"])
def test_damaged_answers_are_asked_for_again(faults: Faults, data: Path, form: str, fault: str):
    local_path(f"s3://{BUCKET}/{form}")
    setattr(faults, fault, 3)
    assert everything(form) == local(data)
    assert getattr(faults, fault) == 0


@pytest.mark.parametrize("form", FORMS)
def test_a_store_that_damages_everything_is_refused_and_nothing_of_it_is_kept(
    faults: Faults, data: Path, form: str
):
    tree = local_path(f"s3://{BUCKET}/{form}")
    faults.flip = -1
    with pytest.raises(StorageError, match=r"digest|damaged|checksum"):
        everything(form)
    faults.flip = 0
    assert everything(form) == local(data)
    assert not list(tree.parent.glob("content-*"))


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_store_that_refuses_for_a_while_is_asked_again(faults: Faults, data: Path, status: int):
    local_path(f"s3://{BUCKET}/files")
    faults.status = status
    threading.Timer(8, lambda: setattr(faults, "status", 0)).start()
    assert everything("files") == local(data)


def test_an_outage_is_told_once_and_made_up_for(
    faults: Faults, data: Path, capsys: pytest.CaptureFixture[str]
):
    local_path(f"s3://{BUCKET}/files")
    faults.down = True
    threading.Timer(25, lambda: setattr(faults, "down", False)).start()
    assert everything("files") == local(data)
    assert capsys.readouterr().err.count("trying for 5 minutes") == 1


def test_an_outage_without_end_is_an_error(faults: Faults, data: Path, monkeypatch: pytest.MonkeyPatch):
    local_path(f"s3://{BUCKET}/files")
    monkeypatch.setattr(object_store, "OUTAGE_S", 3.0)
    faults.down = True
    with pytest.raises(StorageError, match="tried for") as refused:
        everything("files")
    assert "resume" in refused.value.render()


@pytest.mark.parametrize("wrong", ["key", "secret", "none"])
def test_wrong_credentials_are_named_at_once_and_not_shown(
    faults: Faults, data: Path, wrong: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    if wrong == "none":
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        monkeypatch.setenv("HOME", str(tmp_path))  # no profile
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    else:
        monkeypatch.setenv(
            "AWS_ACCESS_KEY_ID" if wrong == "key" else "AWS_SECRET_ACCESS_KEY", "Wrong0Wrong0Wrong0"
        )
    monkeypatch.setattr(object_store, "OUTAGE_S", 1e6)  # it would try what is denied until the test is ended
    with pytest.raises(StorageError, match="cannot") as refused:
        everything("files")
    text = refused.value.render()
    assert "credentials" in text
    assert "Wrong0" not in text
    assert os.environ.get("AWS_SECRET_ACCESS_KEY", "?") not in text


def test_a_bucket_or_folder_that_does_not_exist_is_named(faults: Faults, data: Path):
    for address in ("s3://no-such-bucket/files", f"s3://{BUCKET}/absent", f"s3://{BUCKET}/files/absent.yaml"):
        with pytest.raises((ConfigError, StorageError), match="does not exist"):
            load_dataset(address)


def test_an_object_that_changes_during_a_run_is_refused(faults: Faults, data: Path, store: Store):
    store.upload(data.parent, "changing")
    tree = local_path(f"s3://{BUCKET}/changing")
    victim = next(path for path in sorted(tree.rglob("*.jpg")) + sorted(tree.rglob("*.png")))
    key = f"changing/{victim.relative_to(tree)}"
    content = store.client().get_object(Bucket=BUCKET, Key=key)["Body"].read()
    store.client().put_object(Bucket=BUCKET, Key=key, Body=content[:-1] + b"x")
    with pytest.raises(StorageError, match="digest"):
        read_foreign(victim, limit_bytes=1 << 24)
    store.client().delete_object(Bucket=BUCKET, Key=key)
    with pytest.raises(StorageError, match="does not exist"):
        read_foreign(victim, limit_bytes=1 << 24)
    store.client().put_object(Bucket=BUCKET, Key=key, Body=content)
    local_path(f"s3://{BUCKET}/changing")
    assert read_foreign(victim, limit_bytes=1 << 24) == content


def test_a_clock_that_is_off_by_an_hour_changes_nothing(faults: Faults, data: Path, tmp_path: Path):
    from shutil import which

    if not which("faketime") and not Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1").exists():
        pytest.skip("libfaketime missing (apt-get install libfaketime)")
    library = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
    variables = {"LD_PRELOAD": str(library), "FAKETIME": "+1h", "YOLOFLEET_CACHE": str(tmp_path / "cache")}
    done = yolofleet(
        tmp_path, "data", "check", f"s3://{BUCKET}/files/data.yaml", variables=variables, code=None
    )
    # moto accepts any time; another store refuses, and the answer to its first request (HEAD) has no reason
    assert done.code == 0 or "clock" in done.err


def test_shards_come_from_a_web_server_that_answers_for_ranges(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path / "cache"))
    shard(str(data), str(tmp_path / "web" / "set"), 100_000, lambda *_: None)
    with web_server(tmp_path / "web", has_ranges=True) as port:
        index = build_index(load_dataset(f"http://127.0.0.1:{port}/set"), "train")
        assert index.digest == build_index(load_dataset(str(data)), "train").digest
        with pytest.raises(ConfigError, match="a web server has no list"):
            load_dataset(f"http://127.0.0.1:{port}")
    with (
        web_server(tmp_path / "web", has_ranges=False) as port,
        pytest.raises(StorageError, match="more than the part"),
    ):
        build_index(load_dataset(f"http://127.0.0.1:{port}/set"), "train")


def test_files_come_from_a_web_server_that_has_their_list(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path / "cache"))
    shutil.copytree(data.parent, tmp_path / "web" / "my set")
    for name in ("a#1.txt", "b?x=1.txt", "c%20d.txt", "e[1] f.txt"):
        (tmp_path / "web" / "my set" / name).write_text(name)
    write_list(str(tmp_path / "web" / "my set"), lambda *_: None)
    with web_server(tmp_path / "web", has_ranges=True) as port:
        index = build_index(load_dataset(f"http://127.0.0.1:{port}/my set/data.yaml"), "train")
        assert index.digest == build_index(load_dataset(str(data)), "train").digest
        tree = local_path(f"http://127.0.0.1:{port}/my set")
        for path, content in local(tmp_path / "web" / "my set" / "data.yaml").items():
            assert path == LIST or read_foreign(tree / path, limit_bytes=1 << 24) == content
        (tmp_path / "web/my set/data.yaml").write_text("changed")
        monkeypatch.setattr(object_store, "DAMAGED_TRIES", 1)
        shutil.rmtree(tmp_path / "cache")
        with pytest.raises(StorageError, match=r"digest|bytes; the listing"):
            load_dataset(f"http://127.0.0.1:{port}/my set/data.yaml")


def test_a_web_server_that_denies_what_does_not_exist_is_asked_for_the_list(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path / "cache"))
    shutil.copytree(data.parent, tmp_path / "web")
    write_list(str(tmp_path / "web"), lambda *_: None)
    monkeypatch.setattr(object_store, "OUTAGE_S", 1e6)  # it would try what is denied until the test is ended
    with web_server(tmp_path / "web", has_ranges=True, absent=403) as port:
        index = build_index(load_dataset(f"http://127.0.0.1:{port}/data.yaml"), "train")
        assert index.digest == build_index(load_dataset(str(data)), "train").digest
        with pytest.raises(StorageError, match="403"):
            load_dataset(f"http://127.0.0.1:{port}/images/")


def test_an_error_names_the_object_that_changed_or_vanished_among_many(
    faults: Faults, data: Path, store: Store
):
    store.upload(data.parent, "several")
    tree = local_path(f"s3://{BUCKET}/several")
    pictures = sorted(map(str, tree.rglob("*.png")))
    victim = str(Path(pictures[3]).relative_to(tree))
    content = store.client().get_object(Bucket=BUCKET, Key=f"several/{victim}")["Body"].read()
    for change, says in ((content[:-1] + b"x", "digest"), (None, "does not exist")):
        if change is None:
            store.client().delete_object(Bucket=BUCKET, Key=f"several/{victim}")
        else:
            store.client().put_object(Bucket=BUCKET, Key=f"several/{victim}", Body=change)
        with pytest.raises(StorageError, match=says) as refused:
            download(pictures)
        assert f"several/{victim}:" in refused.value.what


def test_keys_with_two_slashes_are_left_out_and_the_rest_is_read(
    faults: Faults, data: Path, store: Store, capsys: pytest.CaptureFixture[str]
):
    store.upload(data.parent, "slashes")
    for key in ("slashes//images/train/a.png", "slashes/images//train/b.png", "slashes//data.yaml"):
        store.client().put_object(Bucket=BUCKET, Key=key, Body=b"stray")
    assert everything("slashes") == local(data)
    assert "3 objects are left out" in capsys.readouterr().err


def test_an_empty_index_of_a_bucket_is_damaged(
    faults: Faults, store: Store, capsys: pytest.CaptureFixture[str]
):
    store.client().put_object(Bucket=BUCKET, Key="empty/shards.jsonl", Body=b"")
    with pytest.raises(StorageError, match="damaged: it is empty"):
        local_path(f"s3://{BUCKET}/empty")
    assert "trying for" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AWS_SESSION_TOKEN", "expired"),
        ("AWS_ENDPOINT_URL", "not-a-url"),
        ("AWS_ENDPOINT_URL", "http://user:hush@127.0.0.1:1"),
        ("AWS_ENDPOINT_URL", "https://[::1/d"),
        ("AWS_ENDPOINT_URL", "http://127.0.0.1:99999"),
        ("AWS_DEFAULT_REGION", "no region"),
        ("AWS_CA_BUNDLE", "/no/such/bundle.pem"),
    ],
)
def test_a_wrong_setting_is_refused_at_once(
    faults: Faults,
    data: Path,
    name: str,
    value: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setenv(name, value)
    with pytest.raises((StorageError, ConfigError), match=r"cannot|needs a connection") as refused:
        everything("files")
    assert "trying for" not in capsys.readouterr().err
    assert "hush" not in refused.value.render() and "check the network" not in refused.value.hint


@pytest.mark.parametrize("case", ["offline", "scheme", "loop", "empty"])
def test_a_web_server_that_can_never_answer_is_refused_at_once(
    data: Path, tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("YOLOFLEET_OFFLINE", "1" if case == "offline" else "")
    target, says = {
        "offline": ("http://192.0.2.2/set", "another machine, and YOLOFLEET_OFFLINE is set"),
        "scheme": ("file:///etc", "it redirects from http to 'file:///etc"),
        "loop": ("/set", "redirects in a circle"),
        "empty": ("", "damaged: it is empty"),
    }[case]
    (tmp_path / "web" / "set").mkdir(parents=True)
    (tmp_path / "web" / "set" / "shards.jsonl").touch()
    redirects = {"/set": target} if target else {}
    with (
        web_server(tmp_path / "web", has_ranges=True, redirects=redirects) as port,
        pytest.raises(StorageError, match=says) as refused,
    ):
        load_dataset(f"http://127.0.0.1:{port}/set/")
    assert "trying for" not in capsys.readouterr().err and "check the network" not in refused.value.hint


def test_redirects_of_a_web_server_are_followed(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("YOLOFLEET_OFFLINE", "1")
    shutil.copytree(data.parent, tmp_path / "web" / "moved")
    write_list(str(tmp_path / "web" / "moved"), lambda *_: None)
    with web_server(tmp_path / "web", has_ranges=True, redirects={"/set": "/moved"}) as port:
        index = build_index(load_dataset(f"http://127.0.0.1:{port}/set/data.yaml"), "train")
    assert index.digest == build_index(load_dataset(str(data)), "train").digest


# -- whole commands --------------------------------------------------------------------------------------------

EXACT = [*SMALL, "--epochs", "3", "--threads", "1", "--reduce", "exact"]


def sha(folder: Path, name: str) -> str:
    from yolofleet.storage.foreign import digest_of

    return digest_of(folder / "runs" / "train" / name / "weights" / "last.safetensors")


@pytest.fixture(scope="module")
def quiet(data: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of the run on a local disk."""
    folder = tmp_path_factory.mktemp("quiet")
    yolofleet(folder, "train", "--data", data, *EXACT, "--device", "cpu", "--name", "a")
    return sha(folder, "a")


@pytest.mark.parametrize(
    ("form", "more"),
    [
        ("files/data.yaml", ["--device", "cpu", "--workers", "1"]),
        ("shards", ["--device", "cpu:2", "--workers", "1"]),
        ("shards", ["--device", "cpu:2", "--cache", "none"]),
    ],
)
def test_every_form_and_fleet_gives_one_hash(
    faults: Faults, quiet: str, tmp_path: Path, form: str, more: list[str]
):
    variables = {DISK_CACHE: "100KB"} if "--cache" in more else {}  # less than the data set
    done = yolofleet(
        tmp_path,
        *("train", "--data", f"s3://{BUCKET}/{form}", *EXACT, *more, "--name", "a"),
        variables=variables,
    )
    assert sha(tmp_path, "a") == quiet and "Traceback" not in done.err


def test_a_training_goes_on_after_an_outage(faults: Faults, data: Path, quiet: str, tmp_path: Path):
    """The store fails while the images are read again, for longer than a rank may stall."""
    files = len(local(data))

    def fail() -> None:
        while faults.counts["GET object"] < files + 10:
            time.sleep(0.01)
        faults.down = True
        time.sleep(20)
        faults.down = False

    thread = threading.Thread(target=fail, daemon=True)
    thread.start()
    more = ["--device", "cpu:2", "--stall-s", "5", "--cache", "none"]
    yolofleet(
        tmp_path,
        *("train", "--data", f"s3://{BUCKET}/files", *EXACT, *more, "--name", "a"),
        variables={DISK_CACHE: "100KB"},
    )
    thread.join()
    log = (tmp_path / "runs" / "train" / "a" / "logs" / "agent.log").read_text()
    assert sha(tmp_path, "a") == quiet and "trying for 5 minutes" in log


def test_a_training_with_wrong_credentials_ends_with_one_message(faults: Faults, data: Path, tmp_path: Path):
    done = yolofleet(
        tmp_path,
        *("train", "--data", f"s3://{BUCKET}/files", *EXACT, "--device", "cpu:2"),
        variables={"AWS_SECRET_ACCESS_KEY": "Wrong0Wrong0Wrong0"},
        code=None,
    )
    assert done.code not in (0, 1) and "credentials" in done.err and "Traceback" not in done.err
    every = (
        done.out
        + done.err
        + "".join(p.read_text(errors="ignore") for p in tmp_path.rglob("*") if p.is_file())
    )
    assert "Wrong0" not in every


def test_the_secret_is_in_no_file_of_a_run(faults: Faults, quiet: str, store: Store, tmp_path: Path):
    yolofleet(tmp_path, "train", "--data", f"s3://{BUCKET}/files", *EXACT, "--device", "cpu", "--name", "a")
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert store.secret.encode() not in path.read_bytes(), path


def test_other_verbs_read_the_same_addresses(faults: Faults, data: Path, tmp_path: Path):
    yolofleet(tmp_path, "train", "--data", data, *EXACT, "--device", "cpu", "--name", "a")
    weights = tmp_path / "runs" / "train" / "a" / "weights" / "last.safetensors"
    val = ("val", "--weights", weights, "--img", "64", "--device", "cpu", "--data")
    for verb in (("data", "check"), ("data", "stats"), val):
        found = []
        for name in (str(data), f"s3://{BUCKET}/shards"):
            figures = json.loads(yolofleet(tmp_path, *verb, name, "--json", "-").out)
            text = json.dumps({key: value for key, value in figures.items() if "seconds" not in key})
            found.append(text.replace(name, ""))
        assert found[0] == found[1], verb
