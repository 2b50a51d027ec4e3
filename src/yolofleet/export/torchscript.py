"""TorchScript: the traced graph in one file, run by torch itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from yolofleet.errors import CheckpointError
from yolofleet.export.facts import KEY, ExportFacts
from yolofleet.export.graph import ExportJob, quiet
from yolofleet.export.runtime import Runtime, cpu_only
from yolofleet.export.torchscript_check import check_program

FACTS_FILE = f"{KEY}.json"  # inside the archive


def write(job: ExportJob, path: Path) -> None:
    """Freezing puts all code into one function, which ``torchscript_check`` can read."""
    with quiet():
        frozen = torch.jit.freeze(job.traced().eval(), optimize_numerics=False)
        torch.jit.save(frozen, str(path), _extra_files={FACTS_FILE: job.facts.to_json().encode()})


class TorchscriptRuntime(Runtime):
    def __init__(self, path: Path, facts: ExportFacts, program: torch.jit.ScriptModule) -> None:
        super().__init__(path, facts, f"TorchScript of torch {torch.__version__}, cpu")
        self._program = program

    def _run(self, images: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            given = torch.from_numpy(images).to(memory_format=torch.channels_last)  # faster on CPUs
            return self._program(given).numpy()


def open_file(path: Path, device: torch.device | None, threads: int) -> Runtime:
    """On the CPU, because a trace holds the device it was made on; threads are torch's own."""
    cpu_only(device, "TorchScript")
    check_program(path)
    extra = {FACTS_FILE: ""}
    with quiet():
        program = torch.jit.load(str(path), map_location="cpu", _extra_files=extra)
    text: str | bytes = extra[FACTS_FILE]
    if not text:
        raise CheckpointError(
            f"{path} is a TorchScript file of another program: what it computes is not known",
            hint="export the weights with yolofleet export",
        )
    facts = ExportFacts.from_json(text.decode() if isinstance(text, bytes) else text, source=str(path))
    return TorchscriptRuntime(path, facts, program)
