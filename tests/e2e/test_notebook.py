"""The notebooks run from their first to their last cell, and a kernel trains as docs/notebooks.md says.

`make test-extra EXTRA=notebook` installs what it needs.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import results, small_shapes
from kernels import Cell, executed, shown
from pages import BLOCKS, ROOT
from small_files import TINY

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_results(notebook: Path) -> None:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("name", "run"), [("tutorial", "exp"), ("two-gpus", "two")])
def test_a_notebook_trains_with_two_processes(tmp_path: Path, name: str, run: str) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    outputs = executed(tmp_path, ROOT / "examples" / f"{name}.ipynb", EPOCHS="1", IMAGES="32", PATH=path)
    if name == "tutorial":
        assert any("image/png" in output.get("data", {}) for output in outputs), "it shows predictions"
    lines = [line for output in outputs for line in output.get("text", [])]
    assert any(line.startswith("epoch 1/1: ") for line in lines), "the cell shows the progress"
    assert (tmp_path / "runs" / "train" / run / "logs" / "rank-1.log").exists(), "two processes trained"
    assert name == "tutorial" or (tmp_path / "two.zip").is_file()


# -- interrupts, and a new kernel ------------------------------------------------------------------------------------

SIZES = {"img": 64, "batch": 8, "nominal_batch": 8, "micro_batch": 2, "threads": 1, "workers": 1}
OTHERS = {"plots": False, "val_period": 0, "reduce": "exact", "device": "cpu:2"}


def train(data: Path, **settings: Any) -> str:
    """Return the code of a cell that trains."""
    given = {"data": str(data), **SIZES, **OTHERS, **settings}
    return f"from yolofleet import Model\nrun = Model({str(TINY)!r}).train(**{given!r})\nrun.weights.name"


# a rank that was forked from the kernel would have the kernel's modules, and its CUDA, which does not survive a fork
MODULES = """
import os, sys
from pathlib import Path
from yolofleet import Callback

class Modules(Callback):
    all_ranks = True

    def start(self, run):
        Path(f"modules-of-{os.getpid()}.txt").write_text(str("ipykernel" in sys.modules))
"""


def at_an_epoch(epoch: int) -> str:
    return f"epoch {epoch}/40: "


@pytest.mark.slow
@pytest.mark.long
def test_an_interrupt_saves_and_stops_and_a_second_one_ends_at_once(tmp_path: Path) -> None:
    """The run that goes on after both has the weights of one that nobody interrupted."""
    data = small_shapes(tmp_path)
    (tmp_path / "modules.py").write_text(MODULES)
    (resume,) = [b.text for b in BLOCKS if b.page.name == "notebooks.md" and b.remark]
    once, two, ended, quiet = shown(
        tmp_path,
        Cell(train(data, epochs=40, callbacks=["modules.py:Modules"]), interrupt_at=(at_an_epoch(2),)),
        Cell(resume, interrupt_at=("epoch ", "Ctrl-C again ends at once")),
        Cell(f"{resume}\nrun.weights.name"),
        Cell(train(data, epochs=40, device="cpu", name="quiet")),
    )
    assert [file.read_text() for file in tmp_path.glob("modules-of-*.txt")] == ["False", "False"]
    assert once.error == "Stopped" and "the state is saved" in once.words
    assert two.error == "Stopped", "and a second interrupt does no harm if the run has just ended"
    assert "resumed after step" in two.text and "resumed after step" in ended.text
    for cell in (ended, quiet):
        assert not cell.error and "'best.safetensors'" in cell.text, cell.words
    runs = [results(tmp_path / "runs/train" / name) for name in ("exp", "quiet")]
    assert runs[0]["weights_sha256"] == runs[1]["weights_sha256"]


@pytest.mark.slow
@pytest.mark.long
def test_a_run_of_a_killed_kernel_saves_its_state(tmp_path: Path) -> None:
    data = small_shapes(tmp_path)
    resume = f"""
import time
from yolofleet import Model
from yolofleet.support.errors import ConfigError
for _ in range(100):
    try:
        Model({str(TINY)!r}).train(resume="runs/train/exp")
    except ConfigError as problem:  # until the run has saved, it keeps its folder
        assert "another process is writing into" in problem.what, problem
        time.sleep(1.0)
"""
    killed, resumed = shown(
        tmp_path,
        Cell(train(data, epochs=400), killed_at="epoch 2/400: "),
        Cell(resume, interrupt_at=(" img/s ",)),
    )
    assert killed.error == "killed" and resumed.error == "Stopped", resumed
    assert "resumed after step" in resumed.text
    assert (tmp_path / "runs/train/exp/logs/rank-0.log").read_text().count("the state was saved") == 2


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="host agents run on Linux")
def test_a_detached_run_survives_interrupts_and_a_new_kernel(tmp_path: Path) -> None:
    data = small_shapes(tmp_path)
    (tmp_path / "tmp").mkdir()
    attach = "import yolofleet\nrun = yolofleet.attach({})\nrun.weights.name"
    first, again, end, none = shown(
        tmp_path,
        Cell(train(data, epochs=40, detach=True), interrupt_at=(at_an_epoch(1),)),
        Cell(attach.format(""), interrupt_at=(at_an_epoch(2),), restart=True),
        Cell(attach.format("'runs/train/exp'"), restart=True),
        Cell(attach.format("")),
        TMPDIR=str(tmp_path / "tmp"),
    )
    for cell in (first, again):
        assert cell.error == "KeyboardInterrupt"
        assert "goes on; to see it again: " in cell.text and "yolofleet fleet stop exp-" in cell.text
    assert not end.error and "'best.safetensors'" in end.text, end
    assert all(text in end.text for text in (at_an_epoch(1), at_an_epoch(40), "results are in "))
    assert "no running detached run" in none.words
