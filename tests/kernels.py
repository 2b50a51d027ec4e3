"""Drive a Jupyter kernel as a person at a notebook does: run cells, interrupt them when a line appears, and restart the kernel.

``python tests/kernels.py CELLS.json`` runs in a process of its own, because the sockets of a client stay open until its end.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty
from typing import Any

import pytest
from commands import ran

DEADLINE_S = 900.0
MODULES = ("nbclient", "nbformat", "ipykernel")


@dataclass(frozen=True)
class Cell:
    """A cell to run.

    Attributes:
        interrupt_at: texts of its output; the cell is interrupted when the first one appears, again at the next one, ...
        restart: restart the kernel before.
        killed_at: a text of its output; the kernel is killed when it appears, and started again.
    """

    code: str
    interrupt_at: tuple[str, ...] = ()
    restart: bool = False
    killed_at: str = ""


@dataclass(frozen=True)
class Shown:
    """What a cell shows: its output, and the name and text of its error."""

    text: str
    error: str = ""
    words: str = ""


def shown(folder: Path, *cells: Cell, **variables: str) -> list[Shown]:
    """Run cells in one kernel, which works in ``folder``. Skip the test where no kernel is installed."""
    (folder / "cells.json").write_text(json.dumps([asdict(cell) for cell in cells]))
    out = _with_kernel(folder, [__file__, "cells.json"], variables)
    return [Shown(**values) for values in json.loads(out.splitlines()[-1])]


EXECUTE = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=900, kernel_name="python3").execute()  # raises the error of a cell
nbformat.write(notebook, "executed.ipynb")
"""


def executed(folder: Path, notebook: Path, **variables: str) -> list[dict[str, Any]]:
    """Run a notebook in ``folder``; return the outputs of all cells. Skip the test where no kernel is installed."""
    _with_kernel(folder, ["-c", EXECUTE, str(notebook)], variables)
    cells = json.loads((folder / "executed.ipynb").read_text(encoding="utf-8"))["cells"]
    return [output for cell in cells for output in cell.get("outputs", [])]


def _with_kernel(folder: Path, words: list[str], variables: dict[str, str]) -> str:
    for module in MODULES:
        pytest.importorskip(module, reason="needs the extra: notebook")
    own = {"IPYTHONDIR": str(folder / "ipython"), "JUPYTER_RUNTIME_DIR": str(folder / "jupyter")}
    return ran(folder, sys.executable, *words, variables=own | variables, deadline_s=3 * DEADLINE_S).out


def run_cell(manager: Any, client: Any, cell: Cell) -> Shown:
    sent, text, error, waits_for = client.execute(cell.code), "", ("", ""), list(cell.interrupt_at)
    gives_up_at_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < gives_up_at_s:
        try:
            message = client.get_iopub_msg(timeout=1.0)
        except Empty:
            continue
        if message["parent_header"].get("msg_id") != sent:
            continue
        kind, content = message["msg_type"], message["content"]
        if kind == "stream":
            text += content["text"]
        elif kind == "error":
            error = content["ename"], content["evalue"]
        elif kind == "execute_result":
            text += content["data"]["text/plain"] + "\n"
        elif kind == "status" and content["execution_state"] == "idle":
            return Shown(text, *error)
        if cell.killed_at and cell.killed_at in text:
            manager.restart_kernel(now=True)
            client.wait_for_ready(timeout=DEADLINE_S)
            return Shown(text, "killed")
        if waits_for and waits_for[0] in text:
            manager.interrupt_kernel()
            del waits_for[0]
    raise AssertionError(f"the cell did not end:\n{text}")


def main(cells: list[Cell]) -> None:
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3", startup_timeout=DEADLINE_S)
    found = []
    try:
        for cell in cells:
            if cell.restart:
                manager.restart_kernel(now=False)
                client.wait_for_ready(timeout=DEADLINE_S)
            found.append(asdict(run_cell(manager, client, cell)))
    finally:
        client.stop_channels()
        manager.shutdown_kernel()
    print(json.dumps(found))


if __name__ == "__main__":
    main([Cell(**values) for values in json.loads(Path(sys.argv[1]).read_text())])
