"""Load an ncnn network, first in a child process. No torch here, so the child starts in a third of a second.

ncnn ends the process on some broken files: a changed number in ``.param`` is a segmentation fault or a division by
zero. The child loads the files and runs one pass over a black image, without core dump, without files that grow,
with bounds on memory (Linux) and time (not on Windows). What fails there is a message.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from yolofleet import errors
from yolofleet.errors import CheckpointError

LIMIT_S = 120  # of the child; yolov5x takes 5 on one core
BASE_BYTES = 4 * 2**30  # memory of the child beside BYTES_PER_FILE_BYTE
BYTES_PER_FILE_BYTE = 16
REFUSES = 9  # exit code of a child in which ncnn refuses the files with a code of its own
START = (
    "import sys; sys.path[:] = [p for p in sys.path if p] + [sys.argv[1]]; "
    "from yolofleet.export.ncnn_network import main; main()"
)


def load(param: Path, content: Path, threads: int, half: bool) -> Any:
    """Return the ``ncnn.Net``; None where ncnn refuses the files."""
    import ncnn

    net = ncnn.Net()
    net.opt.num_threads = threads
    for option in ("use_fp16_packed", "use_fp16_storage", "use_fp16_arithmetic", "use_bf16_storage"):
        setattr(net.opt, option, half and option != "use_bf16_storage")
    return None if net.load_param(str(param)) or net.load_model(str(content)) else net


def run(net: Any, image: np.ndarray) -> np.ndarray | int:
    """Return the output for a float32 image [3, H, W], or ncnn's error code."""
    import ncnn

    extractor = net.create_extractor()
    extractor.input(net.input_names()[0], ncnn.Mat(image).clone())
    code, output = extractor.extract(net.output_names()[0])
    return int(code) if code else np.array(output)


def try_in_child(param: Path, content: Path, size_hw: tuple[int, int], threads: int, half: bool) -> None:
    """Load the files and run one pass in a child process.

    Raises:
        CheckpointError: the child crashed, or did not end in time or memory.
    """
    package = str(Path(errors.__file__).resolve().parents[1])
    words = [package, str(param), str(content), *map(str, (*size_hw, threads, int(half)))]
    try:
        child = subprocess.run(
            [sys.executable, "-c", START, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except OSError as problem:
        raise CheckpointError(f"cannot start a process to try {param}: {problem.strerror}") from None
    code = child.returncode
    if code in (0, REFUSES):
        return
    why = f"the process that tried it ended with exit code {code}"
    if code == -getattr(signal, "SIGALRM", 0):
        why = f"one pass took more than {LIMIT_S} s"
    elif code < 0:
        why = f"ncnn crashed on it ({signal.Signals(-code).name})"
    raise CheckpointError(
        f"{param.parent} cannot be run: {why}",
        hint="the file is broken or hostile, or memory is short: use another copy, or export it again",
    )


def main() -> None:
    """Try the files that the arguments name; the exit code says how it went."""
    param, content = map(Path, sys.argv[2:4])
    height, width, threads, half = map(int, sys.argv[4:8])
    _set_bounds(param.stat().st_size + content.stat().st_size)
    net = load(param, content, threads, bool(half))
    if net is not None:
        run(net, np.zeros((3, height, width), np.float32))
    os._exit(0 if net is not None else REFUSES)  # without destructors, which may crash in turn


def _set_bounds(file_bytes: int) -> None:
    if hasattr(signal, "alarm"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(LIMIT_S)
    try:
        import resource
    except ImportError:  # Windows
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    limit = BASE_BYTES + BYTES_PER_FILE_BYTE * file_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
