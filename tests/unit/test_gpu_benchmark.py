"""`make bench-gpu`: its floors, and its end on a machine without a GPU."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu.py"


@pytest.fixture(scope="module")
def gpu() -> Any:
    spec = spec_from_file_location("bench_gpu", PROGRAM)
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def figures(*, loader: float, loop: float) -> dict[str, Any]:
    """What `yolofleet bench train --json -` says, as far as the check reads it."""
    shares = {"step": 0.98, "loader": 0.9, "whole run": 0.97, "validation": 0.8, "checkpoint": 0.3}
    rates = {"step": 1000.0, "loader": loader}
    parts = [{"name": name, "share": share, "rate": rates.get(name, 1.0)} for name, share in shares.items()]
    return {"parts": parts, "loop_of_bare_network": loop}


def test_parts_above_their_floors_pass(gpu: Any) -> None:
    found = gpu.ratios(figures(loader=950.0, loop=0.97))
    assert found.keys() == gpu.FLOORS.keys() and found["loader / step"] == pytest.approx(0.95)
    assert gpu.missed(found, gpu.FLOORS) == []


def test_each_missed_floor_is_named(gpu: Any) -> None:
    found = gpu.ratios(figures(loader=940.0, loop=0.9))
    assert gpu.missed(found, gpu.FLOORS) == ["loader / step 0.94 < 0.95", "loop / bare network 0.90 < 0.97"]
    assert gpu.missed(found, gpu.EXACT_FLOORS) == ["loader / step 0.94 < 0.95"]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_ends_with_a_message() -> None:
    done = subprocess.run([sys.executable, str(PROGRAM)], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert "needs a GPU" in done.stderr and "Traceback" not in done.stderr
