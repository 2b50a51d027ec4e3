"""The notebook runs from its first to its last cell, and shows pictures. `make test-notebook` installs what it needs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from commands import environment

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "examples" / "tutorial.ipynb"


def test_the_notebook_is_stored_without_results() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


@pytest.mark.slow
def test_the_notebook_trains_with_two_processes_and_shows_predictions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbformat = pytest.importorskip("nbformat", reason="needs the extra: notebook")
    nbclient = pytest.importorskip("nbclient", reason="needs the extra: notebook")
    pytest.importorskip("ipykernel", reason="needs the extra: notebook")
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("EPOCHS", "1")
    monkeypatch.setenv("IMAGES", "32")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()  # raises the error of a cell
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    config = tmp_path / "runs" / "train" / "exp" / "logs" / "rank-1.log"
    assert config.exists(), "two processes trained"
