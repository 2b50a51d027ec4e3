"""The plan of stages of `make test-gpu`: its runner with small stages, what each stage needs, and how speed is judged."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from gpu.plan import STAGES, Stage, lacking, main
from gpu.speed import COLUMNS, cells_of

from yolofleet.support.system.proc import started_at

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")
# a child in a session of its own, and then for ever
HANGS = """
import pathlib, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(600)
"""


@pytest.mark.slow
def test_a_stage_that_fails_crashes_or_hangs_stops_no_other_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("YOLOFLEET_TEST_GPUS", "cpu")
    child = tmp_path / "child"
    programs = {
        "fails": "print('first'); print('the reason is | here'); raise SystemExit(2)",
        "crashes": "import os; os.kill(os.getpid(), 9)",
        "well": "import os; print(os.environ['YOLOFLEET_TEST_GPUS'])",
        "hangs": HANGS,
    }
    stages = [
        Stage(name, "no GPU", "", 1.0, ["-c", text, str(child)], on="mini" * (name == "well"))
        for name, text in programs.items()
    ]
    away = Stage("away", "two hosts", "", 1.0, ["-c", ""])
    assert main(["--minutes", "0.3", "--out", str(tmp_path / "out")], [away, *stages]) == 1
    told = capsys.readouterr().out
    assert "3 stages failed: fails, crashes, hangs" in told
    results = [line.split(" | ")[0:5:2] for line in (tmp_path / "out/results.md").read_text().splitlines()]
    assert results[2:] == [
        ["| away", "left out", "YOLOFLEET_TEST_HOSTS=a:1,b:1 names no two machines with a GPU each |"],
        ["| fails", "FAILED", "the reason is \\| here |"],
        ["| crashes", "FAILED", " |"],
        ["| well", "passed", "mini |"],
        ["| hangs", "CUT", " |"],
    ]
    assert not started_at(int(child.read_text()))
    assert (tmp_path / "out/fails.log").read_text().startswith("first\n")


def test_only_stages_of_the_plan_can_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--stages", "steps,sped"])
    assert caught.value.code == 2 and "no stages sped; there are selftest, steps," in capsys.readouterr().err


def test_a_stage_is_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("YOLOFLEET_TEST_HOSTS", raising=False)
    plan = {stage.name: stage for stage in STAGES}
    assert "needs 2 GPUs, and torch finds 1" in lacking(plan["two-gpus"], 1, "", 900)
    assert "needs 1 GPUs" in lacking(plan["steps"], 0, "", 900)
    assert "no time" in lacking(plan["runs"], 1, "", 90)
    assert "names no two machines" in lacking(plan["two-hosts"], 8, "", 900)
    runs = [stage.name for stage in STAGES if not lacking(stage, 2, "", 3600)]
    assert runs == [stage.name for stage in STAGES if stage.needs != "two hosts"]
    on_cpus = [stage.name for stage in STAGES if not lacking(stage, 0, "cpu", 90)]
    assert on_cpus == runs, "estimates are those of a GPU"


def test_the_docs_have_the_same_plan() -> None:
    page = (Path(__file__).parents[3] / "docs" / "doctor.md").read_text()
    for stage in STAGES:
        assert f"| `{stage.name}` | {stage.needs} | {stage.what} |" in page, stage.name


def figures(**changes: Any) -> dict[str, Any]:
    """What `yolofleet bench train --json -` says, as far as the stage reads it."""
    shares = {"step": 0.98, "loader": 0.9, "whole run": 0.97, "validation": 0.8, "checkpoint": 0.3}
    rates = {"step": 700.0, "loader": 700.0, "whole run": 500.0, "validation": 2500.0, **changes}
    parts = [{"name": name, "share": share, "rate": rates.get(name, 1.0)} for name, share in shares.items()]
    setup = {"step_images": 64, "precision": "fp16", "reduce": changes.get("reduce", "fast")}
    more = {"model": "yolov5s", "img": 640, "device_memory_mib": 2048, "setup": setup}
    return {"parts": parts, "loop_of_bare_network": 0.9, **more}


def test_missed_goals_are_named_and_an_epoch_of_coco_is_predicted() -> None:
    row = dict(zip(COLUMNS, cells_of(figures(loader=600.0), 1, "NVIDIA H100"), strict=True))
    goals = ("loader / step 0.86 < 0.95", "loop / bare network 0.90 < 0.97", "step 700 img/s < 740")
    assert row["goals missed"] == "; ".join(goals)
    # 118,287 images at 500 img/s, 5,000 images at 2,500 img/s
    assert (row["COCO train"], row["COCO val"], row["GiB"]) == ("3:57", "2.0 s", "2.0")
    exact = cells_of(figures(reduce="exact"), 1, "NVIDIA H100")
    assert exact[3] == "fp16 exact" and exact[-1] == ""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_plan_runs_on_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YOLOFLEET_TEST_GPUS", "cpu")
    without = ",".join(stage.name for stage in STAGES if stage.name != "miniature")  # a test of its own
    assert main(["--minutes", "50", "--stages", without, "--out", str(tmp_path)]) == 0
    assert (tmp_path / "results.md").read_text().count("| passed |") == len(STAGES) - 2
