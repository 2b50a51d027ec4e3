"""Runs the stage ``miniature`` of ``tests/gpu/plan.py``: the files of ``tests/accelerator``, and the steps of ``tests/gpu``, on
the simulated accelerator, which the processes of the tests have from their start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.utils.backend_registration as registration

FOLDER = Path(__file__).resolve().parents[1] / "accelerator"


@pytest.mark.skipif(
    not hasattr(registration, "_setup_privateuseone_for_python_backend")
    or not hasattr(torch.library.Library, "fallback"),
    reason="this torch has no devices made in Python",
)
@pytest.mark.timeout(960)
@pytest.mark.parametrize("marks", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_everything_passes_on_the_miniature_accelerator(marks: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            *("-m", "pytest", "-p", "no:cacheprovider"),
            "--basetemp",
            tmp_path / "t",
            "-m",
            marks,
            *sorted(FOLDER.glob("test_*.py")),
            FOLDER.parent / "gpu" / "test_steps_on_gpus.py",
        ],
        cwd=FOLDER.parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1", "YOLOFLEET_TEST_GPUS": "mini"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
