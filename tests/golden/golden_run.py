"""The stored run: a training that ended in the middle of its second epoch, with its data set and its network."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import cv2
from commands import called, working_in
from small_files import TINY_YAML

from yolofleet.data.datasets.shapes import make_shapes
from yolofleet.families.weights.format import read_tensors, write_tensors

HERE = Path(__file__).resolve().parent
STORED = HERE / "run"  # holds: set, thin.yaml, exp (the run's folder)
EPOCHS, STEPS_OF_EPOCH, STEPS_DONE = 2, 3, 4
HOST = "host-a"  # in place of the name of the machine that made the run
THIN_YAML = TINY_YAML.replace("width_multiple: 0.125", "width_multiple: 0.03125")  # 5,310 parameters
SMALLEST = [
    "--img", "64", "--batch", "2", "--nominal-batch", "2", "--micro-batch", "1", "--workers", "0", "--threads", "1",
]  # fmt: skip
RESUME = ["train", "--resume", "exp", "--max-steps", "0"]
COMPARED = ("lr", "train/box_loss", "train/obj_loss", "train/cls_loss")  # floats: equal up to rounding only
TRAIN = ["train", "--data", "set", "--cfg", "thin.yaml", *SMALLEST, "--epochs", str(EPOCHS)]


def copy_run(folder: Path) -> Path:
    """Copy the stored run, its data set and its network into ``folder``; return the run's folder."""
    shutil.copytree(STORED, folder, dirs_exist_ok=True)
    return folder / "exp"


def write_run(folder: Path) -> None:
    """Replace the stored run by one that this version trains. Only needed when old runs are refused on purpose.

    Args:
        folder: an empty one to work in.
    """
    make_shapes(folder / "set", images=EPOCHS * STEPS_OF_EPOCH, val_images=3, img=64, seed=3)
    for png in sorted((folder / "set").rglob("*.png")):  # stored as JPEG: a fifth of the size
        cv2.imwrite(str(png.with_suffix(".jpg")), cv2.imread(str(png)), [cv2.IMWRITE_JPEG_QUALITY, 80])
        png.unlink()
    (folder / "thin.yaml").write_text(THIN_YAML, encoding="utf-8")
    with working_in(folder):
        done = called(
            *TRAIN, "--device", "cpu", "--max-steps", str(STEPS_DONE), "--keep-last", "1", "--no-plots",
            "--project", ".",
        )  # fmt: skip
    assert done.code == 0, done.err
    shutil.rmtree(folder / "cache")
    name_host(folder / "exp")
    shutil.rmtree(STORED, ignore_errors=True)
    shutil.copytree(folder, STORED)


def name_host(run: Path) -> None:
    """Replace the machine's name in the files of a run, so that the stored files name no machine."""
    for path in run.rglob("*.jsonl"):
        events = [json.loads(line) | {"host": HOST} for line in path.read_text(encoding="utf-8").splitlines()]
        path.write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")
    figures = json.loads((run / "results.json").read_text(encoding="utf-8"))
    figures["fleet"]["hosts"] = [HOST]
    (run / "results.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    for path in (run / "checkpoints").glob("*.safetensors"):
        tensors, header = read_tensors(path)
        header["state"]["fingerprint"]["fleet"]["host"] = HOST
        write_tensors(path, tensors, header)


def contents(place: Path) -> dict[str, bytes]:
    """Return the files below a folder, without caches and locks."""
    return {
        path.relative_to(place).as_posix(): path.read_bytes()
        for path in place.rglob("*")
        if path.is_file() and path.relative_to(place).parts[0] != "cache" and path.name != ".lock"
    }


def resumed_text(place: Path) -> str:
    """Resume the stored run in the empty folder ``place`` to its end; return what came of it.

    Should this version refuse the run, nothing of it may have changed but the logs that tell of the attempt.
    """
    run = copy_run(place)
    before = contents(run)
    with working_in(place):
        done = called(*RESUME)
    after = contents(run)
    changed = [name for name in {*before, *after} if before.get(name) != after.get(name)]
    spoilt = sorted(name for name in changed if done.code and not name.startswith(("logs", "events")))
    found = {"exit": done.code, "changed though refused": spoilt, **found_in(run)}
    return lined(found) + "\n"


def lined(values: dict[str, Any]) -> str:
    """Return JSON with a line for each key."""
    rows = [f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
    return "{\n" + ",\n".join(rows) + "\n}"


def found_in(run: Path) -> dict[str, Any]:
    """Return what a run has reached."""
    with (run / "results.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    figures = json.loads((run / "results.json").read_text(encoding="utf-8"))
    events = (run / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return {
        "epochs": [int(row["epoch"]) for row in rows],
        "steps": [int(row["step"]) for row in rows],
        "images": [int(row["images"]) for row in rows],
        "results": [figures["steps"], figures["images_seen"], figures["best"]["epoch"]],
        "states": sorted(path.name for path in (run / "checkpoints").iterdir()),
        "events": [json.loads(line)["kind"] for line in events],
        "floats": {name: float(f"{float(rows[-1][name]):.3g}") for name in COMPARED},
    }
