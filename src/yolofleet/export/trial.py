"""Open a stranger's exported file, first in a child process.

The runtimes that read exported files are native code, and a changed number in a file can end the process, ask for all
memory, or compute without end. The child opens the file and runs one pass over black images, with limits on memory
(Linux), CPU time and files, and without core dump. What fails there is a message. A file that passed is remembered
by its content in the cache folder, so each is tried once on a machine.

One pass is a trial, not a proof: a file can behave differently on other images. No torch here: a child starts in a
fraction of a second where its runtime needs none.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module, metadata
from math import prod
from pathlib import Path

import numpy as np

from yolofleet import __version__
from yolofleet.errors import CheckpointError, ConfigError, StorageError, YolofleetError
from yolofleet.export.export_metadata import ExportMetadata
from yolofleet.export.formats import FORMATS, Format
from yolofleet.files.atomic import write_bytes
from yolofleet.files.caches import cache_root
from yolofleet.files.foreign import open_foreign
from yolofleet.system.children import module_argv, module_environment
from yolofleet.text import size_text

MEMORY_BYTES = 2 << 30  # a child may use so much, plus a share for each byte of the file and each pixel
MEMORY_OF_FILE, MEMORY_OF_PIXEL = (
    8,
    1024,
)  # bytes; yolov5x has 6 activations of at most 80 bytes a pixel at once
CPU_S = 20  # of a child; starting torch takes 3 on a slow core
CPU_S_OF_WORK = 4e-13  # for each byte of the file and pixel; yolov5x takes a tenth
WALL_S = 600  # of a child that computes nothing, and of all on Windows
THREADS = 4  # at most: each reserves memory
FREE_SIDE_PX = 640  # of the images for a file that takes any size
REFUSED = 9  # exit code of a child that gives the reason


@dataclass(frozen=True)
class Opened:
    """An exported file that its runtime has loaded.

    Attributes:
        facts: what the file says about itself.
        place: the runtime, its version and where it runs, for people.
        run: float32 [B, 3, H, W] -> the file's output; one call at a time.
    """

    facts: ExportMetadata
    place: str
    run: Callable[[np.ndarray], np.ndarray]


def open_format(format: Format, path: Path, device: str | None, threads: int) -> Opened:
    """Load ``path`` with the runtime of ``format``, in this process.

    Args:
        device: such as ``cpu`` or ``cuda:0``; None = the best that the runtime can use here.
    Raises:
        CheckpointError: the file is broken, or not understood. ConfigError: the runtime does not run on ``device``.
    """
    try:
        opened = format.module.open_file(path, device, threads)
    except YolofleetError:
        raise
    except OSError as problem:
        raise CheckpointError(
            f"cannot read {path}: {problem.strerror or problem}", hint="check the path"
        ) from None
    except Exception as problem:  # each runtime has exceptions of its own
        raise CheckpointError(
            f"{path} is no {format.name} file that can be run: {first_line(problem)}", hint="use another copy"
        ) from None
    assert isinstance(opened, Opened)
    return opened


def run_once(path: Path, opened: Opened, images: np.ndarray) -> np.ndarray:
    """Return the output for ``images`` as float32.

    Raises:
        CheckpointError: the runtime refuses.
    """
    try:
        return np.asarray(opened.run(images), np.float32)
    except YolofleetError:
        raise
    except Exception as problem:  # each runtime has exceptions of its own
        raise CheckpointError(
            f"{path} cannot be run: {first_line(problem)}", source=opened.place, hint="export it again"
        ) from None


def first_line(problem: Exception) -> str:
    """An exception of a foreign library, short."""
    lines = str(problem).strip().splitlines()
    return " ".join((lines or [type(problem).__name__])[0].split())[:200]


def cpu_only(device: str | None, what: str) -> None:
    """
    Raises:
        ConfigError: another device than the CPU was asked for.
    """
    if device is not None and device.partition(":")[0] != "cpu":
        raise ConfigError(f"{what} runs on the CPU here, not on {device}", hint="--device cpu")


def ensure_tried(format: Format, path: Path, threads: int, *, is_ours: bool = False) -> None:
    """Try ``path`` in a child process, unless the same content has passed on this machine before.

    Args:
        is_ours: this process has just written the file; it counts as tried.
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
    verdict = cache_root() / "tried" / digest
    if verdict.exists():
        return
    if not is_ours:
        _try_in_child(format, path, size_bytes, min(threads, THREADS))
    with suppress(StorageError):  # no room, or a cache that cannot be written: the next process tries again
        write_bytes(verdict, b"")


