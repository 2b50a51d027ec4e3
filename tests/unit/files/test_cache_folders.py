"""The folders of the cache: nothing is read, written or deleted in one that another user may have changed, or through a link."""

from __future__ import annotations

import ast
import hashlib
import os
import shutil
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from commands import called, ran
from small_data import write_picture
from walks import sampled

import yolofleet as package
from yolofleet.data.datasets.arrayfile import cached_arrays
from yolofleet.data.datasets.index import build_index
from yolofleet.data.datasets.sources import load_dataset
from yolofleet.data.input.cache import ImageCache
from yolofleet.families.weights.catalogue import weights_folder
from yolofleet.fleet.plan.forecast import probes_folder
from yolofleet.storage.caches import keep_compiled
from yolofleet.storage.foreign import read_foreign
from yolofleet.storage.mirror import local_path
from yolofleet.support.errors import StorageError

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="owners and modes")
SOURCE = Path(package.__file__).resolve().parent
OTHER = 12345  # a user
needs_root = pytest.mark.skipif(
    not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can give files to another user"
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path / "cache"))
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return tmp_path / "cache"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A data set in a folder that stands for a bucket."""
    folder = tmp_path / "store"
    for number in range(4):
        split = ("train", "val")[number % 2]
        write_picture(folder / "images" / split / f"{number}.png", 40, 40, number)
        (folder / "labels" / split).mkdir(parents=True, exist_ok=True)
        (folder / "labels" / split / f"{number}.txt").write_text("0 0.5 0.5 0.2 0.2\n")
    (folder / "data.yaml").write_text("train: images/train\nval: images/val\nnames: [cat]\n")
    return folder


def pixels() -> None:
    index = build_index(load_dataset("shapes:2"), "train")
    ImageCache(index, 32, "disk").close()


USERS: dict[str, Callable[[], object]] = {
    "weights": weights_folder,
    "probes": probes_folder,
    "datasets": lambda: load_dataset("shapes:2"),
    "index": lambda: build_index(load_dataset("shapes:2"), "train"),
    "images": pixels,
    "compiled": keep_compiled,
    "triton": keep_compiled,
    "coco": lambda: cached_arrays("coco", "key", lambda: ({}, {})),
    "objects": lambda: local_path(f"file://{Path(__file__).parent}/"),
}


def damage(folder: Path, how: str) -> None:
    """Make a folder one that others may have changed."""
    folder.mkdir(parents=True, exist_ok=True)
    if how == "open":
        folder.chmod(0o777)
    elif how == "foreign":
        os.chown(folder, OTHER, OTHER)
    else:
        folder.rename(folder.with_name("elsewhere"))
        folder.symlink_to(folder.with_name("elsewhere"))


@pytest.mark.parametrize(
    ("how", "user"),
    sampled(
        product(
            ["open", "link", *(["foreign"] if hasattr(os, "geteuid") and os.geteuid() == 0 else [])], USERS
        ),
        2,
    ),
)
def test_every_user_of_a_cache_folder_refuses_one_that_others_may_have_changed(
    cache: Path, user: str, how: str
):
    damage(cache / user, how)
    with pytest.raises(StorageError, match=r"owner \d+, mode \d{4}") as refused:
        USERS[user]()
    assert str(cache / user) in refused.value.what and "YOLOFLEET_CACHE" in refused.value.hint
    assert list((cache / user).iterdir()) == []


@pytest.mark.parametrize("how", ["open", pytest.param("foreign", marks=needs_root)])
@pytest.mark.parametrize("user", USERS)
def test_the_cache_folder_itself_is_looked_at(cache: Path, user: str, how: str):
    damage(cache, how)
    with pytest.raises(StorageError, match=r"owner \d+, mode \d{4}"):
        USERS[user]()
    assert list(cache.iterdir()) == []


def test_the_hint_for_an_open_folder_is_true(cache: Path):
    damage(cache, "open")
    with pytest.raises(StorageError, match="other users") as refused:
        weights_folder()
    assert "chmod o-w" in refused.value.hint
    cache.chmod(cache.stat().st_mode & ~0o002)
    assert weights_folder().parent.is_dir()


def test_a_linked_cache_of_this_user_works(cache: Path, store: Path, tmp_path: Path):
    (tmp_path / "scratch" / "me").mkdir(parents=True)
    (tmp_path / "link").symlink_to("scratch")
    cache.symlink_to(tmp_path / "link" / "me")
    for _ in range(2):
        assert len(build_index(load_dataset(f"file://{store}/data.yaml"), "train")) == 2
    assert {path.name for path in (tmp_path / "scratch" / "me").iterdir()} >= {"index", "objects"}


@needs_root
def test_a_cache_behind_a_link_of_another_user_is_refused(cache: Path, tmp_path: Path):
    (tmp_path / "elsewhere").mkdir()
    cache.symlink_to(tmp_path / "elsewhere")
    os.lchown(cache, OTHER, OTHER)
    with pytest.raises(StorageError, match=f"symbolic link of user {OTHER}"):
        weights_folder()
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("mode", sampled([0o700, 0o755, 0o775, 0o2775, 0o1777], 2))
def test_private_shared_with_a_group_and_sticky_caches_work(cache: Path, mode: int):
    cache.mkdir()
    cache.chmod(mode)
    for _ in range(2):
        assert len(build_index(load_dataset("shapes:2"), "train")) == 2
    assert cache.stat().st_mode & 0o7777 == mode


def test_an_account_without_a_umask_can_use_its_cache_again(cache: Path, store: Path, tmp_path: Path):
    script = (
        "import os; os.umask(0); from yolofleet.data.datasets.sources import load_dataset as load; "
        f"load('shapes:2'); load('file://{store}/data.yaml')"
    )
    for _ in range(2):
        ran(tmp_path, sys.executable, "-c", script, variables={"YOLOFLEET_CACHE": str(tmp_path / "new")})
    mirror = next((tmp_path / "new" / "objects").glob("*/tree"))
    for folder in (tmp_path / "new", *(tmp_path / "new").iterdir(), mirror, mirror.parent):
        assert not folder.stat().st_mode & 0o022


def test_a_cache_that_cannot_be_made_is_done_without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "file").write_text("mine")
    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path / "file" / "cache"))
    made = cached_arrays("coco", "key", lambda: ({}, {"made": "1"}))
    assert made[1]["made"] == "1" and (tmp_path / "file").read_text() == "mine"


# -- links and foreign files in a mirror


def mirror_in(cache: Path, store: Path) -> Path:
    return cache / "objects" / hashlib.sha256(f"file://{store}".encode()).hexdigest()[:20]


def link_tree(mirror: Path, victim: Path) -> Path:
    (mirror / "tree").symlink_to(victim)
    return mirror / "tree"


def link_in_tree(mirror: Path, victim: Path) -> Path:
    (mirror / "tree/images").mkdir(parents=True)
    (mirror / "tree/images/train").symlink_to(victim)
    return mirror / "tree/images/train"


def link_mirror(mirror: Path, victim: Path) -> Path:
    mirror.rmdir()
    (victim / "tree").mkdir()
    (victim / "tree/keep.txt").write_text("only copy")
    mirror.symlink_to(victim)
    return mirror


def link_objects(mirror: Path, victim: Path) -> Path:
    mirror.rmdir()
    mirror.parent.rmdir()
    (victim / mirror.name / "tree").mkdir(parents=True)
    (victim / mirror.name / "tree/keep.txt").write_text("only copy")
    mirror.parent.symlink_to(victim)
    return mirror.parent


def link_other_mirror(mirror: Path, victim: Path) -> Path:
    """One that no command of the test names, but whose contents an eviction would empty."""
    mirror.with_name("0" * 20).mkdir()
    (mirror.with_name("0" * 20) / "tree").symlink_to(victim)
    return mirror.with_name("0" * 20) / "tree"


def link_generation(mirror: Path, victim: Path) -> Path:
    """A newer copy of the folder, which the next command would use and change."""
    newer = mirror.with_name(f"{mirror.name}-7")
    newer.mkdir()
    (newer / "files.sqlite").touch()
    (newer / "tree").symlink_to(victim)
    return newer / "tree"


def link_lock(mirror: Path, victim: Path) -> Path:
    (mirror.parent / "used.lock").symlink_to(victim / "thesis.txt")
    return mirror.parent / "used.lock"


def another_address(mirror: Path, victim: Path) -> Path:
    (mirror / "address").write_text("s3://bucket/other")
    return mirror


@pytest.mark.parametrize(
    "attack",
    sampled(
        [
            link_tree,
            link_in_tree,
            link_mirror,
            link_objects,
            link_other_mirror,
            link_generation,
            link_lock,
            another_address,
        ],
        8,
    ),
)
def test_a_planted_link_or_address_is_refused_and_changes_no_file(
    cache: Path,
    store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    attack: Callable[[Path, Path], Path],
):
    monkeypatch.setenv("YOLOFLEET_DISK_CACHE", "20KiB")
    victim, mirror = tmp_path / "victim", mirror_in(cache, store)
    (victim / "sub").mkdir(parents=True)
    mirror.mkdir(parents=True)
    for name in ("thesis.txt", "sub/a.txt", *(path.name for path in (store / "images/train").iterdir())):
        (victim / name).write_text("only copy")
    planted = attack(mirror, victim)
    before = {path: path.read_bytes() for path in victim.rglob("*") if path.is_file()}
    command = ("data", "check", f"file://{store}/data.yaml")
    done = called(*command)
    told = done.err
    assert done.code == 3, told
    assert {path: path.read_bytes() for path in victim.rglob("*") if path.is_file()} == before
    assert str(planted) in told.replace("\n         ", "") and "Traceback" not in told
    assert "delete" in told or "YOLOFLEET_CACHE" in told or "remove it" in told
    if planted.is_symlink():
        planted.unlink()
        if planted.parent.name.endswith("-7"):
            done = called(*command)
            assert done.code == 3 and "has the files of no address" in done.err.replace("\n         ", "")
            shutil.rmtree(planted.parent)
    else:
        (planted / "address").unlink()
    assert called(*command).code == 0
    assert {path: path.read_bytes() for path in victim.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", ["objects/used.new", "objects/used", "MIRROR/boot"])
def test_a_linked_file_of_a_mirror_is_replaced_and_not_followed(
    cache: Path, store: Path, tmp_path: Path, name: str
):
    link = cache / name.replace("MIRROR", f"objects/{mirror_in(cache, store).name}")
    link.parent.mkdir(parents=True)
    (tmp_path / "thesis.txt").write_text("only copy")
    link.symlink_to(tmp_path / "thesis.txt")
    for _ in range(2):
        tree = local_path(f"file://{store}/")
        assert read_foreign(tree / "data.yaml", limit_bytes=1 << 16) == (store / "data.yaml").read_bytes()
        assert (tmp_path / "thesis.txt").read_text() == "only copy"


def test_the_folders_of_the_cache_come_from_one_function():
    """All other files use the path of the cache only to show or compare it."""
    allowed = {
        "cache_root": {"storage/caches.py", "fleet/doctor/machine_facts.py", "data/input/cache.py"},
        "mirrors_root": {"storage/caches.py", "storage/mirror.py"},
        "YOLOFLEET_CACHE": {"storage/caches.py", "measure/selftest/contract.py"},
    }
    found: dict[str, set[str]] = {name: set() for name in allowed}
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(func=ast.Name(id=called)) if called in allowed:
                    found[called].add(name)
                case ast.Constant(value="YOLOFLEET_CACHE"):
                    found["YOLOFLEET_CACHE"].add(name)
                case ast.BinOp(op=ast.Div(), left=ast.Call(func=ast.Name(id="cache_root"))):
                    assert name == "storage/caches.py", f"{name} must take its folder from cache_folder"
                case _:
                    pass
    assert found == allowed


def test_compiled_kernels_are_kept_where_the_user_says(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "own"))
    keep_compiled()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(cache / "compiled")
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "own")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    keep_compiled()
    assert os.environ["TRITON_CACHE_DIR"] == str(cache / "triton")
