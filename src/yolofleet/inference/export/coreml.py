"""Write and run Core ML packages for Apple's systems. Writing works on every system, running on macOS only."""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from yolofleet.inference.export.export_metadata import DECODED, IMAGES, KEY, ExportMetadata
from yolofleet.inference.export.opened import Opened, cpu_only
from yolofleet.support.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from yolofleet.inference.export.graph import ExportJob

MAX_PARTS = 1000  # files of a package; yolofleet writes five


def write(job: ExportJob, path: Path) -> None:
    """Write the package ``path``."""
    import coremltools

    program = job.exported().run_decompositions({})
    precision = coremltools.precision.FLOAT16 if job.metadata.half else coremltools.precision.FLOAT32
    model = coremltools.convert(
        program,
        inputs=[coremltools.TensorType(IMAGES, shape=tuple(job.example().shape))],
        outputs=[coremltools.TensorType(DECODED)],
        convert_to="mlprogram",
        minimum_deployment_target=coremltools.target.iOS15,
        compute_precision=precision,
        skip_model_load=True,
    )
    model.user_defined_metadata[KEY] = job.metadata.to_json()
    model.save(str(path))


def parts(path: Path) -> list[Path]:
    """Return all files of the package. Raise CheckpointError if it has too many."""
    found = sorted(islice((part for part in path.rglob("*") if not part.is_dir()), MAX_PARTS + 1))
    if len(found) > MAX_PARTS:
        raise CheckpointError(f"{path} has more than {MAX_PARTS} files", hint="export it again")
    return found


def open_file(path: Path, device: str | None, threads: int) -> Opened:
    """Load the package for the CPU; Apple's other units compute in 16 bits, which the export did not verify.

    Raises as ``opened.open_format``.
    """
    import coremltools

    if sys.platform != "darwin":
        raise ConfigError(
            "Core ML runs on macOS only", hint="yolofleet predict or val with the file on a Mac"
        )
    cpu_only(device, "Core ML")
    model = coremltools.models.MLModel(str(path), compute_units=coremltools.ComputeUnit.CPU_ONLY)
    text = dict(model.user_defined_metadata).get(KEY)
    metadata = ExportMetadata.from_json(text, source=str(path), kind="a Core ML package")
    place = f"Core ML by coremltools {coremltools.__version__}, CPU"
    return Opened(metadata, place, lambda images: model.predict({IMAGES: images})[DECODED])
