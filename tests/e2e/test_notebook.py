"""The notebook runs from its first to its last cell, and shows pictures. `make test-extra EXTRA=notebook` installs what it needs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from commands import ran

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "examples" / "tutorial.ipynb"


def test_the_notebook_is_stored_without_results() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


EXECUTE = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=900, kernel_name="python3").execute()  # raises the error of a cell
nbformat.write(notebook, "executed.ipynb")
"""


@pytest.mark.slow
def test_the_notebook_trains_with_two_processes_and_shows_predictions(tmp_path: Path) -> None:
    for module in ("nbclient", "nbformat", "ipykernel"):
        pytest.importorskip(module, reason="needs the extra: notebook")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    small = {"EPOCHS": "1", "IMAGES": "32", "PATH": path, "IPYTHONDIR": str(tmp_path / "ipython")}
    # a process of its own: nbclient leaves the sockets of its event loop open
    ran(tmp_path, sys.executable, "-c", EXECUTE, NOTEBOOK, variables=small)
    cells = json.loads((tmp_path / "executed.ipynb").read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert (tmp_path / "runs" / "train" / "exp" / "logs" / "rank-1.log").exists(), "two processes trained"
