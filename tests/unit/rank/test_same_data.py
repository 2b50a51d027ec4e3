"""A resume over a data set on a disk that has changed: what the user gets, also from the commands after it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import cv2
import pytest
from commands import SMALL, called, events_of, small_shapes, working_in
from walks import sampled

from yolofleet.families.weights.format import read_tensors, write_tensors

ARGS = [*SMALL, "--threads", "1", "--device", "cpu", "--val-period", "0"]
IMAGES = 20


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a data set ``data`` and a run ``runs/train/run`` of one epoch."""
    folder = tmp_path_factory.mktemp("trained")
    small_shapes(folder, images=IMAGES).parent.rename(folder / "data")
    with working_in(folder):
        done = called("train", "--data", "data", *ARGS, "--epochs", "1", "--name", "run")
    assert done.code == 0, done.err
    return folder


@pytest.fixture
def place(trained: Path, tmp_path: Path) -> Path:
    """A copy of the folder, with its times but without its cache."""
    shutil.copytree(trained, tmp_path / "place", ignore=shutil.ignore_patterns("cache"))
    return tmp_path / "place"


def resume(place: Path, *more: str, code: int = 0) -> str:
    with working_in(place):
        done = called("train", "--resume", "runs/train/run", *more)
    assert done.code == code, done.out + done.err
    return done.out + done.err


def images(place: Path, split: str = "train") -> list[Path]:
    return sorted((place / "data/images" / split).iterdir())


def listing(place: Path) -> dict:
    return json.loads((place / "runs/train/run/checkpoints/data.json").read_text())


def replace(path: Path, *, is_time_kept: bool = False) -> None:
    """Write other pixels; the file keeps its size, and perhaps its time."""
    before, pixels = path.stat(), cv2.imread(str(path))
    assert pixels is not None
    encoded = cv2.imencode(".png", cv2.bitwise_not(pixels), [cv2.IMWRITE_PNG_COMPRESSION, 9])[1]
    content = encoded.tobytes()
    content += bytes(max(0, before.st_size - len(content)))  # decoders ignore what follows the end
    path.write_bytes(content)
    if is_time_kept:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def pad(paths: list[Path]) -> None:
    """Make files so long that other pixels fit, with their times."""
    for path in paths:
        times = path.stat()
        path.write_bytes(path.read_bytes() + bytes(4096))
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_the_contents_are_known_after_a_run(trained: Path) -> None:
    found = listing(trained)
    assert len(found["names"]) == 30 and found["names"][0] == "images/train/000000.png"
    assert all(len(digest) == 32 for digest in found["contents"])
    assert [json.loads(path.read_text()) for path in (trained / "cache/index").glob("*.listing")] == [found]


def test_an_equal_data_set_resumes_without_a_word(place: Path) -> None:
    said = resume(place, "--epochs", "2")
    assert "data set" not in said and "warning" not in said
    assert listing(place)["contents"][0]


@pytest.mark.parametrize("change", sampled(["copied", "touched", "moved"], 3))
def test_other_times_and_folders_are_no_change(place: Path, change: str) -> None:
    more: tuple[str, ...] = ()
    if change == "touched":
        for path in (place / "data").rglob("*.*"):
            path.touch()
    elif change == "moved":
        (place / "else where").mkdir()
        (place / "data").rename(place / "else where/birds")
        more = ("--data", "else where/birds")
    else:
        shutil.copytree(place / "data", place / "new", copy_function=shutil.copyfile)
        shutil.rmtree(place / "data")
        more = ("--data", "new")
    before = listing(place)
    said = resume(place, "--epochs", "2", *more)
    assert "warning" not in said and "data set has changed" not in said
    after = listing(place)
    assert after["contents"] == before["contents"]  # nothing is read again for them
    assert (after["times"] == before["times"]) == (change == "moved")
    assert "warning" not in resume(place, "--epochs", "3")


def test_a_replaced_image_is_refused_until_it_is_accepted_or_restored(place: Path) -> None:
    pad(images(place))
    resume(place, "--epochs", "2", "--allow", "changed-data")  # longer files
    shutil.copytree(place / "data", place / "kept")
    for path in images(place)[:6]:
        replace(path)
    saved = sorted((place / "runs/train/run/checkpoints").glob("step-*"))
    said = resume(place, "--epochs", "3", code=3)
    assert "6 changed: images/train/000000.png (other content), " in said and "and 2 more" in said
    assert "--allow changed-data" in said
    assert sorted((place / "runs/train/run/checkpoints").glob("step-*")) == saved
    said = resume(place, "--epochs", "3", "--allow", "changed-data")
    assert "warning: the run goes on with another data set: 6 changed: images/train/000000.png" in said
    said = resume(place, "--epochs", "4")  # the change is now a part of the run
    assert "warning" not in said
    assert said.count("the data set has changed (--allow changed-data) after step") == 2
    shutil.rmtree(place / "data")
    (place / "kept").rename(place / "data")
    # the first data set is another one for this state
    assert "6 changed" in resume(place, "--epochs", "5", code=3)


