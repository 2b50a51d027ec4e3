"""The statistics of benchmarks/accuracy_study.py by hand, and its way through interruptions with a stand-in for both trainers."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
import accuracy_study
from accuracy_study import ARMS, Arm, core_hours, main, read_rows, runs_left
from seed_intervals import conclusion, difference_interval, mean_interval, report, t_quantile


@pytest.mark.parametrize(
    ("freedom", "value"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (7, 2.3646), (14, 2.1448), (120, 1.9799)]
)
def test_quantiles_of_t_are_those_of_printed_tables(freedom: int, value: float) -> None:
    assert t_quantile(0.975, freedom) == pytest.approx(value, abs=1e-4)


def test_mean_and_difference_of_hand_worked_seeds() -> None:
    # mean 3, variance 2.5, error sqrt(2.5 / 5) = 0.70711, times t(4) = 2.7764
    assert mean_interval([1, 2, 3, 4, 5]) == pytest.approx((3, 1.9632), abs=1e-3)
    # variances / n: 2.5 / 5 = 0.5 and 2 / 2 = 1; freedom 1.5^2 / (0.5^2 / 4 + 1^2 / 1) = 2.1176
    difference, half = difference_interval([1, 2, 3, 4, 5], [1, 3])
    assert difference == 1
    assert half == pytest.approx(math.sqrt(1.5) * t_quantile(0.975, 2.1176), abs=1e-3)
    # equal sizes and variances: the pooled test with n1 + n2 - 2 = 4, sqrt(2 / 3) x 2.7764
    assert difference_interval([1, 2, 3], [2, 3, 4]) == pytest.approx((-1, 2.2670), abs=1e-3)
    assert difference_interval([1, 1], [0, 0]) == (1, 0)
    assert math.isnan(mean_interval([1])[1]) and math.isnan(difference_interval([1], [1, 2])[1])


def test_a_conclusion_follows_from_the_interval() -> None:
    assert conclusion(0.01, 0.02) == conclusion(-0.02, 0.02) == "differs by less than the interval"
    assert (conclusion(0.03, 0.02), conclusion(-0.03, 0.02)) == ("better", "lower")
    assert conclusion(0.03, math.nan) == "too few seeds"


def test_runs_are_interleaved_over_arms_and_finished_ones_are_left_out() -> None:
    arms = [Arm("scratch/a", "ours", 2), Arm("scratch/b", "ours", 1)]
    rows = [{"arm": "scratch/b", "seed": 0, "cpu_s": 7200, "epochs": 20}]
    assert [(arm.name, seed) for arm, seed in runs_left(arms, [], [])] == [
        ("scratch/a", 0),
        ("scratch/b", 0),
        ("scratch/a", 1),
    ]
    assert runs_left(arms, rows, []) == [(arms[0], 0), (arms[0], 1)]
    assert runs_left(arms, rows, [5]) == [(arms[0], 5), (arms[1], 5)]
    assert core_hours(arms[1], 100, rows) == 10  # 360 s an epoch


def test_a_row_that_a_crash_cut_off_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_text('{"seed": 0}\n{"se')
    assert read_rows(tmp_path / "x") == [{"seed": 0}]
    accuracy_study.add_row(tmp_path / "x", {"seed": 1})
    assert read_rows(tmp_path / "x") == [{"seed": 0}, {"seed": 1}]


# -- runs with a stand-in ----------------------------------------------------------------------------------------

STAND_IN = """#!{python}
import json, sys
from pathlib import Path
words = sys.argv[1:]
if words[0] == "-c":
    sys.exit(print("stand-in 1"))
with open({calls!r}, "a") as file:
    print(json.dumps(words), file=file)
if words[2] == "val":
    Path(words[words.index("--json") + 1]).write_text('{{"metrics": {{"mAP50": 0.5, "mAP50-95": 0.25}}}}')
    sys.exit()
run = Path("run")
(run / "checkpoints").mkdir(parents=True, exist_ok=True)
(run / "checkpoints" / "step-1.safetensors").touch()
if Path({fault!r}).exists():
    Path({fault!r}).unlink()
    sys.exit("pulled the plug")
