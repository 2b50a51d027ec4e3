"""`yolofleet plan`: the answer without torch, the table, the choice, and one message for nonsense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_probe import VALUES

from yolofleet.cli import main
from yolofleet.fleet.plan.forecast import counts_of, duration_span, rounded, span
from yolofleet.fleet.plan.probe import probe_of

COCO = ("--data", "coco", "--images", "118287", "--val-images", "5000", "--model", "yolov5l", "--batch", "128")  # fmt: skip


def plan(tmp_path: Path, *words: str) -> dict[str, Any]:
    out = tmp_path / "plan.json"
    assert main(["plan", *COCO, *words, "--json", str(out)]) == 0
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.fixture
def probe(tmp_path: Path) -> Path:
    path = tmp_path / "probe.json"
    probe_of({**VALUES, "model": "yolov5l", "img": 640}).write(path)
    return path


def test_the_table_fits_a_terminal_of_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *COCO, "--machine", "8xA100", "--machines", "1..8", "--per-device"]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = [line for line in lines if line.startswith("  ") and "8xA100" in line and "network" in line]
    assert len(table) == 8 and max(map(len, table)) <= 80


def test_more_machines_are_faster_and_dearer(tmp_path: Path) -> None:
    rows = plan(tmp_path, "--machine", "8xA100", "--machines", "1,2,4", "--per-device")["fleets"]
    assert [row["devices"] for row in rows] == [8, 16, 32]
    assert [row["run_s"] for row in rows] == sorted((row["run_s"] for row in rows), reverse=True)
    assert [row["cost"] for row in rows] == sorted(row["cost"] for row in rows)
    for row in rows:
        assert row["fast"]["run_s"] < row["run_s"] < row["slow"]["run_s"]
        assert sum(row["seconds"].values()) == pytest.approx(row["run_s"])


def test_the_bottleneck_is_named(tmp_path: Path) -> None:
    slow_link = plan(tmp_path, "--machine", "4xL4", "--machines", "2", "--network", "100mbit", "--per-device")
    assert slow_link["fleets"][0]["binds"] == "all-reduce"
    starved = plan(tmp_path, "--machine", "8xA100", "--model", "yolov5s", "--cache", "none", "--workers", "1")
    assert starved["fleets"][0]["binds"] == "loader"


@pytest.mark.parametrize(
    ("store", "words"),
    [
        ("100mbit,30ms,0.0004", "limited by its bandwidth: it binds in the first epoch"),
        ("1gbit,9000ms", "limited by its latency: it binds in the first epoch"),
        (
            "100gbit,5ms",
            "limited by its bandwidth: the first epoch waits less than a tenth of its time for it",
        ),
    ],
)
def test_the_limit_of_a_store_that_binds_is_named(
    store: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *COCO, "--machine", "8xA100", "--store", store]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert words in shown and ("the requests cost $0.05" in shown) == (",0.0004" in store)


def test_a_store_without_limits_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *COCO, "--data", "s3://bucket/coco.yaml", "--machine", "8xA100"]) == 0
    assert "the store of --data is not counted" in capsys.readouterr().out


def test_measured_hosts_of_unequal_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path))
    values = {**VALUES, "model": "yolov5l", "img": 640}
    slow = [{**row, "seconds": 3 * row["seconds"]} for row in VALUES["passes"]]
    probe_of({**values, "host": "a"}).write(tmp_path / "probes" / "a.json")
    probe_of({**values, "host": "b", "passes": slow}).write(tmp_path / "probes" / "b.json")
    found = plan(tmp_path, "--hosts", "a:cpu:2,b:cpu:2")
    assert found["fleets"][0]["devices"] == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--machine", "8xA900"], "did you mean A100"),
        (["--machine", "8xA100", "--machines", "0"], "--machines 0"),
        (["--machine", "8xA100", "--machines", "3..1"], "has 0 numbers"),
        (["--machine", "8xA100", "--machines", "1..999"], "the most are 64"),
        (["--machine", "8xA100", "--network", "fast"], "--network fast"),
        (["--machine", "8xA100", "--probe", "p.json"], "leave out one"),
        (["--machine", "8xA100", "--prices", "none.yaml"], "none.yaml does not exist"),
        (["--machine", "8xA100", "--model", "yolov9"], "unknown model"),
        (["--probe", "none.json"], "none.json does not exist"),
        (["--machine", "8xA100", "--shares", "1,2"], "needs 8 numbers"),
        (["--machine", "8xA100", "--batch", "auto"], "--batch auto"),
        ([], "there is no probe of this machine"),
        (["--hosts", "a:2,b:2"], "there is no probe of host a"),
    ],
)
def test_nonsense_gets_one_message(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path))
    assert main(["plan", *COCO, *words]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_a_fleet_that_cannot_hold_a_micro_batch_has_no_speed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--machine", "8xH100,4xL4", "--micro-batch", "64"]
    large, small = plan(tmp_path, *words)["fleets"]
    told = capsys.readouterr().out
    assert large["fits"] and large["images_per_s"] > 0
    assert not small["fits"] and small["binds"] == "memory"
    for values in (small, small["fast"], small["slow"]):
        assert values["images_per_s"] is values["run_s"] is values["cost"] is None
    assert "1 x 4xL4 is too small: a micro-batch of 64 images of 640 px needs at least" in told
    assert "and a device of 4xL4 (g6.12xlarge) has 24.0 GiB" in told
    assert main(["plan", *COCO, "--machine", "4xL4", "--micro-batch", "64"]) == 2
    assert "a smaller --micro-batch" in capsys.readouterr().err


def test_several_hosts_are_refused_one_file_of_probes_before_they_are_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "p.json"
    words = ["plan", "probe", "--data", "coco", "--model", "yolov5n", "--hosts", "a.invalid:1,b.invalid:1"]
    assert main([*words, "--out", str(out)]) == 2
    assert "is one file, and there are 2 hosts" in capsys.readouterr().err


def test_several_machines_need_a_link(probe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    probe_of({**VALUES, "sums_between": []}).write(probe)
    assert main(["plan", *COCO, "--probe", str(probe), "--machines", "2"]) == 2
    assert "--network 10gbit" in capsys.readouterr().err
    assert main(["plan", *COCO, "--probe", str(probe), "--machines", "2", "--network", "10gbit"]) == 0


def test_numbers_and_ranges() -> None:
    assert counts_of("1..4,8") == [1, 2, 3, 4, 8]
    assert [rounded(value) for value in (0, 0.1234, 9.87, 12.3, 99.96, 123.4, 118287)] == [
        "0", "0.12", "9.9", "12", "100", "123", "118,000",
    ]  # fmt: skip
    assert span(410.2, 597.8) == "410-598" and span(3.01, 3.02) == "3.0"
    assert duration_span(4000, 9000) == "1.1-2.5 h"


def test_a_plan_shows_the_simulation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*COCO, "--machine", "8xA100", "--per-device", "--simulate"]
    assert main(["plan", *words, "--machines", "1,4", "--json", str(tmp_path / "plan.json")]) == 0
    found = json.loads((tmp_path / "plan.json").read_text())
    for one, row in zip(found["simulation"], found["fleets"], strict=True):
        assert one["rate_img_s"] == pytest.approx(row["images_per_s"], rel=0.05)
        assert sum(one["waits"].values()) == pytest.approx(one["step_s"])
    assert "against the formula" in capsys.readouterr().out
    assert main(["plan", *words, "--machines", "513"]) == 2
    assert "a simulation takes 1 to 4096 devices, got 4104 on 513 machines" in capsys.readouterr().err
