"""Try an exported file of unknown origin in a child process before opening it.

The runtimes of exported files are native code. A changed number in a file can crash the process, allocate all memory, or
start an endless computation. The child process opens the file and runs one pass over black images. It has limits for
memory (Linux), CPU time and file sizes, and writes no core dump. A failure becomes an error message. The cache folder
stores the digests of files that passed, so each machine tries a file once.

One pass proves nothing: a file can behave differently on other images. This module does not import torch, so a child
process starts in a fraction of a second unless its runtime needs torch.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from yolofleet import __version__
from yolofleet.errors import CheckpointError, ConfigError, StorageError, YolofleetError
from yolofleet.export.export_metadata import ExportMetadata
from yolofleet.export.formats import FORMATS, Format
from yolofleet.files.atomic import write_bytes
from yolofleet.files.caches import cache_folder
from yolofleet.files.foreign import open_foreign, reading
from yolofleet.system.children import module_argv, module_environment
from yolofleet.text import size_text

MAX_BYTES = 4 << 30  # of an exported file; yolov5x needs 0.35 GB
MEMORY_BYTES = 2 << 30  # memory limit of a child process for an empty file without images
MEMORY_PER_FILE_BYTE, MEMORY_PER_PIXEL = 8, 1024  # additional bytes; yolov5x needs about 480 a pixel
CPU_S = 20  # CPU time limit of a child process; torch needs 3 s to start on a slow core
CPU_S_OF_WORK = 4e-13  # additional seconds for each byte of the file and pixel; yolov5x needs a tenth
WALL_S = 600  # time limit of a child process that waits, and of every child process on Windows
MAX_THREADS = 4  # because each thread reserves memory
DEFAULT_SIDE_PX = 640  # side of the images for a file that accepts any size
REFUSED = 9  # exit code of a child process that reports an error on standard output


@dataclass(frozen=True)
class Opened:
    """An exported file that its runtime has loaded.

    Attributes:
        metadata: metadata of the file.
        place: name and version of the runtime, and its device, as text.
        run: returns the output for images float32 [B, 3, H, W]; only one thread may call it at a time.
    """

    metadata: ExportMetadata
    place: str
    run: Callable[[np.ndarray], np.ndarray]


def open_format(format: Format, path: Path, device: str | None, threads: int) -> Opened:
    """Load ``path`` with the runtime of ``format``, in this process.

    Args:
        device: such as ``cpu`` or ``cuda:0``; None: the fastest that the runtime supports here.
    Raises:
        CheckpointError: the file is damaged, or its format is unknown.
        ConfigError: the runtime does not support ``device``.
    """
    try:
        with reading(path, CheckpointError, "check the path"):
            opened = format.module.open_file(path, device, threads)
    except YolofleetError:
        raise
    except Exception as problem:  # each runtime has its own exceptions
        raise CheckpointError(
            f"cannot load {path} as {format.name}: {first_line(problem)}", hint="use another copy"
        ) from None
    assert isinstance(opened, Opened)
    return opened


def run_once(path: Path, opened: Opened, images: np.ndarray) -> np.ndarray:
    """Return the output for ``images`` as float32.

    Raises:
        CheckpointError: the runtime fails.
    """
    try:
        return np.asarray(opened.run(images), np.float32)
    except YolofleetError:
        raise
    except Exception as problem:  # each runtime has its own exceptions
        raise CheckpointError(
            f"{path} cannot be run: {first_line(problem)}", source=opened.place, hint="export it again"
        ) from None


def first_line(problem: Exception) -> str:
    """Return the first line of an exception's text, or its class name; at most 200 characters."""
    lines = str(problem).strip().splitlines()
    return " ".join((lines or [type(problem).__name__])[0].split())[:200]


def cpu_only(device: str | None, what: str) -> None:
    """Raise if ``device`` is not the CPU; ``what`` names the runtime.

    Raises:
        ConfigError: ``device`` is not None and not a CPU.
    """
    if device is not None and device.partition(":")[0] != "cpu":
        raise ConfigError(f"{what} runs on the CPU only, not on {device}", hint="--device cpu")


def ensure_tried(format: Format, path: Path, threads: int, *, is_ours: bool = False) -> None:
    """Try ``path`` in a child process, unless the same content has passed before on this machine.

    Args:
        is_ours: this process has just written the file, so no trial is needed.
    Raises:
        CheckpointError: the file cannot be read, or the child refused it, crashed, or exceeded a limit.
    """
    try:
        parts = format.module.parts(path)
        digest, size_bytes = _digest(format, parts)
    except OSError as problem:
        raise CheckpointError(
            f"cannot read {problem.filename or path}: {problem.strerror or problem}",
            hint="copy all parts of the file together, or export it again",
        ) from None
    verdict = cache_folder("tried") / digest
    if verdict.exists():
        return
    if not is_ours:
        _try_in_child(format, path, size_bytes, min(threads, MAX_THREADS))
    with suppress(StorageError):  # if the cache cannot be written, the next process tries the file again
        write_bytes(verdict, b"")


