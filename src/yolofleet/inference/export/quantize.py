"""Quantize an ONNX graph to 8 bits (static, QDQ form) with ONNX Runtime; OpenVINO computes the same graph in 8 bits.

Activations are uint8 with one scale for each tensor, weights int8 with one scale for each output channel (arXiv:2004.09602).
The range of an activation is a moving average of the smallest and the largest value of each calibration image, so that one
image with outliers does not widen it.

The last convolutions and the decoding of boxes stay in 32 bits: one scale cannot hold box sides of hundreds of pixels and
probabilities near 0. Measured: benchmarks/README.md, "8-bit files".
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np

from yolofleet.inference.export.export_metadata import IMAGES

T = TypeVar("T")  # the name or number of a tensor
OPERATIONS = ("Conv", "Sigmoid", "Mul", "Add", "Concat", "MaxPool", "Resize")


def quantized(model: Any, batches: Iterator[np.ndarray], folder: Path) -> Any:
    """Return the 8-bit form of an ``onnx.ModelProto`` without NMS; needs ``folder`` for temporary files.

    Args:
        batches: calibration images, float32 [N, 3, H, W] RGB in 0..1.
    """
    import onnx
    from onnxruntime import quantization

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        def get_next(self) -> dict[str, np.ndarray] | None:
            batch = next(batches, None)
            return None if batch is None else {IMAGES: batch}

    with TemporaryDirectory(dir=folder, prefix=".int8-") as temporary:
        given, made = Path(temporary, "float.onnx"), Path(temporary, "int8.onnx")
        given.write_bytes(model.SerializeToString())
        logger = logging.getLogger()
        level = logger.level
        # it warns that the graph was not simplified, which would change nothing
        logger.setLevel(logging.ERROR)
        try:
            quantization.quantize_static(
                given,
                made,
                Reader(),
                quant_format=quantization.QuantFormat.QDQ,
                activation_type=quantization.QuantType.QUInt8,
                weight_type=quantization.QuantType.QInt8,
                calibrate_method=quantization.CalibrationMethod.MinMax,
                per_channel=True,
                reduce_range=True,  # without AVX512-VNNI, x86 adds two products of 8 bits in 16 bits, which can overflow
                op_types_to_quantize=list(OPERATIONS),
                # the extremes of 64 images cost yolov5n 0.020 of AP, their moving average 0.005
                extra_options={"CalibMovingAverage": True},
                nodes_to_exclude=head_nodes(model.graph),
            )
        finally:
            logger.setLevel(level)
        return onnx.load_model_from_string(made.read_bytes())


def head_nodes(graph: Any) -> list[str]:
    """Return the names of the nodes that stay in 32 bits, see :func:`head`."""
    nodes = [(node.op_type == "Conv", node.input, node.output) for node in graph.node]
    return [graph.node[number].name for number in head(nodes)]


def head(operations: Sequence[tuple[bool, Sequence[T], Sequence[T]]]) -> list[int]:
    """Return the numbers of the last convolutions of each path to the output, and of all operations after them.

    Args:
        operations: in topological order: whether it is a convolution, its input tensors and its output tensors.
    """
    leads_to_conv, after, found = set[T](), set[T](), []
    for is_conv, inputs, outputs in reversed(operations):
        if is_conv or leads_to_conv.intersection(outputs):
            leads_to_conv.update(inputs)
    for number, (is_conv, inputs, outputs) in enumerate(operations):
        if (is_conv and not leads_to_conv.intersection(outputs)) or after.intersection(inputs):
            after.update(outputs)
            found.append(number)
    return found
