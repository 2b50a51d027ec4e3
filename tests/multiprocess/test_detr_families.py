"""RT-DETR, D-FINE and RF-DETR, with masks too: equal bits on every fleet with images that are mostly background, after a kill too."""

from __future__ import annotations

import csv
import shutil
import sys
from pathlib import Path

import pytest
from commands import called, in_ranks, killed_in_the_middle, results, working_in, yolofleet
from mask_data import small_masks, with_polygons
from walks import sampled

from yolofleet.data.datasets.shapes import make_shapes
from yolofleet.storage.yaml_lines import read_yaml

SMALL = Path(__file__).resolve().parents[1] / "detr_family" / "small_detr.py"
NETWORKS = sampled(
    ("dfine-toy", "dfine-toy-seg", "rtdetr-toy", "rtdetr-toy-seg", "rfdetr-toy", "rfdetr-toy-seg"), 6
)
IMAGES, LABELLED = 30, 3
RUN = [
    "train", "--data", "small shapes/data.yaml", "--recipe-class", "small_detr.py:Small", "--img", "64",
    *("--batch", "10", "--nominal-batch", "10", "--micro-batch", "2", "--optimizer", "AdamW", "--set", "lr0=0.001"),
    *("--no-plots", "--workers", "0", "--threads", "1", "--epochs", "2", "--reduce", "exact"),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of polygons with 90 % background: micro-batches, ranks and steps without any label."""
    made = tmp_path_factory.mktemp("small detr")
    shutil.copy(SMALL, made)
    data = small_masks(made, images=IMAGES, val_images=4)
    labels = sorted((data.parent / "labels" / "train").iterdir())
    assert len(labels) == IMAGES
    for number, file in enumerate(labels):
        if number % (IMAGES // LABELLED):
            file.write_text("")
    return made


def trained(folder: Path, name: str, model: str, ranks: int, *more: str) -> str:
    in_ranks(folder, ranks, *RUN, "--model", model, "--name", name, *more)
    return results(folder / "runs" / "train" / name)["weights_sha256"]


@pytest.fixture(scope="module", params=NETWORKS)
def model(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def one(folder: Path, model: str) -> str:
    return trained(folder, f"{model} one", model, 1)


def test_every_number_of_processes_and_unequal_shares_give_the_same_weights(
    folder: Path, model: str, one: str
) -> None:
    assert trained(folder, f"{model} three", model, 3, "--shares", "1,3,1") == one
    if model.endswith("-seg") or model.startswith("rfdetr"):
        assert trained(folder, f"{model} uneven", model, 2, "--shares", "7,1") == one
    devices = ["--model", model, "--name", f"{model} devices", "--parallel", "dp"]
    in_ranks(folder, 1, *RUN, *devices, device="cpu:2")
    assert results(folder / "runs" / "train" / f"{model} devices")["weights_sha256"] == one


@pytest.mark.slow
def test_synchronised_batch_norm_agrees_with_one_process_when_a_rank_has_no_labels(folder: Path) -> None:
    """The network has several buckets, and a rank without labels leaves out the parameters of denoising."""
    common = ("--reduce", "fast", "--max-steps", "3")
    trained(folder, "synced", "dfine-n", 2, "--sync-bn", "--micro-batch", "5", *common)
    trained(folder, "whole", "dfine-n", 1, "--micro-batch", "10", *common)
    synced, whole = (
        next(csv.DictReader((folder / f"runs/train/{name}/results.csv").read_text().splitlines()))
        for name in ("synced", "whole")
    )
    for term in (key for key in whole if key.startswith("train/")):
        assert float(synced[term]) == pytest.approx(float(whole[term]), rel=0.02, abs=1e-3), term


@pytest.mark.slow
def test_two_devices_give_the_bits_of_one_in_bf16(folder: Path, model: str) -> None:
    """The threads of both devices cast weights that the network uses several times in a pass."""
    half = ("--precision", "bf16")
    devices = ["--model", model, "--name", f"{model} bf16 devices", "--parallel", "dp", *half]
    in_ranks(folder, 1, *RUN, *devices, device="cpu:2")
    two = results(folder / "runs" / "train" / f"{model} bf16 devices")["weights_sha256"]
    assert two == trained(folder, f"{model} bf16", model, 1, *half)


@pytest.mark.skipif(sys.platform != "linux", reason="finds the processes to kill in /proc")
def test_a_killed_run_that_is_resumed_on_fewer_processes_gives_the_same_weights(
    folder: Path, model: str, one: str
) -> None:
    run = folder / "runs" / "train" / f"{model} killed"
    killed_in_the_middle(folder, run, *RUN, "--model", model, "--save-every", "1steps", "--keep-last", "9")
    in_ranks(folder, 1, "train", "--resume", run, "--recipe-class", "small_detr.py:Small")
    assert results(run)["weights_sha256"] == one


def test_images_with_more_labels_than_predictions_are_reported_once(folder: Path) -> None:
    data = make_shapes(folder / "crowd", images=3, val_images=1, img=64, seed=3)
    crowded = data.parent / "labels" / "train"
    for number, count in enumerate((21, 30)):
        file = sorted(crowded.iterdir())[number]
        file.write_text("".join(f"0 0.5 0.5 0.{i:03} 0.2\n" for i in range(101, 101 + count)))
    run = ["crowd/data.yaml" if word == "small shapes/data.yaml" else word for word in RUN]
    with working_in(folder):
        done = called(
            *run,
            *("--batch", "3", "--micro-batch", "1", "--model", "dfine-toy", "--device", "cpu"),
            *("--name", "crowd"),
        )
    assert done.code == 0, done.err
    said = "2 of 3 train images have more labels (up to 30) than the 20 predictions that dfine-toy makes"
    assert (done.out + done.err).count(said) == 1, done.out + done.err


OVERFIT = {
    "rates": "step", "warmup_epochs": 5, "lr0": 0.004, "momentum": 0.9, "weight_decay": 0.0001, "clip_norm": 0.1,
    "ema_decay": 0.98, "ema_tau": 20, "warmup_steps": 0, "flat_fraction": 0, "lr_factors": "", "size_low": 1, "size_high": 1,
    **dict.fromkeys(("mosaic", "scale", "translate", "fliplr", "hsv_h", "hsv_s", "hsv_v"), 0),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("model", ["dfine-small", "rfdetr-small", "rfdetr-small-seg"])
def test_a_small_network_learns_16_images_by_heart(model: str, tmp_path: Path) -> None:
    """600 steps from scratch; minutes on a CPU."""
    shutil.copy(SMALL, tmp_path)
    data = make_shapes(tmp_path / "shapes", images=16, val_images=1, img=128, seed=1)
    data.write_text(data.read_text().replace("images/val", "images/train"))
    if model.endswith("-seg"):
        with_polygons(data)
    sets = [word for name, value in OVERFIT.items() for word in ("--set", f"{name}={value}")]
    yolofleet(
        tmp_path, "train", "--data", data, "--recipe-class", "small_detr.py:Small", "--model", model, "--img", "128",
        *("--batch", "4", "--nominal-batch", "4", "--micro-batch", "4", "--epochs", "150", "--val-period", "150"),
        *("--optimizer", "AdamW", "--device", "cpu", "--workers", "0", "--no-plots", "--name", "heart", *sets),
        deadline_s=3000,
    )  # fmt: skip
    metrics = results(tmp_path / "runs" / "train" / "heart")["metrics"]
    print(metrics)
    assert metrics["mAP50"] > 0.95 and metrics.get("mask mAP50", 1) > 0.95


@pytest.mark.slow
def test_weights_and_few_images_choose_the_recipe_of_the_family(folder: Path) -> None:
    short = ("--img", "64", "--epochs", "2", "--max-steps", "2", "--val-period", "0", "--no-plots")
    network = ("--recipe-class", "small_detr.py:Small", "--device", "cpu", "--threads", "1", "--workers", "0")
    data = folder / "small shapes" / "data.yaml"
    (new := data.with_name("new.yaml")).write_text(data.read_text().replace("circle", "ring"))
    with working_in(folder):
        usual = called("train", "--data", data, "--model", "dfine-toy", *network, *short, "--name", "usual")
        weights = "runs/train/usual/weights/last.safetensors"
        few = called("train", "--data", new, "--weights", weights, *network, *short, "--name", "few")
    assert usual.code == 0 == few.code, usual.err + few.err
    said = "note: recipe dfine-few for new classes from weights on 30 images (fewer than 1,000): steps of 8 images, AdamW"
    assert said in few.err + few.out and "dfine-few" not in usual.err + usual.out
    stored = [read_yaml(folder / "runs/train" / name / "config.yaml") for name in ("usual", "few")]
    found = [[one[key].value for key in ("batch", "nominal_batch", "optimizer")] for one in stored]
    assert found == [[16, 32, "AdamW"], [8, 8, "AdamW"]]
