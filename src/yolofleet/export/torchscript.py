"""Write TorchScript files from the traced graph, and run them as data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from yolofleet.export.export_metadata import KEY, ExportMetadata
from yolofleet.export.graph import ExportJob, quiet, save_module
from yolofleet.export.torchscript_program import Program
from yolofleet.export.trial import Opened, cpu_only

METADATA_FILE = f"{KEY}.json"  # inside the archive


def write(job: ExportJob, path: Path) -> None:
    """Write one file; freezing puts all code into one function, which ``torchscript_program`` can read."""
    with quiet():
        frozen = torch.jit.freeze(job.traced().eval(), optimize_numerics=False)
        save_module(frozen, path, {METADATA_FILE: job.metadata.to_json().encode()})


def parts(path: Path) -> list[Path]:
    """Return the file."""
    return [path]


def open_file(path: Path, device: str | None, threads: int) -> Opened:
    """Load the file as data (see ``torchscript_program``) for the CPU; ``threads`` is ignored.

    Raises:
        CheckpointError: the file is damaged, another program wrote it, or it has code other than a network.
        ConfigError: ``device`` is not the CPU.
    """
    cpu_only(device, "TorchScript")
    program = Program(path, METADATA_FILE)
    metadata = ExportMetadata.from_json(program.metadata_text, source=str(path), kind="a TorchScript file")
    return Opened(metadata, f"TorchScript of torch {torch.__version__}, cpu", _runner(program))


def open_with_torch(path: Path, metadata: ExportMetadata) -> Opened:
    """Load a file with torch's own loader, as the user's programs do.

    That loader executes the file as a program, so call this only for a file that this process has just written.
    """
    module = torch.jit.load(str(path), map_location="cpu")
    return Opened(metadata, f"torch.jit of torch {torch.__version__}, cpu", _runner(module))


def _runner(function: Callable[[Tensor], Tensor]) -> Callable[[np.ndarray], np.ndarray]:
    def run(images: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            given = torch.from_numpy(images).to(memory_format=torch.channels_last)  # faster on CPUs
            return function(given).numpy()

    return run
