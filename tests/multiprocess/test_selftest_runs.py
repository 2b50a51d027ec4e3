"""`yolofleet selftest` for real: it passes here, and says why when the contract is broken on purpose."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from commands import yolofleet

from yolofleet.config.schema.verbs import SelftestConfig
from yolofleet.measure.selftest import contract
from yolofleet.measure.selftest.checks import Comparison, plan
from yolofleet.measure.selftest.contract import run_contract
from yolofleet.runs.report.folder import RunFolder
from yolofleet.support.errors import ClusterError
from yolofleet.support.system.proc import descendants

CONFIG = SelftestConfig(device="cpu:2", steps=2, img=64)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "ATEN_CPU_CAPABILITY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "NO AVX"),
    reason="this CPU has only one kind of kernel",
)
@pytest.mark.slow
def test_other_kernels_in_one_run_are_found_and_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    again = "exact: one process again"
    with pytest.raises(ClusterError) as caught:
        run_contract(
            CONFIG,
            titles=["exact: one process", again],
            environments={again: {"ATEN_CPU_CAPABILITY": "default"}},
        )
    assert caught.value.exit_code == 4
    text = caught.value.render()
    assert f"the fleet changed the result: {again}" in text
    assert "mixed hardware: device is cpu" in text and "DEFAULT" in text and "ATEN_CPU_CAPABILITY" in text
    assert "DIFFERS" in capfd.readouterr().out.splitlines()[3]


def test_a_reference_that_cannot_run_is_reported_as_itself(capfd: pytest.CaptureFixture[str]) -> None:
    nowhere = {"exact: one process": {"PYTHONHOME": "/nowhere"}}
    with pytest.raises(ClusterError) as caught:
        run_contract(CONFIG, environments=nowhere)
    assert caught.value.exit_code == 4 and "the processes could not be started" in caught.value.render()
    out = capfd.readouterr().out
    assert len(out.splitlines()) == 2  # no run came to its end


@pytest.mark.slow
def test_the_whole_command(tmp_path: Path) -> None:
    done = yolofleet(tmp_path, "selftest", "--device", "cpu:2", "--steps", "2", "--img", "64", "--json", "-")
    found = json.loads(done.out)
    assert found["contract_holds"] and len(found["runs"]) == 9
    assert "the contract holds here: 5 exact runs" in done.err
    assert all(check["passed"] for check in found["checks"])
    assert [check["name"] for check in found["checks"]][-1] == "one of 2 processes killed"
    assert [path.name for path in tmp_path.iterdir()] == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
def test_a_run_that_does_not_end_after_a_kill_fails_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contract, "ENDS_WITHIN_S", 0.0)
    before = descendants(os.getpid())  # the resource tracker of multiprocessing
    legs = plan("cpu:2")
    settings = Comparison(CONFIG, legs, tmp_path).settings_of(legs[2])
    extra = {"YOLOFLEET_CACHE": str(tmp_path / "cache")}
    check = contract.killed_rank_check(settings, "cpu:2", 2, RunFolder(tmp_path / "run"), extra)
    assert not check["passed"] and check["detail"].startswith("the others did not end within")
    assert descendants(os.getpid()) == before
