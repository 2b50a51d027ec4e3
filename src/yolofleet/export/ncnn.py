"""ncnn: for phones and boards; a folder with ``model.ncnn.param`` and ``model.ncnn.bin``, made by pnnx from TorchScript."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from yolofleet.errors import CheckpointError
from yolofleet.export import ncnn_network
from yolofleet.export.facts import ExportFacts
from yolofleet.export.formats import FORMATS
from yolofleet.export.graph import ExportJob
from yolofleet.export.runtime import Runtime, cpu_only
from yolofleet.export.sidecar import read_sidecar, write_sidecar
from yolofleet.files.foreign import open_foreign

PARAM, BIN = FORMATS["ncnn"].marker, "model.ncnn.bin"
DEADLINE_S = 1800
MAGIC = b"7767517"  # first line of a .param file


def write(job: ExportJob, path: Path) -> None:
    """
    Raises:
        CheckpointError: pnnx cannot convert the graph.
    """
    with TemporaryDirectory(prefix="yolofleet-ncnn-") as temporary:
        job.traced().save(str(Path(temporary, "model.pt")))
        shape = ",".join(map(str, job.example().shape))
        argv = [str(_converter()), "model.pt", f"inputshape=[{shape}]", f"fp16={int(job.facts.half)}"]
        try:
            done = subprocess.run(argv, cwd=temporary, capture_output=True, timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise CheckpointError(f"pnnx did not end within {DEADLINE_S} s", hint="--format onnx") from None
        except OSError as problem:
            raise CheckpointError(f"pnnx cannot be started: {problem}", hint="install pnnx again") from None
        made = [Path(temporary, name) for name in (PARAM, BIN)]
        if done.returncode or not all(file.is_file() for file in made):
            words = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or [
                f"exit {done.returncode}"
            ]
            raise CheckpointError(f"pnnx cannot convert this network: {words[0][:200]}", hint="--format onnx")
        path.mkdir()
        for file in made:
            (path / file.name).write_bytes(file.read_bytes())
    write_sidecar(path, job.facts)


def _converter() -> Path:
    """The program inside the package pnnx."""
    import pnnx

    name = "pnnx.exe" if os.name == "nt" else "pnnx"
    return next(p for p in sorted(Path(pnnx.__file__).parent.rglob(name)) if p.is_file())


class NcnnRuntime(Runtime):
    def __init__(self, path: Path, facts: ExportFacts, net: Any, place: str) -> None:
        super().__init__(path, facts, place)
        self._net = net

    def _run(self, images: np.ndarray) -> np.ndarray:
        outputs = []
        for image in images:  # ncnn knows no batches
            output = ncnn_network.run(self._net, image)
            if isinstance(output, int):
                raise CheckpointError(f"ncnn cannot run {self.path} (code {output})", hint="export it again")
            outputs.append(output)
        return np.stack(outputs)


def open_file(path: Path, device: torch.device | None, threads: int) -> Runtime:
    """
    Raises:
        CheckpointError: not ours, or not whole.
    """
    import ncnn

    cpu_only(device, "ncnn")
    folder = path if path.is_dir() else path.parent
    facts = read_sidecar(folder)
    with open_foreign(folder / PARAM) as file:
        whole = file.read(len(MAGIC)) == MAGIC
    if not whole or not (folder / BIN).is_file():
        raise CheckpointError(f"{folder} is not a whole ncnn network", hint="use another copy")
    side = facts.stride
    parts = folder / PARAM, folder / BIN
    ncnn_network.try_in_child(*parts, facts.size_hw or (side, side), threads, facts.half)
    net = ncnn_network.load(*parts, threads, facts.half)
    if net is None:
        raise CheckpointError(f"ncnn refuses {folder}", hint="use another copy, or export it again")
    return NcnnRuntime(folder, facts, net, f"ncnn {ncnn.__version__}, CPU")
