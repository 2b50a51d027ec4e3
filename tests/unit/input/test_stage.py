"""Copies of image files on a local disk."""

import errno
import os
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fleet import on_fleet
from label_rows import index_of
from small_data import ODD_NAMES, write_picture, yolo_set

from yolofleet.data.input import stage
from yolofleet.data.input.cache import ImageCache
from yolofleet.data.input.stage import StagedImages, check_room, copy_for
from yolofleet.runs.report.console import NullConsole
from yolofleet.support.errors import StorageError
from yolofleet.training.rank.inputs import stage_images

LABEL = "0 0.5 0.5 0.2 0.4\n"


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def data(tmp_path):
    return yolo_set(tmp_path / "set", dict.fromkeys(ODD_NAMES, LABEL))


def staged_of(index, folder):
    staged = StagedImages(index, folder)
    copy_for(60, staged, iter(staged.missing().tolist()))
    return staged


def test_copies_are_the_files_and_are_read_instead_of_them(data, tmp_path):
    index = index_of(data)
    staged = staged_of(index, tmp_path / "local disk")
    assert not len(staged.missing()) and not staged.failures
    contents = [Path(path).read_bytes() for path in index.paths]
    assert [staged.read(image) for image in range(len(index))] == contents
    cache = ImageCache(index, 32, "none", staged=staged)
    originals = ImageCache(index, 32, "none")
    pixels = [originals.get(image) for image in range(len(index))]
    shutil.rmtree(tmp_path / "set" / "images")
    for image, expected in enumerate(pixels):
        assert np.array_equal(cache.get(image), expected)
    other = pickle.loads(pickle.dumps(staged))  # as a loader process that is spawned gets it
    assert other.read(2) == contents[2]


def test_what_is_there_is_not_copied_again_and_new_labels_change_nothing(data, tmp_path):
    first = staged_of(index_of(data), tmp_path / "local")
    label = tmp_path / "set" / "labels" / "train" / "plain.txt"
    label.write_text(LABEL + "1 0.2 0.2 0.1 0.1\n")
    again = StagedImages(index_of(data), tmp_path / "local")
    assert again.file == first.file and again.missing_bytes() == 0
    write_picture(tmp_path / "set" / "images" / "train" / "plain.jpg", 32, 32, seed=9)
    changed = StagedImages(index_of(data), tmp_path / "local")
    assert changed.file != first.file and len(changed.missing()) == len(ODD_NAMES)
    assert first.file.exists()  # nothing is deleted


def test_an_interrupted_copy_goes_on_where_it_was(data, tmp_path):
    index = index_of(data)
    staged = StagedImages(index, tmp_path / "local")
    copy_for(60, staged, iter([1, 3]))
    again = StagedImages(index, tmp_path / "local")
    assert again.missing().tolist() == [0, 2, 4]
    assert again.missing_bytes() == sum(Path(index.path(image)).stat().st_size for image in (0, 2, 4))
    assert again.read(0) is None and again.read(1) == Path(index.path(1)).read_bytes()


def test_a_damaged_copy_is_made_again(data, tmp_path):
    index = index_of(data)
    file = staged_of(index, tmp_path / "local").file
    content = file.read_bytes()
    image = Path(index.path(0)).read_bytes()
    at = content.index(image)
    file.write_bytes(content[: at + 10] + bytes(50) + content[at + 60 :])
    again = StagedImages(index, tmp_path / "local")
    assert again.read(0) == image
    assert file.read_bytes() == content


def test_an_image_that_cannot_be_copied_is_read_from_its_place(data, tmp_path):
    index = index_of(data)
    path = Path(index.path(0))
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    Path(index.path(1)).unlink()
    staged = staged_of(index, tmp_path / "local")
    assert staged.missing().tolist() == [0, 1]
    assert f"the index has {len(content)}" in staged.failures[0]
    assert "No such file" in staged.failures[1]
    path.write_bytes(content)
    cache = ImageCache(index, 32, "none", staged=staged)
    assert np.array_equal(cache.get(0), ImageCache(index, 32, "none").get(0))


def test_a_disk_that_is_too_small_is_refused_with_figures(data, tmp_path, monkeypatch):
    folder = tmp_path / "local"
    staged = StagedImages(index_of(data), folder)
    (folder / f"{'0' * 32}.images").touch()
    # the free space of a disk cannot be chosen
    monkeypatch.setattr(stage.shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    with pytest.raises(
        StorageError, match=r"needs [0-9.]+ KiB for image files, and its disk has 100 bytes"
    ) as caught:
        check_room([staged], folder)
    assert f"{'0' * 32}.images" in caught.value.hint and staged.file.name not in caught.value.hint
    copy_for(60, staged, iter(range(len(ODD_NAMES))))
    check_room([staged], folder)  # nothing is missing


def test_a_disk_that_fills_up_is_an_error_that_says_what_to_do(data, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    staged = StagedImages(index_of(data), tmp_path / "local")
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StorageError, match="No space left") as caught:
        copy_for(60, staged, iter([0]))
    assert "leave --stage out" in caught.value.hint


@pytest.mark.skipif(os.name != "posix", reason="symbolic links")
def test_a_link_in_the_folder_is_not_followed(data, tmp_path):
    index = index_of(data)
    file = StagedImages(index, tmp_path / "local").file
    file.unlink()
    (tmp_path / "precious").write_text("content")
    file.symlink_to(tmp_path / "precious")
    with pytest.raises(StorageError, match="link"):
        StagedImages(index, tmp_path / "local")
    assert (tmp_path / "precious").read_text() == "content"


def test_a_folder_that_cannot_be_made_is_an_error(data, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"--stage .*file"):
        StagedImages(index_of(data), tmp_path / "file" / "below")


def _stage(world, data, folder):
    index = index_of(data)
    copied = []
    copy = StagedImages.copy

    def counted(staged, image):
        copied.append(image)
        copy(staged, image)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(StagedImages, "copy", counted)
        world.console = NullConsole(folder.parent / f"rank-{world.rank}.log")
        (staged,) = stage_images(folder, [index], world)
    return copied, [staged.read(image) == Path(index.path(image)).read_bytes() for image in range(len(index))]


def test_the_ranks_of_a_host_divide_the_images(data, tmp_path):
    found = on_fleet(2, tmp_path, _stage, data, tmp_path / "local")
    assert [sorted(copied) for copied, _ in found] == [[0, 2, 4], [1, 3]]
    assert all(all(equal) for _, equal in found)
    log = (tmp_path / "rank-0.log").read_text()
    assert "note: staged 5 train images" in log
    assert on_fleet(2, tmp_path, _stage, data, tmp_path / "local")[0][0] == []
    assert "there already" in (tmp_path / "rank-0.log").read_text()
