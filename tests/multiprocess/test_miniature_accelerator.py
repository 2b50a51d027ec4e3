"""Runs the files of ``tests/accelerator`` in processes of their own, which have the accelerator from their start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.utils.backend_registration as registration

FOLDER = Path(__file__).resolve().parents[1] / "accelerator"
EVERY = {path.name for path in FOLDER.glob("test_*.py")}
HALF = {"test_autobatch.py", "test_runs.py", "test_augment.py"}  # each start of a process takes seconds
GROUPS = [("not slow", HALF), ("not slow", EVERY - HALF)]


@pytest.mark.skipif(
    not hasattr(registration, "_setup_privateuseone_for_python_backend")
    or not hasattr(torch.library.Library, "fallback"),
    reason="this torch has no devices made in Python",
)
@pytest.mark.timeout(960)
@pytest.mark.parametrize(
    ("marks", "names"),
    [*GROUPS, pytest.param("slow", EVERY, marks=pytest.mark.slow)],
    ids=lambda value: value if isinstance(value, str) else min(value),
)
def test_everything_passes_on_the_miniature_accelerator(marks: str, names: set[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "--basetemp",
            tmp_path / "t",
            "-m",
            marks,
            *(FOLDER / name for name in sorted(names)),
        ],
        cwd=FOLDER.parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
