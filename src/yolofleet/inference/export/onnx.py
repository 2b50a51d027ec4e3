"""Write ONNX files with torch's tracing exporter, and run them with ONNX Runtime.

torch has two exporters. This one (``dynamo=False``) exists in torch 2.6 to 2.15, needs no other package and takes 0.5 s
instead of 4 s. The graphs of the other are shorter; ``--simplify`` shortens ours. For variable sizes, the exporter gets a
traced module, because a trace keeps sizes as expressions. From a plain module the exporter would write constants.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from yolofleet.inference.export.export_metadata import (
    BOXES,
    DECODED,
    IMAGES,
    KEY,
    MAX_CLASSES,
    ROWS,
    ExportMetadata,
    Suppression,
    printable,
)
from yolofleet.inference.export.formats import SLIM, missing
from yolofleet.inference.export.onnx_check import checked_model, external_values
from yolofleet.inference.export.opened import Opened, first_line
from yolofleet.inference.export.quantize import quantized
from yolofleet.support.errors import CheckpointError, ConfigError

if TYPE_CHECKING:  # the child process that tries a file does not load torch
    from yolofleet.inference.export.graph import ExportJob

OPSET = 17
ANCHORS = 3  # per cell, in files of YOLOv5's export
LEVELS = ((8, 16, 32), (8, 16, 32, 64), (16, 32))  # strides, pixels
NAME = re.compile(r"""(\d+)\s*:\s*(?:'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)")""")


def write(job: ExportJob, path: Path) -> None:
    """Write one file that includes all tensors. Raise ConfigError if the package for ``--simplify`` is missing."""
    path.write_bytes(model_of(job, path.parent).SerializeToString())


def model_of(job: ExportJob, folder: Path) -> Any:
    """Return the graph as an ``onnx.ModelProto``; needs ``folder`` for a temporary file."""
    import onnx
    import torch

    from yolofleet.inference.export.graph import quiet

    metadata = job.metadata
    batch = {} if metadata.batch else {0: "batch"}
    variable = {} if metadata.size_hw else {2: "height", 3: "width"}
    rows = {} if metadata.size_hw else {1: "rows"}
    outputs = list(metadata.outputs)
    ends = dict.fromkeys(outputs, batch | rows)
    axes = {IMAGES: batch | variable, **ends} if batch or variable else None
    with quiet(), TemporaryDirectory(dir=folder, prefix=".onnx-") as temporary:
        file = Path(temporary, "model.onnx")
        torch.onnx.export(
            job.traced() if axes else job.graph,
            (job.example(),),
            file,
            input_names=[IMAGES],
            output_names=outputs,
            opset_version=OPSET,
            dynamo=False,
            dynamic_axes=axes,
        )
        model = onnx.load_model_from_string(file.read_bytes())
    if outputs == [DECODED]:
        values = model.graph.output[0].type.tensor_type.shape.dim[2]
        values.dim_value = 5 + len(metadata.names)  # the exporter does not always infer it
    if metadata.int8:
        assert job.calibration is not None
        _onnxruntime()
        model = quantized(model, job.calibration(), folder)
    if metadata.nms is not None:
        append_suppression(model, metadata.nms)
    if job.simplify:
        model = _simplified(model)
    del model.metadata_props[:]
    entry = model.metadata_props.add()
    entry.key, entry.value = KEY, metadata.to_json()
    onnx.checker.check_model(model)
    return model


def _simplified(model: Any) -> Any:
    if missing((SLIM,)):
        raise ConfigError(f"--simplify needs {SLIM}", hint=f"pip install {SLIM}, or leave it out")
    import onnxslim

    return onnxslim.slim(model)


def parts(path: Path) -> list[Path]:
    """Return the file and its external data files, without duplicates. Raises as :func:`checked_model`."""
    names = {values["location"] for values in external_values(path, checked_model(path))}
    return [path, *(path.parent / name for name in sorted(names))]


def _onnxruntime() -> Any:
    """Import ONNX Runtime without telemetry."""
    # on Linux, its import opens a connection to Microsoft
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    import onnxruntime

    onnxruntime.disable_telemetry_events()  # on Windows, the variable has no effect
    return onnxruntime


def session_of(path: Path, options: Any = None, providers: Sequence[Any] = ("CPUExecutionProvider",)) -> Any:
    """Load a file with ONNX Runtime. Raise CheckpointError if that fails."""
    onnxruntime = _onnxruntime()
    options = options or onnxruntime.SessionOptions()
    options.log_severity_level = 4  # its errors are also raised as exceptions
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=list(providers))
    except Exception as problem:  # exceptions of onnxruntime have no common base class
        raise CheckpointError(
            f"ONNX Runtime cannot load {path}: {first_line(problem)}",
            hint="use another copy, or export it again",
        ) from None