def _digest(format: Format, parts: list[Path]) -> tuple[str, int]:
    """Return the name of a verdict, which all that can change it goes into, and the bytes of the parts."""
    total, size_bytes = hashlib.sha256(), 0
    for part in parts:
        with open_foreign(part) as file:
            found = hashlib.sha256()
            while chunk := file.read(1 << 20):
                found.update(chunk)
                size_bytes += len(chunk)
        total.update(f"{part.name}\0".encode(errors="surrogateescape") + found.digest())
    package = format.runs[-1] if format.runs else "torch"
    about = [__version__, format.name, package, _version(package), platform.node(), platform.machine()]
    total.update("\0".join(about).encode())
    return total.hexdigest(), size_bytes


def _version(module: str) -> str:
    try:
        return metadata.version(module.replace("_", "-"))
    except metadata.PackageNotFoundError:  # onnxruntime-gpu has the module onnxruntime
        return str(getattr(import_module(module), "__version__", ""))


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
            hint="memory or the number of processes may be exhausted",
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
        hint="the file is broken or hostile, or memory is short: use another copy, or export it again",
    )


def _refusal(path: Path, answer: bytes) -> YolofleetError:
    """Return the error of a child; its class is lost unless it is a ConfigError."""
    try:
        is_config, what, source, hint = json.loads(answer)
    except ValueError:
        return CheckpointError(f"{path} cannot be run", hint="use another copy, or export it again")
    return (ConfigError if is_config else CheckpointError)(what, source=source, hint=hint)


# -- in the child ------------------------------------------------------------------------------------------


def main() -> None:
    """Try the file that the arguments name; the exit code says how it went, REFUSED with words on standard output."""
    name, path, size_bytes, threads, cpu_s = sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:6])
    answer = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # some runtimes print
    on_gpu = name == "tensorrt"  # its driver maps more memory than the machine has
    _set_limits(size_bytes, 0, cpu_s, on_gpu)
    try:
        opened = open_format(FORMATS[name], path, None if on_gpu else "cpu", threads)
        facts = opened.facts
        free_px = -(-FREE_SIDE_PX // facts.stride) * facts.stride
        shape = (facts.batch or 1, 3, *(facts.size_hw or (free_px, free_px)))
        _set_limits(size_bytes, prod(shape) // 3, cpu_s, on_gpu)
        run_once(path, opened, np.zeros(shape, np.float32))
    except (YolofleetError, MemoryError) as problem:
        error = problem if isinstance(problem, YolofleetError) else _short_of_memory(path)
        words = isinstance(error, ConfigError), error.what, error.source, error.hint
        os.write(answer, json.dumps(words).encode())
        os._exit(REFUSED)
    os._exit(0)  # without destructors, which may crash in turn


def _short_of_memory(path: Path) -> CheckpointError:
    return CheckpointError(f"{path} needs more memory than a network of its size", hint="use another copy")


def _set_limits(file_bytes: int, pixels: int, cpu_s: int, on_gpu: bool) -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    memory_bytes = MEMORY_BYTES + MEMORY_OF_FILE * file_bytes + MEMORY_OF_PIXEL * pixels
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
    # not the main of this copy of the module: the formats import its classes from the one with a name
    from yolofleet.export import trial

    trial.main()
