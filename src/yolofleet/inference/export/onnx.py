"""Write ONNX files with torch's tracing exporter, and run them with ONNX Runtime.

torch has two exporters. This one (``dynamo=False``) exists in torch 2.6 to 2.15, needs no other package and takes 0.5 s
instead of 4 s. The graphs of the other are shorter; ``--simplify`` shortens ours. For variable sizes, the exporter gets a
traced module, because a trace keeps sizes as expressions. From a plain module the exporter would write constants.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from yolofleet.inference.export.export_metadata import (
    DECODED,
    IMAGES,
    KEY,
    MAX_CLASSES,
    ExportMetadata,
    printable,
)
from yolofleet.inference.export.formats import SLIM, missing
from yolofleet.inference.export.onnx_check import checked_model, external_files
from yolofleet.inference.export.onnx_nms import append_suppression
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
    """Write one file that includes all tensors.

    Raises:
        ConfigError: the package for ``--simplify`` is missing.
    """
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
    axes = {IMAGES: batch | variable, DECODED: batch | rows} if batch or variable else None
    with quiet(), TemporaryDirectory(dir=folder, prefix=".onnx-") as temporary:
        file = Path(temporary, "model.onnx")
        torch.onnx.export(
            job.traced() if axes else job.graph,
            (job.example(),),
            file,
            input_names=[IMAGES],
            output_names=[DECODED],
            opset_version=OPSET,
            dynamo=False,
            dynamic_axes=axes,
        )
        model = onnx.load_model_from_string(file.read_bytes())
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
    """Return the file and its external data files.

    Raises:
        CheckpointError: see ``checked_model``.
    """
    return [path, *external_files(path, checked_model(path))]


def _onnxruntime() -> Any:
    """Import ONNX Runtime without telemetry."""
    # on Linux, its import opens a connection to Microsoft
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    import onnxruntime

    onnxruntime.disable_telemetry_events()  # on Windows, the variable has no effect
    return onnxruntime


def open_file(path: Path, device: str | None, threads: int) -> Opened:
    """Load a file of yolofleet, or of another program in the format of YOLOv5's export.

    Raises:
        CheckpointError, ConfigError: see ``runtime.open_exported``.
    """
    onnxruntime = _onnxruntime()
    model = checked_model(path)
    stored = {entry.key: entry.value for entry in model.metadata_props}
    if KEY in stored:
        metadata = ExportMetadata.from_json(stored[KEY], source=str(path))
    else:
        metadata = _foreign_metadata(path, model, stored)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4  # its errors are also raised as exceptions
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
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=providers)
    except Exception as problem:  # exceptions of onnxruntime have no common base class
        raise CheckpointError(
            f"ONNX Runtime cannot load {path}: {first_line(problem)}",
            hint="use another copy, or export it again",
        ) from None
    if len(session.get_inputs()) != 1:
        raise CheckpointError(f"{path} has {len(session.get_inputs())} inputs, expected 1")
    used = session.get_providers()[0].removesuffix("ExecutionProvider")
    given, result = session.get_inputs()[0].name, session.get_outputs()[0].name
    return Opened(
        metadata,
        f"ONNX Runtime {onnxruntime.__version__}, {used}",
        lambda images: session.run([result], {given: images})[0],
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