def open_file(path: Path, device: str | None, threads: int) -> Opened:
    """Load a file of yolofleet, or of another program in the format of YOLOv5's export. Raises as ``runtime.open_exported``."""
    onnxruntime = _onnxruntime()
    model = checked_model(path)
    stored = {entry.key: entry.value for entry in model.metadata_props}
    if KEY in stored:
        metadata = ExportMetadata.from_json(stored[KEY], source=str(path))
    else:
        metadata = _foreign_metadata(path, model, stored)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    has_cuda = "CUDAExecutionProvider" in onnxruntime.get_available_providers()
    kind, _, index = (device or "cuda").partition(":")
    if kind != "cpu" and device is not None and not (kind == "cuda" and has_cuda):
        raise ConfigError(
            f"the installed ONNX Runtime does not support {device}",
            hint="--device cpu, or for NVIDIA GPUs pip install onnxruntime-gpu instead of onnxruntime",
        )
    providers: list[Any] = ["CPUExecutionProvider"]
    if kind == "cuda" and has_cuda:
        providers.insert(0, ("CUDAExecutionProvider", {"device_id": int(index or 0)}))
    session = session_of(path, options, providers)
    if len(session.get_inputs()) != 1:
        raise CheckpointError(f"{path} has {len(session.get_inputs())} inputs, expected 1")
    used = session.get_providers()[0].removesuffix("ExecutionProvider")
    if (
        kind == "cuda" and device is not None and used != "CUDA"
    ):  # it takes the CPU if a library of CUDA is missing
        raise ConfigError(
            f"ONNX Runtime {onnxruntime.__version__} cannot use {device}: it could not load its libraries of CUDA and cuDNN",
            hint="install the CUDA and cuDNN that this version of onnxruntime-gpu needs (onnxruntime.ai lists them), or "
            "--device cpu",
        )
    given = session.get_inputs()[0].name
    results = [one.name for one in session.get_outputs()[: len(metadata.outputs)]]
    return Opened(
        metadata,
        f"ONNX Runtime {onnxruntime.__version__}, {used}",
        lambda images: session.run(results, {given: images}),
    )


def _foreign_metadata(path: Path, model: Any, stored: dict[str, str]) -> ExportMetadata:
    """Return metadata for a file in the format of YOLOv5's export: input [N, 3, H, W], first output [N, K, 5 + C].

    Raises:
        CheckpointError: the file has other shapes; the message shows them.
    """
    sides = [[d.dim_value or None for d in i.type.tensor_type.shape.dim] for i in model.graph.input]
    out = [[d.dim_value or None for d in o.type.tensor_type.shape.dim] for o in model.graph.output[:1]]
    refused = CheckpointError(
        f"{path} is an ONNX file of another program with shapes {sides} -> {out}, expected [N, 3, H, W] -> [N, K, 5 + C] "
        f"with {ANCHORS} predictions K for each cell, as YOLOv5 exports it{_other_form(sides, out)}",
        hint="export the weights with yolofleet export",
    )
    is_float = model.graph.input[0].type.tensor_type.elem_type == 1
    match sides, out:
        case [[batch, 3 | None, height, width]], [[_, rows, int(values)]] if (
            is_float and 5 < values <= 5 + MAX_CLASSES
        ):
            nc = values - 5
        case _:
            raise refused
    names = {int(n): single or double for n, single, double in NAME.findall(stored.get("names", "")[: 2**20])}
    named = tuple(printable(names.get(i, str(i))) for i in range(nc))
    if height and width and rows:
        for strides in LEVELS:
            if rows == ANCHORS * _cells(height, width, strides):
                return ExportMetadata("unknown", path.stem, named, strides, (height, width), batch)
    elif len(names) == nc and not (height or width):
        stride = stored.get("stride", "")
        largest = int(stride) if stride.isdecimal() and 8 <= int(stride) <= 128 else 32
        return ExportMetadata("unknown", path.stem, named, (largest,), None, batch)
    raise refused


