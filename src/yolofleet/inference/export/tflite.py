"""Write TensorFlow Lite files with litert-torch, and run them with ai-edge-litert (LiteRT).

ai-edge-quantizer makes 8-bit files from the 32-bit ones, by the rules of ``inference.export.quantize``: activations and weights
int8, weights with one scale for each output channel, ranges of activations by moving averages over the calibration images,
and the last convolutions and the decoding of boxes in 32 bits.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from yolofleet.inference.export.export_metadata import (
    metadata_file_of,
    read_metadata_file,
    write_metadata_file,
)
from yolofleet.inference.export.opened import Opened, cpu_only
from yolofleet.inference.export.quantize import head
from yolofleet.storage.atomic import write_bytes
from yolofleet.storage.foreign import open_foreign
from yolofleet.support.errors import CheckpointError

if TYPE_CHECKING:
    from yolofleet.inference.export.graph import ExportJob

MAGIC = b"TFL3"  # at byte 4


def write(job: ExportJob, path: Path) -> None:
    """Write one file, and its metadata beside it."""
    import litert_torch

    program = job.exported()
    _square_by_product(program)
    made = litert_torch.convert(program.module(), (job.example(),))
    if job.metadata.int8:
        assert job.calibration is not None
        with TemporaryDirectory(dir=path.parent, prefix=".int8-") as temporary:
            plain = Path(temporary, "float.tflite")
            made.export(str(plain))
            write_bytes(path, _quantized(plain, job.calibration()))
    else:
        made.export(str(path))
    write_metadata_file(path, job.metadata)


def _quantized(path: Path, batches: Iterator[np.ndarray]) -> bytes:
    """Return the 8-bit form of a file, whose inputs and outputs stay in 32 bits.

    Args:
        batches: calibration images, float32 [N, 3, H, W] RGB in 0..1.
    """
    import torch
    from ai_edge_litert.interpreter import Interpreter
    from ai_edge_quantizer import quantizer, recipe
    from ai_edge_quantizer.algorithm_manager import AlgorithmName
    from ai_edge_quantizer.qtyping import TFLOperationName

    ((signature, ends),) = Interpreter(model_path=str(path)).get_signature_list().items()
    (given,) = ends["inputs"]
    every, untouched = TFLOperationName.ALL_SUPPORTED, AlgorithmName.NO_QUANTIZE
    work = quantizer.Quantizer(str(path), recipe.static_wi8_ai8())
    for end in (TFLOperationName.INPUT, TFLOperationName.OUTPUT):
        work.update_quantization_recipe(".*", end, algorithm_key=untouched)
    for name in _head_tensors(path):  # if an operation has several rules, the quantizer takes the last one
        work.update_quantization_recipe(f"^{re.escape(name)};?$", every, algorithm_key=untouched)
    logging.getLogger("absl").setLevel(logging.ERROR)  # the quantizer logs a line about each operation
    ranges = work.calibrate(
        {signature: [{given: batch} for batch in batches]}, num_threads=torch.get_num_threads()
    )
    return bytes(work.quantize(ranges).quantized_model)


def _head_tensors(path: Path) -> list[str]:
    """Return the names of the results of the operations that stay in 32 bits, see ``quantize.head``."""
    from ai_edge_litert.tools import flatbuffer_utils

    model = flatbuffer_utils.read_model(str(path))
    (graph,) = model.subgraphs
    operators = [
        (
            str(flatbuffer_utils.opcode_to_name(model, operator.opcodeIndex)).endswith("CONV_2D"),
            list(operator.inputs),
            list(operator.outputs),
        )
        for operator in graph.operators
    ]
    return [graph.tensors[tensor].name.decode() for at in head(operators) for tensor in operators[at][2]]


def _square_by_product(program: Any) -> None:
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
    return [path, metadata_file_of(path)]


def open_file(path: Path, device: str | None, threads: int) -> Opened:
    """Load the file for the CPU. Raises as ``opened.open_format``."""
    from importlib.metadata import version

    from ai_edge_litert.interpreter import Interpreter

    cpu_only(device, "LiteRT")
    metadata = read_metadata_file(path)
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