(run / "results.csv").write_text("epoch\\n0\\n1\\n")
(run / "results.json").touch()
"""


def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, list[list[str]]]:
    """Run the study with two epochs and seed 0; return its exit status and the commands since the last call."""
    calls, python = tmp_path / "calls", tmp_path / "python"
    calls.write_text("")
    python.write_text(STAND_IN.format(python=sys.executable, calls=str(calls), fault=str(tmp_path / "fault")))
    python.chmod(0o755)
    for split in ("images/val", "labels/val"):
        (tmp_path / "data" / split).mkdir(parents=True, exist_ok=True)
    (tmp_path / "data/images/val/b.jpg").touch()
    (tmp_path / "data/images/val/a.jpg").touch()
    (tmp_path / "data/data.yaml").write_text("val: images/val\nnames: [x]\n")
    monkeypatch.setattr(accuracy_study, "PYTHON", str(python))
    paths = ["--data", str(tmp_path / "data/data.yaml"), "--work", str(tmp_path / "work")]
    results = ["--results", str(tmp_path / "results.jsonl"), "--rival-python", str(python)]
    status = main([*paths, *results, "--epochs", "2", "--seeds", "0", "--poll-s", "0.01", *words])
    return status, [json.loads(line) for line in calls.read_text().splitlines()]


def test_an_interrupted_run_of_ours_resumes_and_one_of_yolov5_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for program, arm in (("yolofleet", "scratch/ours"), ("yolov5.train", "scratch/yolov5")):
        (tmp_path / "fault").touch()
        status, calls = study(tmp_path, monkeypatch, "--arms", arm)
        assert status == 1 and [words[1] for words in calls] == [program]
        assert "pulled the plug" in capsys.readouterr().err
        status, calls = study(tmp_path, monkeypatch, "--arms", arm)
        assert status == 0 and [words[1] for words in calls] == [program, "yolofleet"]
        assert ("--resume" in calls[0]) == (program == "yolofleet")
        assert study(tmp_path, monkeypatch, "--arms", arm) == (0, [])
    rows = read_rows(tmp_path / "results.jsonl")
    assert [(row["arm"], row["seed"], row["mAP50"], row["pieces"]) for row in rows] == [
        ("scratch/ours", 0, 0.5, 2),
        ("scratch/yolov5", 0, 0.5, 2),
    ]


def test_yolov5_trains_on_a_copy_that_validates_one_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fault").touch()
    _, calls = study(tmp_path, monkeypatch, "--arms", "scratch/yolov5")
    copy = Path(calls[0][calls[0].index("--data") + 1])
    assert copy.is_relative_to(tmp_path / "work")
    assert (copy.parent / "one.txt").read_text() == f"{copy.parent / 'images/val/a.jpg'}\n"
    assert (tmp_path / "data/data.yaml").read_text() == "val: images/val\nnames: [x]\n"


def test_a_run_whose_epochs_are_incomplete_gives_no_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _ = study(tmp_path, monkeypatch, "--arms", "scratch/ours", "--epochs", "3")
    assert status == 1 and "has 2 epochs instead of 3" in capsys.readouterr().err
    assert not read_rows(tmp_path / "results.jsonl")


def test_an_arm_with_other_options_than_its_rows_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra = ("--arms", "scratch/x", "--extra")
    _, calls = study(tmp_path, monkeypatch, *extra, "x=--set lr0=0.02")
    assert calls[0][-2:] == ["--set", "lr0=0.02"]
    with pytest.raises(SystemExit, match=r"other options: --set lr0=0\.02"):
        study(tmp_path, monkeypatch, *extra, "x=--set lr0=0.03")


def test_arms_that_cannot_run_are_left_out_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, calls = study(tmp_path, monkeypatch, "--rival-python", str(tmp_path / "none"), "--hours", "0")
    assert (status, calls) == (0, [])
    printed = capsys.readouterr().out
    assert [arm.name for arm in ARMS if f"left out: {arm.name} " in printed] == [
        "scratch/yolov5",
        "finetune/ours",
        "finetune/yolov5",
    ]


def test_a_report_compares_the_arms_of_a_group() -> None:
    def row(arm: str, seed: int, value: float) -> dict[str, Any]:
        kept = {"epochs": 2, "commit": "0123456789", "clean": True, "seed": seed}
        return {"arm": arm, "mAP50": value, "mAP50-95": value / 2, **kept}

    values = {"scratch/yolov5": (2, 3, 4), "scratch/ours": (1, 2, 3), "finetune/ours": (9, 9)}
    text = report([row(arm, k, v) for arm, all_values in values.items() for k, v in enumerate(all_values)])
    # half widths: 4.3027 x 1 / sqrt(3) = 2.4842 of a mean, 2.2670 of the difference
    assert "| scratch/ours | 3 | 2 | 2.0000 ± 2.4841 | 1.0000 ± 1.2421 | 01234567 |" in text
    assert (
        "| scratch/ours - scratch/yolov5 | -1.0000 ± 2.2670 | -0.5000 ± 1.1335 | mAP50 differs by less"
        in text
    )
    assert text.count(" - ") == 1
