"""TorchScript: the traced graph in one file, run by torch itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from yolofleet.errors import CheckpointError
from yolofleet.export.export_metadata import KEY, ExportMetadata
from yolofleet.export.graph import ExportJob, quiet, save_module
from yolofleet.export.torchscript_program import Program
from yolofleet.export.trial import Opened, cpu_only

FACTS_FILE = f"{KEY}.json"  # inside the archive


def write(job: ExportJob, path: Path) -> None:
    """Freezing puts all code into one function, which ``torchscript_program`` can read."""
    with quiet():
        frozen = torch.jit.freeze(job.traced().eval(), optimize_numerics=False)
        save_module(frozen, path, {FACTS_FILE: job.facts.to_json().encode()})


def parts(path: Path) -> list[Path]:
    """Return the file."""
    return [path]


def open_file(path: Path, device: str | None, threads: int) -> Opened:
    """Open the file as data (see ``torchscript_program``), on the CPU; threads are torch's own.

    Raises:
        CheckpointError: not ours, not whole, or more than a network.
    """
    cpu_only(device, "TorchScript")
    program = Program(path, FACTS_FILE)
    if not program.facts_text:
        raise CheckpointError(
            f"{path} is a TorchScript file of another program: what it computes is not known",
            hint="export the weights with yolofleet export",
        )
    facts = ExportMetadata.from_json(program.facts_text, source=str(path))
    return Opened(facts, f"TorchScript of torch {torch.__version__}, cpu", _runner(program))


def open_with_torch(path: Path, facts: ExportMetadata) -> Opened:
    """Open a file that this process has just written with torch's own loader, which users deploy.

    That loader runs the file as a program, so no stranger's file may come here.
    """
    module = torch.jit.load(str(path), map_location="cpu")
    return Opened(facts, f"torch.jit of torch {torch.__version__}, cpu", _runner(module))


def _runner(function: Callable[[Tensor], Tensor]) -> Callable[[np.ndarray], np.ndarray]:
    def run(images: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            given = torch.from_numpy(images).to(memory_format=torch.channels_last)  # faster on CPUs
            return function(given).numpy()

    return run
