"""What a rank measures of itself for its heartbeats."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from yolofleet.runs.report.clock import Clock
from yolofleet.support.system.proc import host_temperature_c, resident_bytes
from yolofleet.training.parallel.activity import Gauges


def test_speed_is_that_of_the_ranks_own_work_and_of_the_last_seconds() -> None:
    now_s = 0.0
    clock, gauges = Clock(now=lambda: now_s), Gauges(torch.device("cpu"))
    clock.training()
    assert gauges.read(clock)["rate_img_s"] == 0.0  # nothing measured yet
    for compute_s in (*[1.0] * 5, *[2.0] * 40):
        now_s += compute_s
        with clock("comm"):
            now_s += 1.0
        clock.step(64, own=16)
        found = gauges.read(clock)
    assert found["rate_img_s"] == 8.0  # 16 images in 2 s; the faster steps are forgotten
    assert found["waits"] == pytest.approx(1 / 3, abs=1e-3)
    assert found.keys() == {"rate_img_s", "waits", "memory_gib", "temperature_c"}


def test_a_rank_without_a_clock_tells_its_memory() -> None:
    found = Gauges(torch.device("cpu")).read(None)
    assert found["rate_img_s"] == 0.0
    assert found["memory_gib"] == pytest.approx(resident_bytes() / 2**30, rel=0.5)


def test_a_driver_that_fails_costs_only_its_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fail(*_: object) -> float:
        calls.append(1)
        raise OSError("no driver")

    monkeypatch.setattr("yolofleet.training.parallel.activity.host_temperature_c", fail)
    gauges = Gauges(torch.device("cpu"))
    for _ in range(30):
        assert gauges.read(None)["temperature_c"] == 0.0
    assert len(calls) == 1  # it is not asked again


def test_the_warmest_processor_of_the_host_counts(tmp_path: Path) -> None:
    for n, (kind, temperature) in enumerate(
        [("x86_pkg_temp", "61000"), ("iwlwifi_1", "90000"), ("acpitz", "")]
    ):
        zone = tmp_path / f"thermal_zone{n}"
        zone.mkdir()
        (zone / "type").write_text(f"{kind}\n")
        (zone / "temp").write_text(temperature)
    assert host_temperature_c(tmp_path) == 61.0
    assert host_temperature_c(tmp_path / "none") == 0.0
