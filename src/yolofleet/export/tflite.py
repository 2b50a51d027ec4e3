"""Write TensorFlow Lite files with litert-torch, and run them with ai-edge-litert (LiteRT)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from yolofleet.errors import CheckpointError
from yolofleet.export.sidecar import read_sidecar, sidecar_of, write_sidecar
from yolofleet.export.trial import Opened, cpu_only
from yolofleet.files.foreign import open_foreign

if TYPE_CHECKING:
    import torch

    from yolofleet.export.graph import ExportJob

MAGIC = b"TFL3"  # at byte 4


def write(job: ExportJob, path: Path) -> None:
    """Write one file, and its metadata beside it."""
    import litert_torch

    program = job.exported()
    _square_by_product(program)
    litert_torch.convert(program.module(), (job.example(),)).export(str(path))
    write_sidecar(path, job.metadata)


def _square_by_product(program: torch.export.ExportedProgram) -> None:
    """Replace x^2 by the equal product x * x, because the converter (0.10) does not support powers."""
    import torch

    aten = torch.ops.aten
    for node in program.graph.nodes:
        power = node.target is aten.pow.Tensor_Scalar and node.args[1] == 2
        if node.target is aten.square.default or power:
            node.target = aten.mul.Tensor
            node.args = (node.args[0], node.args[0])
    program.graph_module.recompile()


def parts(path: Path) -> list[Path]:
    """Return the file and its metadata."""
    return [path, sidecar_of(path)]


def open_file(path: Path, device: str | None, threads: int) -> Opened:
    """Load the file for the CPU.

    Raises:
        CheckpointError: the file is incomplete, or its metadata is missing.
        ConfigError: ``device`` is not the CPU.
    """
    from importlib.metadata import version

    from ai_edge_litert.interpreter import Interpreter

    cpu_only(device, "LiteRT")
    metadata = read_sidecar(path)
    with open_foreign(path) as file:
        if file.read(8)[4:] != MAGIC:
            raise CheckpointError(f"{path} is not a complete TensorFlow Lite file", hint="use another copy")
    interpreter = Interpreter(model_path=str(path), num_threads=threads)
    interpreter.allocate_tensors()
    given, result = (
        details[0]["index"] for details in (interpreter.get_input_details(), interpreter.get_output_details())
    )

    def run(images: np.ndarray) -> np.ndarray:
        interpreter.set_tensor(given, images)
        interpreter.invoke()
        rows: np.ndarray = interpreter.get_tensor(result)
        return rows

    return Opened(metadata, f"LiteRT {version('ai-edge-litert')}, CPU", run)
