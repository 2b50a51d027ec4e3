"""Write TorchScript files from the traced graph, and run them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from yolofleet.inference.export.export_metadata import KEY, ExportMetadata
from yolofleet.inference.export.graph import ExportJob, quiet, save_module
from yolofleet.inference.export.opened import Opened, cpu_only
from yolofleet.storage.foreign import open_foreign

METADATA_FILE = f"{KEY}.json"  # inside the archive


def write(job: ExportJob, path: Path) -> None:
    """Write one file, without the parts that only a training needs."""
    with quiet():
        frozen = torch.jit.freeze(job.traced().eval(), optimize_numerics=False)
        save_module(frozen, path, {METADATA_FILE: job.metadata.to_json().encode()})


def parts(path: Path) -> list[Path]:
    """Return the file."""
    return [path]


def open_file(path: Path, device: str | None, threads: int) -> Opened:
    """Load the file, which is a program, with torch for the CPU; ``threads`` is ignored. Raises as ``opened.open_format``."""
    cpu_only(device, "TorchScript")
    stored: dict[str, Any] = {METADATA_FILE: ""}  # torch puts bytes into it
    with quiet(), open_foreign(path) as file:
        module = torch.jit.load(file, map_location="cpu", _extra_files=stored)
    text = bytes(stored[METADATA_FILE]).decode(errors="replace")
    metadata = ExportMetadata.from_json(text, source=str(path), kind="a TorchScript file")

    def run(images: np.ndarray) -> list[np.ndarray]:
        with torch.inference_mode():
            given = torch.from_numpy(images).to(memory_format=torch.channels_last)  # faster on CPUs
            found = module(given)
            return [one.numpy() for one in (found if isinstance(found, tuple) else (found,))]

    return Opened(metadata, f"torch.jit of torch {torch.__version__}, cpu", run)
