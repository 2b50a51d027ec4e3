"""Write and run OpenVINO files: our ONNX graph in Intel's format, a folder with ``model.xml`` and ``model.bin``.

OpenVINO's library reads ONNX directly. Importing its converter (``ovc``) sends usage data; ``_library`` prevents this.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from yolofleet.inference.export import onnx as onnx_format
from yolofleet.inference.export.export_metadata import KEY, ExportMetadata
from yolofleet.inference.export.formats import FORMATS
from yolofleet.inference.export.opened import Opened, cpu_only

if TYPE_CHECKING:
    from yolofleet.inference.export.graph import ExportJob

MARKER, PRECISION = FORMATS["openvino"].marker, "INFERENCE_PRECISION_HINT"


@cache
def _core() -> Any:
    """Return one ``Core`` for the whole process.

    A ``Core`` sets a signal stack for this thread, and the destructor of the last ``Core`` frees it, even in use. After
    that, Ctrl-C causes a segmentation fault.
    """
    return _library().Core()


def _library() -> Any:
    """Import OpenVINO without the package that reports the import to Google Analytics; OpenVINO then uses a stub."""
    sys.modules.setdefault("openvino_telemetry", cast(Any, None))  # None: importing it raises ImportError
    import openvino

    return openvino


def write(job: ExportJob, path: Path) -> None:
    """Write the folder ``path``; with ``half``, store the weights in 16 bits."""
    model = _core().read_model(onnx_format.model_of(job, path.parent).SerializeToString())
    model.set_rt_info(job.metadata.to_json(), [KEY])
    path.mkdir()
    _library().save_model(model, str(path / MARKER), compress_to_fp16=job.metadata.half)


def parts(path: Path) -> list[Path]:
    """Return the graph and its tensors."""
    return [path / MARKER, (path / MARKER).with_suffix(".bin")]


def open_file(path: Path, device: str | None, threads: int) -> Opened:
    """Load the folder for the CPU, to compute in 32 bits; on some CPUs OpenVINO would choose fewer.

    Raises as ``opened.open_format``.
    """
    cpu_only(device, "OpenVINO")
    model = _core().read_model(str(path / MARKER))
    text = str(model.get_rt_info([KEY]).value) if model.has_rt_info([KEY]) else None
    metadata = ExportMetadata.from_json(text, source=str(path), kind="an OpenVINO file")
    settings = {"INFERENCE_NUM_THREADS": threads, PRECISION: "f32"}
    compiled = _core().compile_model(model, "CPU", settings)

    def run(images: np.ndarray) -> list[np.ndarray]:
        found = compiled(images)  # the runtime reuses its output buffers
        return [found[number].copy() for number in range(len(compiled.outputs))]

    default = _core().get_property("CPU", PRECISION).get_type_name()
    place = f"OpenVINO {_library().__version__.split('-')[0]}, CPU with {PRECISION}=f32"
    return Opened(metadata, place if default == "f32" else f"{place} (the default here is {default})", run)
