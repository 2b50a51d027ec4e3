"""TorchScript: the traced graph in one file, run by torch itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from yolofleet.errors import CheckpointError
from yolofleet.export.facts import KEY, ExportFacts
from yolofleet.export.graph import ExportJob, quiet
from yolofleet.export.runtime import Runtime, cpu_only
from yolofleet.export.torchscript_program import Program

FACTS_FILE = f"{KEY}.json"  # inside the archive


def write(job: ExportJob, path: Path) -> None:
    """Freezing puts all code into one function, which ``torchscript_program`` can read."""
    with quiet():
        frozen = torch.jit.freeze(job.traced().eval(), optimize_numerics=False)
        torch.jit.save(frozen, str(path), _extra_files={FACTS_FILE: job.facts.to_json().encode()})


class TorchscriptRuntime(Runtime):
    def __init__(self, path: Path, facts: ExportFacts, program: Program) -> None:
        super().__init__(path, facts, f"TorchScript of torch {torch.__version__}, cpu")
        self._program = program

    def _run(self, images: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            given = torch.from_numpy(images).to(memory_format=torch.channels_last)  # faster on CPUs
            return self._program(given).numpy()


def open_file(path: Path, device: torch.device | None, threads: int) -> Runtime:
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
    return TorchscriptRuntime(path, ExportFacts.from_json(program.facts_text, source=str(path)), program)
