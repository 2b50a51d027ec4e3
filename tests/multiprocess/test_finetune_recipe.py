"""From weights of other classes, on few images, a run takes the recipe ``finetune`` by itself, says so, and keeps it when it resumes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import DEADLINE_S, called, in_ranks, results, small_shapes, started, working_in
from small_files import TINY_YAML

from yolofleet.storage.yaml_lines import read_yaml
from yolofleet.support.system.proc import descendants, rank_of

RUN = ["--img", "64", "--epochs", "2", "--threads", "1", "--workers", "0", "--no-plots", "--reduce", "exact"]
NOTE = "note: recipe finetune for new classes from weights on 20 images (fewer than 1,000): steps of 16 images, AdamW, lr0 0.001"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of 20 images in set, weights of a small YOLOv5 network in start.safetensors."""
    made = tmp_path_factory.mktemp("finetune")
    small_shapes(made).parent.rename(made / "set")
    (made / "tiny.yaml").write_text(TINY_YAML)
    with working_in(made):
        done = called("train", "--data", "set/data.yaml", "--cfg", "tiny.yaml", "--device", "cpu", *RUN)
    assert done.code == 0 and "finetune" not in done.err, done.err
    (made / "runs/train/exp/weights/last.safetensors").rename(made / "start.safetensors")
    old = (made / "set/data.yaml").read_text()
    (made / "set/new.yaml").write_text(old.replace("circle", "ring"))
    return made


def images_of_a_step(folder: Path, name: str, *words: str, ranks: int = 1) -> tuple[int, str, str]:
    """Train from the weights; return the images of a step, the output, and the hash of the weights."""
    argv = ["train", "--data", "set/new.yaml", "--weights", "start.safetensors", "--name", name, *RUN, *words]
    with working_in(folder):
        text = in_ranks(folder, ranks, *argv)
        stored = read_yaml(Path("runs/train", name, "config.yaml"))
        digest = results(Path("runs/train", name))["weights_sha256"]
    return int(stored["nominal_batch"].value), text, digest


@pytest.fixture(scope="module")
def alone(folder: Path) -> tuple[int, str, str]:
    return images_of_a_step(folder, "alone")


def test_weights_and_few_images_choose_the_recipe_on_every_fleet(
    folder: Path, alone: tuple[int, str, str]
) -> None:
    images, text, digest = alone
    assert images == 16 and text.count(NOTE) == 1 and "recipe made for 16 images a step" in text
    images, text, together = images_of_a_step(folder, "together", ranks=2)
    assert images == 16 and text.count(NOTE) == 1 and together == digest
    named = images_of_a_step(
        folder, "named", "--recipe", "finetune", "--set", "size_high=1.5", "--max-steps", "1"
    )
    assert named[0] == 16 and NOTE not in named[1]
    assert "64 px, in training 64 to 96 px, drawn for each step" in named[1]


def test_a_resumed_run_keeps_the_recipe(folder: Path, alone: tuple[int, str, str]) -> None:
    images_of_a_step(folder, "short", "--max-steps", "1")
    with working_in(folder):
        done = called("train", "--resume", "runs/train/short", "--max-steps", "0")
        assert done.code == 0 and NOTE not in done.err and "recipe made for 16 images a step" in done.out
        whole = results(Path("runs/train/short"))["weights_sha256"]
    assert whole == alone[2]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
def test_a_restarted_run_keeps_the_recipe(folder: Path) -> None:
    """The launcher starts the ranks again with the settings that the user typed."""
    longer = ("--epochs", "12", "--val-period", "0")
    _, _, undisturbed = images_of_a_step(folder, "undisturbed", *longer)
    argv = [
        *("train", "--data", "set/new.yaml", "--weights", "start.safetensors"),
        *RUN,
        *longer,
        "--device",
        "cpu:2",
    ]
    with started(folder, *argv, "--save-every", "1steps", "--name", "killed", err=subprocess.STDOUT) as run:
        said = ""
        for line in run.stdout or ():
            said += line
            if "epoch 2/" in line:
                break
        os.kill(next(pid for pid in descendants(run.pid) if rank_of(pid) == 1), signal.SIGKILL)
        said += run.communicate(timeout=DEADLINE_S)[0]
    assert run.returncode == 0 and "started again as 2 processes" in said, said
    assert said.count(NOTE) == 1, said
    assert results(folder / "runs/train/killed")["weights_sha256"] == undisturbed


@pytest.mark.parametrize(
    ("words", "images"),
    [
        (("--recipe", "scratch-low"), 64),
        (("--nominal-batch", "32"), 32),
        (("--batch", "20"), 16),  # the recipe does not depend on a typed batch
        (("--set", "lr0=0.005"), 64),
        (("--optimizer", "SGD"), 64),
        (("--set", "fliplr=0", "--set", "size_high=1.5"), 16),
        (("--recipe", "demo"), 16),
        (("--recipe", "dfine-few"), 8),
        (("--data", "set/data.yaml"), 64),  # the weights know the classes
    ],
)
def test_what_the_user_says_comes_first(folder: Path, words: tuple[str, ...], images: int) -> None:
    argv = ["train", "--data", "set/new.yaml", "--weights", "start.safetensors", *RUN, *words, "--dry-run"]
    with working_in(folder):
        done = called(*argv)
    assert done.code == 0 and re.search(rf"nominal_batch +{images}\b", done.out), done.out + done.err
    assert (NOTE.removeprefix("note: ") in done.out) == ("fliplr=0" in words)
    assert done.out.count("warning: recipe dfine-few was made for the family dfine") == ("dfine-few" in words)


def test_a_dry_run_decides_as_the_run_does(folder: Path) -> None:
    argv = ["train", "--data", "set/new.yaml", "--weights", "start.safetensors", "--dry-run", *RUN]
    with working_in(folder):
        done = called(*argv)
        absent = called(*argv[:4], "yolov5s.pt", *argv[5:])
    assert done.code == 0 and NOTE.removeprefix("note: ") in done.out
    assert "steps of 16 images: 2 micro-batches of 8" in done.out and "recipe finetune" in done.out
    assert "depends on files that this machine does not have" in absent.out
