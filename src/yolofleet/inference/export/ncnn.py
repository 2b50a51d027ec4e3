"""Write and run ncnn networks for phones and embedded boards.

A network is a folder with ``model.ncnn.param`` and ``model.ncnn.bin``, which pnnx converts from TorchScript.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np

from yolofleet.inference.export.export_metadata import (
    metadata_file_of,
    read_metadata_file,
    write_metadata_file,
)
from yolofleet.inference.export.formats import FORMATS
from yolofleet.inference.export.opened import Opened, cpu_only
from yolofleet.storage.foreign import open_foreign
from yolofleet.support.errors import CheckpointError

if TYPE_CHECKING:
    from yolofleet.inference.export.graph import ExportJob

PARAM, BIN = FORMATS["ncnn"].marker, "model.ncnn.bin"
DEADLINE_S = 1800
MAGIC = b"7767517"  # first line of a .param file


def write(job: ExportJob, path: Path) -> None:
    """Write the folder ``path``. Raise CheckpointError if pnnx cannot convert the graph."""
    from yolofleet.inference.export.graph import save_module

    with TemporaryDirectory(dir=path.parent, prefix=".ncnn-") as temporary:
        save_module(job.traced(), Path(temporary, "model.pt"))
        shape = ",".join(map(str, job.example().shape))
        argv = [str(_converter()), "model.pt", f"inputshape=[{shape}]", f"fp16={int(job.metadata.half)}"]
        try:
            done = subprocess.run(argv, cwd=temporary, capture_output=True, timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise CheckpointError(f"pnnx did not end within {DEADLINE_S} s", hint="--format onnx") from None
        except OSError as problem:
            raise CheckpointError(f"cannot start pnnx: {problem}", hint="install pnnx again") from None
        made = [Path(temporary, name) for name in (PARAM, BIN)]
        if done.returncode or not all(file.is_file() for file in made):
            said = done.stderr.decode(errors="replace").strip() or f"exit {done.returncode}"
            why = said.splitlines()[-1][:200]
            raise CheckpointError(f"pnnx cannot convert this network: {why}", hint="--format onnx")
        path.mkdir()
        for file in made:
            (path / file.name).write_bytes(file.read_bytes())
    write_metadata_file(path, job.metadata)


def _converter() -> Path:
    """Return the path of the program in the package pnnx."""
    import pnnx

    name = "pnnx.exe" if os.name == "nt" else "pnnx"
    return next(p for p in sorted(Path(pnnx.__file__).parent.rglob(name)) if p.is_file())


def parts(path: Path) -> list[Path]:
    """Return the graph, its tensors and its metadata."""
    return [path / PARAM, path / BIN, metadata_file_of(path)]


def open_file(path: Path, device: str | None, threads: int) -> Opened:
    """Load the network for the CPU. Raises as ``opened.open_format``."""
    import ncnn

    cpu_only(device, "ncnn")
    metadata = read_metadata_file(path)
    with open_foreign(path / PARAM) as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise CheckpointError(f"{path} is not a complete ncnn network", hint="use another copy")
    net = ncnn.Net()
    net.opt.num_threads = threads
    for option in ("use_fp16_packed", "use_fp16_storage", "use_fp16_arithmetic", "use_bf16_storage"):
        setattr(net.opt, option, metadata.half and option != "use_bf16_storage")
    if net.load_param(str(path / PARAM)) or net.load_model(str(path / BIN)):
        raise CheckpointError(f"ncnn cannot load {path}", hint="use another copy, or export it again")

    def run(images: np.ndarray) -> np.ndarray:
        outputs = []
        for image in images:  # ncnn does not support batches
            extractor = net.create_extractor()
            extractor.input(net.input_names()[0], ncnn.Mat(image).clone())
            code, output = extractor.extract(net.output_names()[0])
            if code:
                raise CheckpointError(f"ncnn cannot run {path} (code {code})", hint="export it again")
            outputs.append(np.array(output))
        return np.stack(outputs)

    return Opened(metadata, f"ncnn {ncnn.__version__}, CPU", run)
