"""Core ML: a package for Apple's systems. It can be written anywhere and run on macOS."""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from yolofleet.errors import CheckpointError, ConfigError
from yolofleet.export.export_metadata import DECODED, IMAGES, KEY, ExportMetadata
from yolofleet.export.trial import Opened, cpu_only

if TYPE_CHECKING:
    from yolofleet.export.graph import ExportJob

MOST_PARTS = 1000  # of a package; ours have five


def write(job: ExportJob, path: Path) -> None:
    import coremltools

    program = job.exported().run_decompositions({})
    precision = coremltools.precision.FLOAT16 if job.facts.half else coremltools.precision.FLOAT32
    model = coremltools.convert(
        program,
        inputs=[coremltools.TensorType(IMAGES, shape=tuple(job.example().shape))],
        outputs=[coremltools.TensorType(DECODED)],
        convert_to="mlprogram",
        minimum_deployment_target=coremltools.target.iOS15,
        compute_precision=precision,
        skip_model_load=True,
    )
    model.user_defined_metadata[KEY] = job.facts.to_json()
    model.save(str(path))


def parts(path: Path) -> list[Path]:
    """Return all files of the package.

    Raises:
        CheckpointError: too many.
    """
    found = sorted(islice((part for part in path.rglob("*") if not part.is_dir()), MOST_PARTS + 1))
    if len(found) > MOST_PARTS:
        raise CheckpointError(f"{path} has more than {MOST_PARTS} files", hint="export it again")
    return found


def open_file(path: Path, device: str | None, threads: int) -> Opened:
    """On the CPU: what Apple's other units compute in 16 bits is not what was verified.

    Raises:
        ConfigError: not on macOS. CheckpointError: not ours.
    """
    import coremltools

    if sys.platform != "darwin":
        raise ConfigError(
            "Core ML runs on macOS only", hint="yolofleet predict or val with the file on a Mac"
        )
    cpu_only(device, "Core ML")
    model = coremltools.models.MLModel(str(path), compute_units=coremltools.ComputeUnit.CPU_ONLY)
    if KEY not in model.user_defined_metadata:
        raise CheckpointError(
            f"{path} is a Core ML package of another program: what it computes is not known",
            hint="export the weights with yolofleet export",
        )
    facts = ExportMetadata.from_json(model.user_defined_metadata[KEY], source=str(path))
    place = f"Core ML by coremltools {coremltools.__version__}, CPU"
    return Opened(facts, place, lambda images: model.predict({IMAGES: images})[DECODED])