def _digest(format: Format, parts: list[Path]) -> tuple[str, int]:
    """Return the digest of everything that can change the result of a trial, and the size of the parts in bytes."""
    total, size_bytes = hashlib.sha256(), 0
    for part in parts:
        with open_foreign(part) as file:
            size_bytes += os.fstat(file.fileno()).st_size
            if size_bytes > MAX_BYTES:  # before reading, because a file with a hole can claim any size
                raise CheckpointError(
                    f"{part} is too large; the limit is {size_text(MAX_BYTES)}", hint="export it again"
                )
            found = hashlib.sha256()
            while chunk := file.read(1 << 20):
                found.update(chunk)
        total.update(f"{part.name}\0".encode(errors="surrogateescape") + found.digest())
    package = format.runs[-1] if format.runs else "torch"
    versions = [__version__, format.name, package, _version(package), platform.node(), platform.machine()]
    total.update("\0".join(versions).encode())
    return total.hexdigest(), size_bytes


def _version(module: str) -> str:
    try:
        return importlib.metadata.version(module.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:  # onnxruntime-gpu has the module onnxruntime
        return str(getattr(importlib.import_module(module), "__version__", ""))


def _try_in_child(format: Format, path: Path, size_bytes: int, threads: int) -> None:
    words = [format.name, str(path.absolute()), str(size_bytes), str(threads), str(CPU_S)]
    try:
        child = subprocess.run(
            module_argv("yolofleet.export.trial", *words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=module_environment(os.environ) | {"OMP_NUM_THREADS": str(threads)},
            timeout=WALL_S,
        )
    except OSError as problem:
        raise CheckpointError(
            f"cannot start a process to try {path}: {problem.strerror or problem}",
            hint="memory or the maximum number of processes may be exhausted",
        ) from None
    except subprocess.TimeoutExpired:
        why = f"one pass takes more than {WALL_S} s"
    else:
        code = child.returncode
        if code == 0:
            return
        if code == REFUSED:
            raise _refusal(path, child.stdout)
        why = f"the process that tried it ended with exit code {code}"
        if code == -getattr(signal, "SIGXCPU", 0):
            why = f"one pass takes more CPU time than the network of a file of {size_text(size_bytes)} needs"
        elif code < 0:
            why = f"{format.name}'s runtime crashed on it ({signal.Signals(-code).name})"
    raise CheckpointError(
        f"{path} cannot be run: {why}",
        hint="the file is damaged or malicious, or the machine has too little memory: use another copy, or export it again",
    )


def _refusal(path: Path, answer: bytes) -> YolofleetError:
    """Return the error that a child process reports, as ConfigError or CheckpointError."""
    try:
        is_config, what, source, hint = json.loads(answer)
    except ValueError:
        return CheckpointError(f"{path} cannot be run", hint="use another copy, or export it again")
    return (ConfigError if is_config else CheckpointError)(what, source=source, hint=hint)


# -- in the child ------------------------------------------------------------------------------------------


def main() -> None:
    """Try the file that the arguments name. Exit with 0, or with REFUSED and the error as JSON on standard output."""
    name, path, size_bytes, threads, cpu_s = sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:6])
    answer = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # some runtimes print
    on_gpu = name == "tensorrt"  # the driver maps more memory than the machine has
    _set_limits(size_bytes, 0, cpu_s, on_gpu)
    try:
        opened = open_format(FORMATS[name], path, None if on_gpu else "cpu", threads)
        metadata = opened.metadata
        side_px = -(-DEFAULT_SIDE_PX // metadata.stride) * metadata.stride
        shape = (metadata.batch or 1, 3, *(metadata.size_hw or (side_px, side_px)))
        _set_limits(size_bytes, int(np.prod(shape)) // 3, cpu_s, on_gpu)
        run_once(path, opened, np.zeros(shape, np.float32))
    except (YolofleetError, MemoryError) as problem:
        short = CheckpointError(
            f"{path} needs more memory than a network of its size", hint="use another copy"
        )
        error = problem if isinstance(problem, YolofleetError) else short
        words = isinstance(error, ConfigError), error.what, error.source, error.hint
        os.write(answer, json.dumps(words).encode())
        os._exit(REFUSED)
    os._exit(0)  # without destructors, because they may crash too


def _set_limits(file_bytes: int, pixels: int, cpu_s: int, on_gpu: bool) -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    memory_bytes = MEMORY_BYTES + MEMORY_PER_FILE_BYTE * file_bytes + MEMORY_PER_PIXEL * pixels
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CPU: cpu_s + int(CPU_S_OF_WORK * file_bytes * pixels),
        resource.RLIMIT_DATA: resource.RLIM_INFINITY if on_gpu else memory_bytes,
    }
    for kind, limit in limits.items():
        _, most = resource.getrlimit(kind)
        resource.setrlimit(kind, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))


if __name__ == "__main__":
    # This copy of the module is ``__main__``. The formats import the other copy, so its classes must be used.
    from yolofleet.export import trial

    trial.main()
