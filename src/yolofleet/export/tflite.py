"""TensorFlow Lite (LiteRT): one file, written by litert-torch, run by ai-edge-litert."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from yolofleet.errors import CheckpointError
from yolofleet.export.facts import ExportFacts
from yolofleet.export.graph import ExportJob
from yolofleet.export.runtime import Runtime, cpu_only
from yolofleet.export.sidecar import read_sidecar, write_sidecar

MAGIC = b"TFL3"  # at byte 4


def write(job: ExportJob, path: Path) -> None:
    import litert_torch

    program = job.exported()
    _square_by_product(program)
    litert_torch.convert(program.module(), (job.example(),)).export(str(path))
    write_sidecar(path, job.facts)


def _square_by_product(program: torch.export.ExportedProgram) -> None:
    """x^2 -> x x, which is the same number; the converter (0.10) knows no power."""
    aten = torch.ops.aten
    for node in program.graph.nodes:
        power = node.target is aten.pow.Tensor_Scalar and node.args[1] == 2
        if node.target is aten.square.default or power:
            node.target = aten.mul.Tensor
            node.args = (node.args[0], node.args[0])
    program.graph_module.recompile()


class TfliteRuntime(Runtime):
    def __init__(self, path: Path, facts: ExportFacts, interpreter: Any, place: str) -> None:
        super().__init__(path, facts, place)
        self._interpreter = interpreter
        self._input = interpreter.get_input_details()[0]["index"]
        self._output = interpreter.get_output_details()[0]["index"]

    def _run(self, images: np.ndarray) -> np.ndarray:
        self._interpreter.set_tensor(self._input, images)
        self._interpreter.invoke()
        return self._interpreter.get_tensor(self._output)


def open_file(path: Path, device: torch.device | None, threads: int) -> Runtime:
    """
    Raises:
        CheckpointError: not ours, or not whole.
    """
    from importlib.metadata import version

    from ai_edge_litert.interpreter import Interpreter

    cpu_only(device, "LiteRT")
    facts = read_sidecar(path)
    with path.open("rb") as file:
        if file.read(8)[4:] != MAGIC:
            raise CheckpointError(f"{path} is not a whole TensorFlow Lite file", hint="use another copy")
    interpreter = Interpreter(model_path=str(path), num_threads=threads)
    interpreter.allocate_tensors()
    return TfliteRuntime(path, facts, interpreter, f"LiteRT {version('ai-edge-litert')}, CPU")
