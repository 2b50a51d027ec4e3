"""The runner of `make test-gpu STAGES=all` with small stages of its own, the choice of stages, and how speed is judged."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpu_check import minutes as selftest_minutes
from gpu_check import stages as selftest_stages
from gpu_check.__main__ import main
from gpu_check.machine import Found, Machine, StageFailed
from gpu_check.minutes import Reporter, next_stage, pace_of, run_stages
from gpu_check.results import Record, Results, markdown
from gpu_check.speed import speed_found
from gpu_check.stages import GROUPS, STAGES, Stage, chosen

from yolofleet.support.errors import ConfigError
from yolofleet.support.system.proc import started_at

GPU = Machine(Path("o"), "0", "cuda", "NVIDIA H100", 80.0, has_tf32=True)
LINUX = pytest.mark.skipif(
    sys.platform != "linux", reason="the stages of this test are functions, which only a fork has"
)


def made_data(machine: Machine) -> Found:
    machine.data.parent.mkdir(exist_ok=True)
    machine.data.write_text("")
    return Found("made")


def counts(machine: Machine) -> Found:
    """Pass, and leave a trace of each time."""
    with (machine.folder / "times.txt").open("a") as file:
        file.write("once\n")
    return Found("well", {"value": 1.5}, ["a goal"])


def hangs(machine: Machine) -> Found:
    """Wait for ever, with a child in a session of its own and an orphan."""
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    subprocess.run(
        ["sh", "-c", "sleep 601 & echo $!"], stdout=(machine.folder / "orphan").open("w"), check=True
    )
    (machine.folder / "child").write_text(str(child.pid))
    while True:
        time.sleep(1)


def crashes(_machine: Machine) -> Found:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def fails(_machine: Machine) -> Found:
    print("ConfigError: the reason is here")
    raise StageFailed("a command ended with exit code 2")


def small_stages(**functions: Callable[[Machine], Found]) -> tuple[Stage, ...]:
    named = {"data": made_data, **functions}
    return tuple(Stage(name, "numbers", f"checks {name}", 1, 1, run) for name, run in named.items())


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[Record]:
    monkeypatch.setattr(selftest_minutes, "LEAST_S", 1.0)
    return []


def run_all(
    folder: Path, ended: list[Record], stages: tuple[Stage, ...], monkeypatch: pytest.MonkeyPatch, **more: Any
) -> Results:
    monkeypatch.setattr(selftest_stages, "STAGES", stages)
    reporter = Reporter(lambda *_: None, lambda *_: None, ended.append)
    return run_stages("cpu:2", 0.5, folder, chosen(""), reporter, **{"again": False, **more})


@LINUX
def test_stages_that_fail_crash_or_hang_stop_no_other_one(
    tmp_path: Path, ended: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = small_stages(fails=fails, crashes=crashes, hangs=hangs, counts=counts)
    results = run_all(tmp_path, ended, stages, monkeypatch)
    assert {r.name: r.result for r in ended} == {
        "data": "passed", "fails": "FAILED", "crashes": "FAILED", "hangs": "CUT", "counts": "passed",
    }  # fmt: skip
    assert (
        results.records["fails"].text == "a command ended with exit code 2: ConfigError: the reason is here"
    )
    assert "exit code -9" in results.records["crashes"].text
    for record in ended:
        assert (tmp_path / record.log).is_file()
    for name in ("child", "orphan"):
        assert not started_at(int((tmp_path / name).read_text())), name  # a zombie, if nobody has reaped it
    stored = json.loads((tmp_path / "results.json").read_text())
    assert [row["name"] for row in stored["stages"]] == [stage.name for stage in stages]
    page = (tmp_path / "results.md").read_text()
    assert "| counts | checks counts | passed |" in page and "(logs/hangs.log)" in page


@LINUX
def test_a_second_call_repeats_only_what_did_not_pass(
    tmp_path: Path, ended: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_all(tmp_path, ended, small_stages(fails=fails, counts=counts), monkeypatch)
    ended.clear()
    results = run_all(tmp_path, ended, small_stages(fails=counts, counts=counts, new=counts), monkeypatch)
    assert [r.name for r in ended] == ["new", "fails"]  # what never ran comes first
    assert all(r.result == "passed" for r in results.records.values())
    ended.clear()
    assert len(run_all(tmp_path, ended, small_stages(counts=counts), monkeypatch).records) == 4 and not ended
    run_all(tmp_path, ended, small_stages(counts=counts), monkeypatch, again=True)
    assert [r.name for r in ended] == ["data", "counts"]
    assert len((tmp_path / "times.txt").read_text().splitlines()) == 4


@LINUX
def test_results_of_another_machine_or_program_are_refused(
    tmp_path: Path, ended: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    results = run_all(tmp_path, ended, small_stages(), monkeypatch)
    results.facts["torch"] = "1.0"
    results.write()
    with pytest.raises(ConfigError, match=r"another machine or version: torch was 1\.0"):
        run_all(tmp_path, ended, small_stages(), monkeypatch)
    (tmp_path / "results.json").write_text('{"stages": 3}')
    with pytest.raises(ConfigError, match="has no results of"):
        run_all(tmp_path, ended, small_stages(), monkeypatch)


def test_the_first_stages_keep_their_share_of_the_time() -> None:
    stages = [Stage(name, "numbers", "", 60, 60, made_data) for name in "abc"]
    assert next_stage(stages, 360, GPU) == (stages[0], 300)  # two and a half times a third
    assert next_stage(stages, 600, GPU) == (stages[0], 360)  # six times its estimate
    assert next_stage(stages, 80, GPU) == (stages[0], 80)
    assert next_stage(stages, 74, GPU) is None  # 60 s and a quarter
    short = Stage("d", "numbers", "", 10, 10, made_data)
    assert next_stage([stages[0], short], 50, GPU) == (short, 50)
    # where stages take twice as long, only two of three fit
    assert next_stage(stages, 300, GPU, pace=2.0) == (stages[0], 300)
    assert pace_of([]) == 1.0 and pace_of([(20, 10), (20, 10)]) == 2.0


@pytest.mark.parametrize("minutes", [3, 10, 60])
@pytest.mark.parametrize("device", ["0", "0,1,2,3,4,5,6,7"])
def test_the_estimates_fit_and_more_minutes_give_more_stages(minutes: int, device: str) -> None:
    machine = Machine(Path("o"), device, "cuda", "NVIDIA H100", 80.0, has_tf32=True)
    left_s, names = 60.0 * minutes, []
    waiting = [stage for stage in STAGES if not stage.unfit(machine)]
    while found := next_stage(waiting, left_s, machine):
        waiting.remove(found[0])
        names.append(found[0].name)
        left_s -= found[0].seconds
    assert names[:4] == ["data", "overflow", "device-checks", "equal-bits"]
    if minutes >= 10:
        assert {"killed-rank", "elastic", "passes", "val-overlap", "fast16", "tune"} <= {*names}
        assert "speed-n" in names
    if minutes == 60:
        assert not waiting


def test_each_stage_has_a_name_a_group_and_a_row_in_the_docs() -> None:
    assert len({stage.name for stage in STAGES}) == len(STAGES)
    assert {stage.group for stage in STAGES} == {*GROUPS}
    page = (Path(__file__).parents[3] / "docs" / "doctor.md").read_text()
    for stage in STAGES:
        name = stage.name if stage.name[-2:] not in ("-1", "-2", "-4", "-8") else f"{stage.name[:-1]}N"
        assert f"`{name}`" in page, name


def test_devices_for_one_and_two_processes() -> None:
    several = Machine(Path("o"), "2,3,5", "cuda", "")
    assert (several.one, several.pair, several.first(2), several.devices) == ("2", "2,3", "2,3", 3)
    assert (GPU.one, GPU.pair, GPU.devices) == ("0", "0:2", 1)
    cpu = Machine(Path("o"), "cpu:2", "cpu", "")
    assert (cpu.one, cpu.pair, cpu.first(1), cpu.first(2), cpu.devices) == ("cpu", "cpu:2", "cpu", "cpu:2", 2)


def figures(*, loader: float, loop: float) -> dict[str, Any]:
    """What `yolofleet bench train --json -` says, as far as a stage reads it."""
    shares = {"step": 0.98, "loader": 0.9, "whole run": 0.97, "validation": 0.8, "checkpoint": 0.3}
    rates = {"step": 700.0, "loader": loader, "whole run": 500.0, "validation": 2500.0}
    parts = [{"name": name, "share": share, "rate": rates.get(name, 1.0)} for name, share in shares.items()]
    setup = {"step_images": 64, "precision": "fp16", "reduce": "fast"}
    more = {"model": "yolov5s", "img": 640, "device_memory_mib": 2048, "binds": "network", "setup": setup}
    return {"parts": parts, "loop_of_bare_network": loop, **more}


def test_missed_goals_are_named_and_an_epoch_of_coco_is_predicted() -> None:
    found = speed_found(GPU, figures(loader=600.0, loop=0.9), 1)
    assert found.missed == [
        "loader / step 0.86 < 0.95",
        "loop / bare network 0.90 < 0.97",
        "step 700 img/s < 740",
    ]
    # 118,287 images at 500 img/s, 5,000 images at 2,500 img/s
    assert found.figures["coco_train_s"] == pytest.approx(236.574) and found.figures["coco_val_s"] == 2.0
    exact = figures(loader=700.0, loop=0.9)
    exact["setup"]["reduce"] = "exact"
    assert speed_found(GPU, exact, 1).missed == []


def test_the_page_has_the_columns_of_the_guides() -> None:
    results = Results(Path("o"), {"device": "GPU | one"})
    for count, rate in ((1, 500.0), (2, 900.0)):
        row = {**speed_found(GPU, figures(loader=700.0, loop=1.0), count).figures, "run_img_s": rate}
        results.records[f"epoch-{count}"] = Record(
            f"epoch-{count}", "speed", "yolov5s", "passed", 30.0, "well", "logs/e.log", row
        )
    page = markdown(results)
    assert "| GPUs | batch | memory (GiB) | COCO train | COCO val | speed-up |" in page
    assert (
        "| 1x | 64 | 2.0 | 3:57 | 2.0 s | 1.00 |" in page
        and "| 2x | 64 | 2.0 | 3:57 | 2.0 s | 1.80 |" in page
    )


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--minutes", "3", "--stages", "sped"], "did you mean speed?"),
        (["--minutes", "3", "--device", "99"], "no CUDA device 99"),
    ],
)
def test_mistakes_end_with_exit_code_2(
    argv: list[str],
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert main(argv) == 2
    assert says in capsys.readouterr().err
