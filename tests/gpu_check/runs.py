"""Start the short trainings of stages, and read their results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpu_check.machine import Machine, StageFailed
from gpu_check.processes import command
from yolofleet.runs.report.folder import RunFolder
from yolofleet.runs.report.results import read_rows


def train_argv(machine: Machine, name: str, *more: str | Path) -> list[str | Path]:
    """Return the command line of a short training; a later option wins over an earlier one."""
    img, batch, micro = (64, 8, 2) if machine.is_toy else (320, 64, 16)
    size = f"--img {img} --batch {batch} --nominal-batch {batch} --micro-batch {micro} --epochs 2".split()
    files: list[str | Path] = ["--data", machine.data, "--project", machine.work, "--name", name]
    toy = ["--workers", "0", "--threads", "1"] if machine.is_toy else []
    plain = ["--no-plots", "--no-autoanchor", "--set", "warmup_epochs=0"]
    network = ["--model", machine.network, "--device", machine.one]
    return ["train", *files, *network, *size, *toy, *plain, *more]


def trained(machine: Machine, name: str, *more: str | Path) -> dict[str, Any]:
    """Train to the end; return the results.

    Raises:
        StageFailed: the command failed, or left a loss or a weight that is not finite.
    """
    command(*train_argv(machine, name, *more))
    return checked_results(RunFolder(machine.work / name))


def checked_results(folder: RunFolder) -> dict[str, Any]:
    """Return the results of a run whose losses and weights are finite.

    Raises:
        StageFailed: one is not.
    """
    from safetensors.torch import load_file

    from yolofleet.families.weights.format import non_finite

    last = {
        name: cell for name, cell in read_rows(folder.results_csv)[-1].items() if name.startswith("train/")
    }
    if bad := [name for name, cell in last.items() if not cell]:  # what is not finite has an empty cell
        raise StageFailed(f"{folder.path.name}: {', '.join(bad)} of the last epoch is not finite")
    weights = load_file(folder.weights / "last.safetensors")
    if bad := non_finite(weights):
        raise StageFailed(
            f"{folder.path.name}: {len(bad)} of {len(weights)} tensors are not finite, first {bad[0]}"
        )
    results: dict[str, Any] = json.loads(folder.results_json.read_text(encoding="utf-8"))
    return results | {"loss": sum(map(float, last.values()))}