def _cells(height: int, width: int, strides: tuple[int, ...]) -> int:
    """Return the cells of all levels; 0 if the sides are no multiples of the largest stride."""
    fits = all(side % strides[-1] == 0 for side in (height, width))
    return sum((height // s) * (width // s) for s in strides) if fits else 0


def _other_form(sides: list[list[int | None]], out: list[list[int | None]]) -> str:
    """Return what the shapes of a refused file say about its program; "" if they say nothing."""
    match sides, out:
        case [[_, _, int(height), int(width)]], [[_, int(rows), int(values)]]:
            cells = [_cells(height, width, strides) for strides in LEVELS]
            if rows in filter(None, cells):
                return f". {rows} is one for each cell, as in YOLOX, whose boxes are not decoded"
            if values in filter(None, cells):
                return (
                    f". [{rows}, {values}] is a row for each value and no objectness, as in YOLOv8 and later"
                )
    return ""


def append_rows(model: Any) -> None:
    """Replace the output ``decoded`` by ``rows`` [N, K, 6], see ``export_metadata.COMPUTES``; in place."""
    from onnx import TensorProto, helper

    graph = _Writer(model.graph)
    cxcywh, _, best, best_class = _best_classes(graph)
    number = graph("Unsqueeze", graph("Cast", best_class, to=TensorProto.FLOAT), *graph.numbers([2]))
    graph("Concat", *_corners(graph, cxcywh, axis=2), best, number, axis=2, output=ROWS)
    shape = model.graph.output[0].type.tensor_type.shape
    dims = [dim.dim_param or dim.dim_value or None for dim in shape.dim[:2]]
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_value_info(ROWS, TensorProto.FLOAT, [*dims, 6]))


def _best_classes(graph: _Writer) -> tuple[str, str, str, str]:
    """Add boxes [N, K, 4] cx, cy, w, h, scores [N, K, C], and the largest [N, K, 1] and its class [N, K] of ``decoded``."""
    cxcywh = graph("Slice", DECODED, *graph.numbers([0], [4], [2]))
    objectness = graph("Slice", DECODED, *graph.numbers([4], [5], [2]))  # [N, K, 1]
    classes = graph("Slice", DECODED, *graph.numbers([5], [2**31], [2]))  # [N, K, C]
    scores = graph("Mul", objectness, classes)
    best = graph("ReduceMax", scores, axes=[2], keepdims=1)
    return cxcywh, scores, best, graph("ArgMax", scores, axis=2, keepdims=0)


def _corners(graph: _Writer, cxcywh: str, axis: int) -> tuple[str, str]:
    """Add the corners x1, y1 and x2, y2 of boxes, whose sides are in the last dimension ``axis``."""
    centre = graph("Slice", cxcywh, *graph.numbers([0], [2], [axis]))
    sides = graph("Slice", cxcywh, *graph.numbers([2], [4], [axis]))
    half = graph("Mul", sides, graph.number(0.5, np.float32))
    return graph("Sub", centre, half), graph("Add", centre, half)


def append_suppression(model: Any, nms: Suppression) -> None:
    """Replace the output ``decoded`` by ``boxes`` [N, D, 6], see ``export_metadata.COMPUTES``; in place.

    The result is that of ``data.geometry.nms.detections`` with ``multi_label=False``: each prediction counts for its best class.
    """
    import onnx
    from onnx import helper

    graph = _Writer(model.graph)
    i64, f32 = np.int64, np.float32

    cxcywh, scores, best, best_class = _best_classes(graph)
    class_scores = (
        best if nms.agnostic else graph("Where", graph("Less", scores, best), graph.number(0, f32), scores)
    )
    kept = graph(  # [M, 3] image, class, prediction
        "NonMaxSuppression",
        cxcywh,
        graph("Transpose", class_scores, perm=[0, 2, 1]),
        graph.number([nms.max_det], i64),
        graph.number([nms.iou], f32),
        graph.number([nms.conf], f32),
        center_point_box=1,
    )
    where = graph("Gather", kept, graph.number([0, 2], i64), axis=1)  # [M, 2] image, prediction
    score = graph("GatherND", graph("Squeeze", best, graph.number([2], i64)), where)  # [M]
    found = graph("GatherND", cxcywh, where)  # [M, 4]
    column = graph.number([1], i64)
    rows = graph(  # [M, 6]
        "Concat",
        *_corners(graph, found, axis=1),
        graph("Unsqueeze", score, column),
        graph(
            "Unsqueeze",
            graph("Cast", graph("GatherND", best_class, where), to=onnx.TensorProto.FLOAT),
            column,
        ),
        axis=1,
    )
    image = graph("Squeeze", graph("Slice", where, *graph.numbers([0], [1], [1])), column)  # [M]

    _, order = graph.several("TopK", 2, score, graph("Shape", score), largest=1, sorted=1)
    rows, image = graph("Gather", rows, order, axis=0), graph("Gather", image, order, axis=0)

    # The slot of a row is its rank in its image. Rows beyond D go to slot D, which the last Slice removes.
    count = graph("Shape", DECODED, start=0, end=1)  # [1] N
    images = graph("Range", graph.number(0, i64), graph("Squeeze", count), graph.number(1, i64))  # [N]
    is_of = graph(
        "Equal", graph("Unsqueeze", images, column), graph("Unsqueeze", image, graph.number([0], i64))
    )
    is_of = graph("Cast", is_of, to=onnx.TensorProto.INT64)  # [N, M]
    before = graph("CumSum", is_of, graph.number(1, i64), exclusive=1)
    slot = graph("ReduceSum", graph("Mul", before, is_of), graph.number([0], i64), keepdims=0)  # [M]
    slot = graph("Min", slot, graph.number(nms.max_det, i64))
    # [M, 2]
    target = graph("Concat", graph("Unsqueeze", image, column), graph("Unsqueeze", slot, column), axis=1)
    empty = graph(
        "ConstantOfShape",
        graph("Concat", count, graph.number([nms.max_det + 1, 6], i64), axis=0),
        value=helper.make_tensor("zero", onnx.TensorProto.FLOAT, [1], [0.0]),
    )
    filled = graph("ScatterND", empty, target, rows)
    graph("Slice", filled, *graph.numbers([0], [nms.max_det], [1]), output=BOXES)

    shape = model.graph.output[0].type.tensor_type.shape.dim[0]
    images_dim = shape.dim_param or shape.dim_value
    del model.graph.output[:]
    model.graph.output.append(
        helper.make_tensor_value_info(BOXES, onnx.TensorProto.FLOAT, [images_dim, nms.max_det, 6])
    )


class _Writer:
    """Adds nodes to a graph; a call returns the name of the new node's output."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self.count = 0

    def __call__(self, kind: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        return self._add(kind, inputs, [output or self._name()], attributes)[0]

    def several(self, kind: str, outputs: int, *inputs: str, **attributes: Any) -> list[str]:
        return self._add(kind, inputs, [self._name() for _ in range(outputs)], attributes)

    def number(self, value: Any, kind: Any) -> str:
        """Add a constant and return its name."""
        from onnx import numpy_helper

        name = self._name()
        self.graph.initializer.append(numpy_helper.from_array(np.array(value, kind), name))
        return name

    def numbers(self, *values: list[int]) -> list[str]:
        """Add constant lists of int64 and return their names."""
        return [self.number(value, np.int64) for value in values]

    def _name(self) -> str:
        self.count += 1
        return f"nms_{self.count}"

    def _add(
        self, kind: str, inputs: tuple[str, ...], outputs: list[str], attributes: dict[str, Any]
    ) -> list[str]:
        from onnx import helper

        self.graph.node.append(
            helper.make_node(kind, inputs, outputs, name=f"nms/{outputs[0]}", **attributes)
        )
        return outputs
