"""Files and figures are as recorded, and a run that an earlier version left can be resumed.

After a change on purpose: ``python tests/golden/record.py --write``, and look at the difference.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import yolofleet
from golden_run import RESUME, copy_run, found_in, resumed_text
from record import NEEDS, difference, made, stored


@pytest.mark.parametrize(
    "name",
    [
        "folders.txt",
        "figures.txt",
        "export_torchscript.txt",
        pytest.param("selftest.txt", marks=pytest.mark.slow),
    ],
)
def test_is_as_recorded(name: str) -> None:
    changes = difference(name, made(name))
    assert not changes, changes


def test_onnx_is_as_recorded() -> None:
    for package in NEEDS["export_onnx.txt"]:
        pytest.importorskip(package, reason="the extra yolofleet[onnx] is not installed")
    changes = difference("export_onnx.txt", made("export_onnx.txt"))
    assert not changes, changes


def compare(found: dict, recorded: dict) -> None:
    """Counts are equal; floats are equal up to the rounding of other processors and image decoders."""
    floats = found.pop("floats"), recorded.pop("floats")
    assert found == recorded
    assert floats[0] == pytest.approx(floats[1], rel=0.02)
    assert floats[0]["lr"] == pytest.approx(floats[1]["lr"], rel=1e-4)


def test_a_run_of_an_earlier_version_resumes_or_is_refused_untouched(tmp_path: Path) -> None:
    found, recorded = (json.loads(text) for text in (resumed_text(tmp_path), stored("resumed.json")))
    compare(found, recorded)
    assert found["exit"] in (0, 2, 3) and found["changed though refused"] == []


# No hash of weights is recorded: kernels of other processors and other versions of torch round differently, and a
# step amplifies that. What holds everywhere is that equal steps on one machine give equal bits; fleets are compared in
# tests/multiprocess/test_contract.py.
@pytest.mark.slow
def test_a_run_of_an_earlier_version_resumes_on_two_processes(tmp_path: Path) -> None:
    run = copy_run(tmp_path)
    yolofleet(tmp_path, *RESUME, "--device", "cpu:2")
    recorded = json.loads(stored("resumed.json"))
    compare(
        found_in(run),
        {name: value for name, value in recorded.items() if name not in ("exit", "changed though refused")},
    )
