"""Load an exported file with its runtime, and run it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from yolofleet.inference.export.export_metadata import ExportMetadata
from yolofleet.inference.export.formats import Format
from yolofleet.support.errors import CheckpointError, ConfigError, YolofleetError
from yolofleet.support.files.foreign import reading


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
