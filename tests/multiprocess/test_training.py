"""The main job with real processes: the fleet, and dying on the way, do not change what is learned."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import commands
import pytest
from commands import SIZES, YOLOV5N, free_port, in_ranks, killed_at_step, ran, results, yolofleet

from yolofleet.families.weights.format import read_tensors, tensors_sha256
from yolofleet.runs.report.folder import RunFolder
from yolofleet.runs.report.history import read_run

# columns of results.csv in which two runs with equal weights differ
TIMES = ("seconds", "val_seconds", "images_per_s", "data_share", "compute_share", "comm_share")
needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="finds the processes to kill in /proc")


def train_args(data: Path, *more: str | Path) -> list[str | Path]:
    """As ``commands.train_args``, on a network of a real size."""
    return commands.train_args(data, *YOLOV5N, *more)


def weights_of(run: Path) -> str:
    tensors, _ = read_tensors(run / "weights" / "last.safetensors")
    return tensors_sha256(tensors)


@pytest.fixture(scope="module")
def whole(folder: Path, data: Path) -> dict[str, Path]:
    """The same run on one and on two processes, never interrupted."""
    in_ranks(folder, 1, *train_args(data, "--name", "one", "--save-every", "2steps"))
    yolofleet(
        folder, *train_args(data, "--device", "cpu:2", "--name", "two", "--save-every", "2steps", "--plots")
    )
    return {name: folder / "runs" / "train" / name for name in ("one", "two")}


def test_a_run_leaves_behind_what_the_design_says(whole: dict[str, Path]) -> None:
    for run in whole.values():
        for name in ("config.yaml", "results.csv", "results.json", "events.jsonl", "logs/rank-0.log"):
            assert (run / name).stat().st_size > 0
        for name in ("best", "last"):
            assert (run / "weights" / f"{name}.safetensors").exists()
        assert len((run / "results.csv").read_text().splitlines()) == 3  # header, two epochs
        found = results(run)
        assert {"metrics", "per_class", "weights_sha256", "fleet", "versions", "seconds"} <= set(found)
        assert not list(run.rglob(".*tmp"))
    assert (whole["two"] / "logs" / "rank-1.log").exists()
    assert results(whole["two"])["fleet"]["processes"] == 2


def test_the_report_tells_of_both_processes(whole: dict[str, Path]) -> None:
    run = RunFolder(whole["two"])
    assert run.report.stat().st_size > 50_000 and not RunFolder(whole["one"]).report.exists()
    values = read_run(run)
    assert values["finished"] and values["figures"]["errors"]["images"] == 10
    line = values["timeline"]
    assert [rank["rank"] for rank in line["ranks"]] == [0, 1] and all(rank["host"] for rank in line["ranks"])
    assert all(rank["seconds"]["compute"] > 0 for rank in line["ranks"])
    assert sum(rank["slowest_epochs"] for rank in line["ranks"]) == 2 == len(line["spans"])


def test_two_processes_learn_what_one_learns_up_to_rounding(whole: dict[str, Path]) -> None:
    one, _ = read_tensors(whole["one"] / "weights" / "last.safetensors")
    two, _ = read_tensors(whole["two"] / "weights" / "last.safetensors")
    for name, t in one.items():
        if t.is_floating_point():
            assert (two[name] - t).norm() <= 2e-3 * t.norm() + 1e-6, name


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize(("name", "device"), [("one", "cpu"), ("two", "cpu:2")])
def test_killed_in_mid_epoch_and_resumed_gives_the_same_bits(
    folder: Path, data: Path, whole: dict[str, Path], name: str, device: str
) -> None:
    run = folder / "runs" / "train" / f"killed {name}"
    args = train_args(
        data, "--device", device, "--name", run.name, "--save-every", "2steps", "--keep-last", "9"
    )
    killed_at_step(folder, 2, run, *args)
    assert not (run / "results.json").exists(), "it was to die before the end"
    reports = (run / "report.html", run / "report.json")
    for report in reports:
        report.write_text("of an earlier part of the run")
    said = yolofleet(folder, "train", "--resume", run).out
    assert "resumed after step" in said
    assert not any(report.exists() for report in reports), "--no-plots"
    assert weights_of(run) == weights_of(whole[name])
    assert results(run)["metrics"] == results(whole[name])["metrics"]
    assert [line.split(",")[0] for line in (run / "results.csv").read_text().splitlines()] == [
        "epoch",
        "1",
        "2",
    ]


def test_validation_figures_are_equal_to_the_last_digit_on_1_and_3_processes(
    folder: Path, data: Path, whole: dict[str, Path]
) -> None:
    weights = whole["one"] / "weights" / "last.safetensors"
    figures = []
    for ranks in (1, 3):
        name = f"cpu{ranks}"
        in_ranks(folder, ranks, "val", "--weights", weights, "--data", data, "--img", "64",
                 "--batch", "4", "--name", name, "--no-plots", "--threads", "1")  # fmt: skip
        found = results(folder / "runs" / "val" / name)
        figures.append((found["metrics"], found["per_class"], found["images"]))
    assert figures[0] == figures[1] and figures[0][2] == 10


def test_a_validation_beside_the_training_changes_no_figure(
    folder: Path, data: Path, whole: dict[str, Path]
) -> None:
    args = train_args(data, "--save-every", "2steps", "--val-overlap", "--name", "overlap")
    said = in_ranks(folder, 2, *args)
    assert "validation of epoch 1" in said
    runs = [whole["two"], folder / "runs" / "train" / "overlap"]
    rows = []
    for run in runs:
        with (run / "results.csv").open() as file:
            found = list(csv.DictReader(file))
        rows.append([{name: cell for name, cell in row.items() if name not in TIMES} for row in found])
    assert rows[0] == rows[1] and all(row["metrics/mAP50"] for row in rows[0])
    best = rows[0][results(runs[1])["best"]["epoch"] - 1]
    figures = [f"{name} {float(best[f'metrics/{name}']):.3f}" for name in ("mAP50", "mAP50-95")]
    assert f"best.safetensors (epoch {best['epoch']}, {', '.join(figures)})" in said
    for name in ("best", "last"):
        stored = [read_tensors(run / "weights" / f"{name}.safetensors") for run in runs]
        assert len({tensors_sha256(tensors) for tensors, _ in stored}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["run", "launch"])
def test_the_old_and_the_new_torch_launcher_start_the_same_run(
    folder: Path, data: Path, whole: dict[str, Path], launcher: str
) -> None:
    script = Path(__file__).resolve().parents[2] / "train.py"
    command = [sys.executable, "-m", f"torch.distributed.{launcher}", "--nproc_per_node", "2"]
    command += ["--master_port", str(free_port()), str(script)]
    command += ["--data", str(data), *YOLOV5N, "--imgsz", "64", "--batch-size", "8", *SIZES[4:]]
    command += ["--epochs", "2", "--threads", "1", "--device", "cpu", "--name", launcher, "--weights", ""]
    ran(folder, *command, deadline_s=900)
    assert weights_of(folder / "runs" / "train" / launcher) == weights_of(whole["two"])


@pytest.mark.slow
def test_sync_batchnorm_and_unequal_shares_train(folder: Path, data: Path) -> None:
    for name, more in (("sync and shares", ["--sync-bn", "--shares", "3,1"]), ("idle", ["--shares", "1,0"])):
        yolofleet(folder, *train_args(data, "--device", "cpu:2", "--max-steps", "3", "--name", name, *more))
        assert results(folder / "runs" / "train" / name)["steps"] == 3
