"""OpenVINO: our ONNX graph in Intel's form, a folder with ``model.xml`` and ``model.bin``.

OpenVINO's library reads ONNX itself. Its converter (``ovc``) sends usage data, also when it is only imported: see
``_library``.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from yolofleet.errors import CheckpointError
from yolofleet.export import onnx as onnx_format
from yolofleet.export.export_metadata import KEY, ExportMetadata
from yolofleet.export.formats import FORMATS
from yolofleet.export.trial import Opened, cpu_only

if TYPE_CHECKING:
    from yolofleet.export.graph import ExportJob

MARKER = FORMATS["openvino"].marker


@cache
def _core() -> Any:
    """One for good: it gives this thread a stack for signals, and the last one frees it, in use or not; then Ctrl-C
    would be a segmentation fault."""
    return _library().Core()


def _library() -> Any:
    """Import OpenVINO without the package that reports its import to Google Analytics; it has a stub in its place."""
    sys.modules.setdefault("openvino_telemetry", cast(Any, None))  # None: importing it raises ImportError
    import openvino

    return openvino


def write(job: ExportJob, path: Path) -> None:
    """A folder; with ``half`` the weights are stored in 16 bits."""
    model = _core().read_model(onnx_format.model_of(job, path.parent).SerializeToString())
    model.set_rt_info(job.facts.to_json(), [KEY])
    path.mkdir()
    _library().save_model(model, str(path / MARKER), compress_to_fp16=job.facts.half)


def parts(path: Path) -> list[Path]:
    """Return the graph and its tensors."""
    folder = folder_of(path)
    return [folder / MARKER, (folder / MARKER).with_suffix(".bin")]


def folder_of(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def open_file(path: Path, device: str | None, threads: int) -> Opened:
    """On the CPU, in 32 bits inside (its own choice would be less on some)."""
    cpu_only(device, "OpenVINO")
    model = _core().read_model(str(folder_of(path) / MARKER))
    if not model.has_rt_info([KEY]):
        raise CheckpointError(
            f"{path} is an OpenVINO file of another program: what it computes is not known",
            hint="export the weights with yolofleet export",
        )
    facts = ExportMetadata.from_json(str(model.get_rt_info([KEY]).value), source=str(path))
    settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}
    compiled = _core().compile_model(model, "CPU", settings)

    def run(images: np.ndarray) -> np.ndarray:
        rows: np.ndarray = compiled(images)[0].copy()  # the runtime's own memory is used again
        return rows

    return Opened(facts, f"OpenVINO {_library().__version__.split('-')[0]}, CPU", run)