def test_the_report_of_a_run_names_an_accepted_change(place: Path) -> None:
    pad(images(place)[:2])
    resume(place, "--epochs", "2", "--allow", "changed-data", "--plots")
    (event,) = events_of(place / "runs/train/run", "changed_data")
    assert event["why"].startswith("2 changed: images/train/000000.png (other content)")
    assert (
        "the run went on with another data set: 2 changed"
        in (place / "runs/train/run/report.html").read_text()
    )


def test_the_same_files_in_a_store_and_back(place: Path) -> None:
    """A store lists digests of another kind, so the contents are read."""
    for path in images(place):
        path.touch()
    with working_in(place):
        assert called("data", "shard", "data", "--out", "shards").code == 0
    assert "warning" not in resume(place, "--epochs", "2", "--data", "shards")
    assert {len(digest) for digest in listing(place)["contents"]} == {64}
    assert "warning" not in resume(place, "--epochs", "3")
    pad(images(place)[:1])
    assert "1 changed: images/train/000000.png" in resume(place, "--epochs", "4", "--data", "data", code=3)


def test_a_run_that_accepted_a_change_and_was_lost_before_a_state_is_refused_with_names(place: Path) -> None:
    pad(images(place)[:1])
    checkpoints = place / "runs/train/run/checkpoints"
    shutil.copytree(checkpoints, place / "states")
    resume(place, "--epochs", "2", "--allow", "changed-data")
    for path in checkpoints.glob("step-*"):
        path.unlink()
    for path in (place / "states").glob("step-*"):
        shutil.copy(path, checkpoints)
    assert "1 changed: images/train/000000.png (other content)" in resume(place, "--epochs", "2", code=3)


def test_an_image_with_the_size_and_time_of_another_is_not_noticed(place: Path) -> None:
    """As docs/failures.md says: reading all images at each start would take too long."""
    pad(images(place))
    resume(place, "--epochs", "2", "--allow", "changed-data")
    replace(images(place)[0], is_time_kept=True)
    assert "warning" not in resume(place, "--epochs", "3")


def test_an_image_of_the_validation_counts(place: Path) -> None:
    pad(images(place, "val")[:1])
    assert "1 changed: images/val/000000.png (other content)" in resume(place, "--epochs", "2", code=3)


@pytest.mark.parametrize("change", ["added", "removed"])
def test_another_number_of_training_images_is_refused_with_names(place: Path, change: str) -> None:
    if change == "added":
        shutil.copy(images(place)[0], place / "data/images/train/z.png")
        shutil.copy(place / "data/labels/train/000000.txt", place / "data/labels/train/z.txt")
        name, count = "images/train/z.png (new)", IMAGES + 1
    else:
        images(place)[3].unlink()
        name, count = "images/train/000003.png (gone)", IMAGES - 1
    for more in ((), ("--allow", "changed-data")):
        said = resume(place, "--epochs", "2", *more, code=3)
        assert f"{count} training images instead of {IMAGES}: " in said and name in said
        assert "--weights" in said


def test_an_image_of_the_validation_may_go_if_that_is_accepted(place: Path) -> None:
    images(place, "val")[0].unlink()
    assert "1 changed: images/val/000000.png (gone)" in resume(place, "--epochs", "2", code=3)
    resume(place, "--epochs", "2", "--allow", "changed-data")
    assert resume(place, "--epochs", "3").count("warning") == 1  # of its label file, which has no image now


def test_labels_count(place: Path) -> None:
    label = place / "data/labels/val/000000.txt"
    label.write_text(label.read_text().splitlines()[0] + "\n")
    assert "1 changed: labels, sizes of images in pixels" in resume(place, "--epochs", "2", code=3)
    resume(place, "--epochs", "2", "--allow", "changed-data")
    assert "warning" not in resume(place, "--epochs", "3")


def test_other_times_without_a_digest_are_refused(place: Path) -> None:
    """The thread that reads the contents had not come so far."""
    file = place / "runs/train/run/checkpoints/data.json"
    values = listing(place)
    values["contents"][5:] = [""] * 25
    file.write_text(json.dumps(values))
    for path in images(place):
        path.touch()
    said = resume(place, "--epochs", "2", code=3)
    assert "15 with another time and no digest to compare: images/train/000005.png" in said
    assert "cp -p" in said and "--allow changed-data" in said
    said = resume(place, "--epochs", "2", "--allow", "changed-data")
    assert "warning: the run goes on with another data set: 15 with another time" in said
    said = resume(place, "--epochs", "3")
    assert "warning" not in said and "after step" in said
    assert all(listing(place)["contents"])


