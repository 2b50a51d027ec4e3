"""The tables of ``--simulate`` and ``--failures-per-hour``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_plan_command import COCO

from yolofleet.cli import main


def plan(tmp_path: Path, *words: str) -> dict[str, Any]:
    out = tmp_path / "plan.json"
    assert main(["plan", *COCO, *words, "--json", str(out)]) == 0
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_a_plan_shows_the_simulation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(tmp_path, "--machine", "8xA100", "--machines", "1,4", "--per-device", "--simulate")
    for one, row in zip(found["simulation"], found["fleets"], strict=True):
        assert one["rate_img_s"] == pytest.approx(row["images_per_s"], rel=0.05)
        assert sum(one["waits"].values()) == pytest.approx(one["step_s"])
    assert "against the formula" in capsys.readouterr().out


def test_a_plan_shows_the_expected_time_with_failures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--machine", "8xA100", "--machines", "1,2", "--per-device"]
    found = plan(tmp_path, *words, "--failures-per-hour", "0.2", "--replace-minutes", "5")
    for one, row in zip(found["failures"], found["fleets"], strict=True):
        assert one["run_s"] > one["expected_s"] > one["without_s"] and one["cost"] > 0
        assert one["machines"] < row["machines"]
    # one machine goes back to a checkpoint at each failure, so it saves more often than two
    assert found["failures"][0]["interval_s"] < found["failures"][1]["interval_s"]
    assert "with 0.2 failures an hour of each machine, replaced after 5 minutes" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, message",
    [
        (
            ["--machines", "513", "--simulate"],
            "a simulation takes 1 to 4096 devices, got 4104 on 513 machines",
        ),
        (["--failures-per-hour", "1000"], "the run takes more than 1000 times as long"),
        (["--failures-per-hour", "inf"], "failures"),
        (["--failures-per-hour", "-1"], "failures-per-hour"),
        (["--failures-per-hour", "1", "--replace-minutes", "0"], "replace-minutes"),
    ],
)
def test_nonsense_gets_one_message(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *COCO, "--machine", "8xA100", *words]) == 2
    said = capsys.readouterr().err
    assert message in said and "Traceback" not in said and said.count("Error") == 1
