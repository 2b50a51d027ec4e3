"""What breaks first, and the tables of ``--simulate`` and ``--failures-per-hour``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_plan_command import COCO

from yolofleet.cli import main
from yolofleet.hosts import fleet as description
from yolofleet.hosts import login
from yolofleet.parallel import watchdog
from yolofleet.plan import scaling
from yolofleet.plan.forecast import forecast
from yolofleet.plan.library import Library, network_of
from yolofleet.plan.workload import Workload


def limits(*, grows: bool) -> dict[str, scaling.Limit]:
    work = Workload(
        network_of("yolov5l"), 640, 118_287, 5000, 163e3, 300, 128, 16, precision="fp16", per_pass=8
    )
    machine = Library().machine("8xA100", work)
    found = scaling.what_breaks(forecast("8", work, [machine]), grows=grows)
    assert [one.ranks for one in found] == sorted(one.ranks for one in found)
    return {one.part: one for one in found}


def test_the_constants_are_those_of_the_code_that_they_describe() -> None:
    assert scaling.HEARTBEATS_PER_S == watchdog.HEARTBEATS_PER_S
    assert scaling.HEARTBEATS_MISSED == watchdog.HEARTBEATS_MISSED
    assert scaling.LOGINS_AT_ONCE == login.LOGINS_AT_ONCE
    assert scaling.MOST_HOSTS == description.MOST_HOSTS


def test_ranks_without_images_come_first_where_the_step_does_not_grow() -> None:
    found = limits(grows=False)
    # 128 images are 8 micro-batches of 16: the second machine has nothing to do
    assert found["images of a step"].ranks == 16
    assert found["images of a step"].largest == "4,088 of 4,096 ranks idle"
    assert "images of a step" not in limits(grows=True)


def test_the_parts_that_grow_with_the_ranks_break_where_their_limits_say() -> None:
    found = limits(grows=True)
    # 4 heartbeats of N / 16 s exceed a minute from 241 ranks on
    assert found["heartbeats"].ranks == 256
    assert found["heartbeats"].largest == "a rank that hangs is named after 17:04"  # 4 x 256 s
    # 2 x 2 files for each rank of the other 31 hosts and 2 for each host, and 64: 1,118
    assert found["connections to the store"].ranks == 256
    assert found["connections to the store"].there.startswith("1,118 open files")
    # a ring of 4,096 has 8,190 hops
    assert found["count exchange"].largest.startswith("410 ms")
    assert not found["count exchange"].built and found["connections to the store"].built


def plan(tmp_path: Path, *words: str) -> dict[str, Any]:
    out = tmp_path / "plan.json"
    assert main(["plan", *COCO, *words, "--json", str(out)]) == 0
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_a_plan_shows_the_simulation_and_what_breaks_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = plan(tmp_path, "--machine", "8xA100", "--machines", "1,4", "--per-device", "--simulate")
    for one, row in zip(found["simulation"], found["fleets"], strict=True):
        assert one["rate_img_s"] == pytest.approx(row["images_per_s"], rel=0.05)
        assert sum(one["waits"].values()) == pytest.approx(one["step_s"])
    assert {"count exchange", "heartbeats"} <= {one["part"] for one in found["limits"]}
    said = capsys.readouterr().out
    assert "what stops scaling first" in said and "against the formula" in said


def test_a_plan_shows_the_expected_time_with_failures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--machine", "8xA100", "--machines", "1,2", "--per-device"]
    found = plan(tmp_path, *words, "--failures-per-hour", "0.2", "--replace-minutes", "5")
    for one, row in zip(found["failures"], found["fleets"], strict=True):
        assert one["run_s"] > one["expected_s"] > one["without_s"] and one["cost"] > 0
        assert one["machines"] < row["machines"]
    # one machine goes back to a checkpoint at each failure, so Young's and Daly's intervals are right for it
    assert found["failures"][0]["interval_s"] == pytest.approx(found["failures"][0]["daly_s"], rel=0.05)
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