@pytest.mark.parametrize("damage", sampled(["gone", "cut", "other columns", "pipe"], 3))
def test_without_its_listing_a_run_resumes_over_the_same_files_only(place: Path, damage: str) -> None:
    file = place / "runs/train/run/checkpoints/data.json"
    values = listing(place)
    file.unlink()
    if damage == "cut":
        file.write_text(json.dumps(values)[:-20])
    elif damage == "other columns":
        file.write_text(json.dumps(values | {"names": values["names"][1:]}))
    elif damage == "pipe":
        os.mkfifo(file)
    assert "warning" not in resume(place, "--epochs", "2")


def test_without_its_listing_a_run_is_refused_over_files_with_other_times(place: Path) -> None:
    for path in images(place):
        path.touch()
    (place / "runs/train/run/checkpoints/data.json").unlink()
    said = resume(place, "--epochs", "3", code=3)
    assert "no digest to compare" in said
    resume(place, "--epochs", "3", "--allow", "changed-data")
    assert "warning" not in resume(place, "--epochs", "4")


def test_a_state_of_an_earlier_version_resumes_with_a_note(place: Path) -> None:
    checkpoints = place / "runs/train/run/checkpoints"
    (checkpoints / "data.json").unlink()
    for path in checkpoints.glob("step-*"):
        tensors, header = read_tensors(path)
        del header["state"]["data"]
        write_tensors(path, tensors, header)
    replace(images(place)[0])
    said = resume(place, "--epochs", "2")
    assert "does not say which image files the run has read" in said
    assert "earlier version" not in resume(place, "--epochs", "3")


def test_a_state_of_a_stranger_shows_no_control_characters_and_no_traceback(place: Path) -> None:
    (newest,) = sorted((place / "runs/train/run/checkpoints").glob("step-*"))[-1:]
    tensors, header = read_tensors(newest)
    kept = dict(header["state"]["data"])
    header["state"]["data"] = kept | {"accepted": ["\x1b[2J\x07 all\nwell"]}
    write_tensors(newest, tensors, header)
    said = resume(place, "--epochs", "1")
    assert "\x1b[2J" not in said and "\nwell" not in said
    for wrong in ({"copies": ["../../x"]}, {"images": -1}, {"copies": "x"}, {"more": 1}):
        header["state"]["data"] = kept | wrong
        write_tensors(newest, tensors, header)
        assert "is not a training state: data" in resume(place, "--epochs", "2", code=3)


def test_names_of_files_are_shown_without_control_characters(place: Path) -> None:
    first = images(place)[0]
    first.rename(first.with_name("a\x1b[2J\n\udcff.png"))
    label = place / "data/labels/train/000000.txt"
    label.rename(label.with_name("a\x1b[2J\n\udcff.txt"))
    said = resume(place, "--epochs", "2", code=3)
    assert "\x1b[2J" not in said and "000000.png (gone)" in said and r"a\x1b[2J\n\udcff.png (new)" in said
    resume(place, "--epochs", "2", "--allow", "changed-data")
    assert "warning" not in resume(place, "--epochs", "3")


def test_without_its_listing_a_run_takes_that_of_the_cache(trained: Path, place: Path) -> None:
    shutil.copytree(trained / "cache", place / "cache")
    (place / "runs/train/run/checkpoints/data.json").unlink()
    for path in images(place):
        path.touch()
    pad(images(place)[:1])
    assert ": 1 changed: images/train/000000.png (other content)" in resume(place, "--epochs", "2", code=3)


@pytest.mark.parametrize("changed", ["val labels", "val image", "train image"])
def test_figures_on_other_validation_data_do_not_decide_the_best_weights(place: Path, changed: str) -> None:
    run, label = place / "runs/train/run", place / "data/labels/val/000000.txt"
    pad(images(place, "val")[:1])
    resume(place, "--epochs", "2", "--allow", "changed-data")
    (newest,) = sorted((run / "checkpoints").glob("step-*"))[-1:]
    tensors, header = read_tensors(newest)
    header["state"]["progress"] |= {"best_fitness": 0.9, "best_epoch": 1}
    write_tensors(newest, tensors, header)
    if changed == "val labels":
        label.write_text(label.read_text().splitlines()[0] + "\n")
    else:
        # the image of the validation keeps its size
        (pad if changed == "train image" else lambda paths: replace(paths[0]))(
            images(place, changed.split()[0])[:1]
        )
    said = resume(place, "--epochs", "3", "--allow", "changed-data")
    is_other = changed != "train image"
    assert ("the validation data has changed" in said) == is_other
    best = json.loads((run / "results.json").read_text())["best"]
    assert best["epoch"] == (3 if is_other else 1) and (best["fitness"] < 0.9) == is_other
    assert "the validation data has changed" not in resume(place, "--epochs", "4")
