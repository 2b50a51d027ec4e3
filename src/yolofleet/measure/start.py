"""Measure the time from a typed command to the first step of its training, by part: ``yolofleet bench start``.

Each run is the command ``yolofleet train --config FILE`` in a process of its own. Its ranks time their tasks
(``training/parallel/activity.py``), and write the seconds as the event ``first_step`` in every training.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from yolofleet.config.resolve import Resolved, training_of
from yolofleet.config.schema import Recipe, TrainConfig, flag_of, may_be_in_files
from yolofleet.config.schema.measure import BenchStartConfig
from yolofleet.config.stored.job import dump_config
from yolofleet.runs.report.folder import RunFolder
from yolofleet.runs.report.history import read_events
from yolofleet.storage.atomic import write_text
from yolofleet.support.errors import StorageError
from yolofleet.support.system.children import start_module

COMMAND, REST, SUM = "command, launch and import of torch", "rest", "sum"
SETTINGS: dict[str, Any] = {"max_steps": 1, "val_period": 0, "plots": False, "restarts": 0}


def measure_start(
    config: Resolved[BenchStartConfig], recipe: Resolved[Recipe], folder: Path
) -> tuple[int, dict[str, Any]]:
    """Run the trainings in turn. One that fails prints the reason, and is the last.

    Args:
        folder: for the runs; the caller removes it.
    Returns:
        the exit code of the last training, and the figures: ``torch_s`` of ``import torch`` alone, and for each run its
        seconds by part.
    """
    began_s = time.time()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    torch_s = time.time() - began_s
    runs: list[dict[str, float]] = []
    code = 0
    while not code and len(runs) < config.value.runs:
        code, seconds = _one_start(config, recipe, folder, f"run-{len(runs)}")
        runs.append(seconds)
    return code, {"torch_s": torch_s, "runs": runs}


def _one_start(
    config: Resolved[BenchStartConfig], recipe: Resolved[Recipe], folder: Path, name: str
) -> tuple[int, dict[str, float]]:
    """Run one training; return its exit code, and its seconds by part. Raise StorageError if it could not write its events."""
    training = training_of(config, TrainConfig)
    own = {**SETTINGS, "project": folder, "name": name}
    value = training.value.model_copy(update=own)
    write_text(job := folder / f"{name}.yaml", dump_config(replace(training, value=value), recipe))
    of_command_line = [
        word
        for name, field in type(config.value).model_fields.items()
        if name in TrainConfig.model_fields
        and not may_be_in_files(field)
        and config.is_given(name)
        and name != "quiet"
        for word in (flag_of(name, field), str(getattr(value, name)))
    ]
    words = ["train", "--config", str(job), "--quiet", *of_command_line]
    began_s = time.time()
    with start_module(
        "yolofleet", *words, environment=os.environ, output=subprocess.DEVNULL, errors=2
    ) as run:
        code = run.wait()
    if code:
        return code, {}
    path = RunFolder(folder / name).events(0)
    event = next((event for event in read_events(path) if event.get("kind") == "first_step"), None)
    if event is None:
        raise StorageError(f"the training could not write {path}", hint="make room on the disk of --project")
    parts = {COMMAND: event["began_at_s"] - began_s, **event["seconds"]}
    all_s = event["time"] - began_s
    return 0, {**parts, REST: all_s - sum(parts.values()), SUM: all_s}


def rows(runs: Sequence[dict[str, float]]) -> list[tuple[str, ...]]:
    """Return the rows of the table: parts that take 5 ms or more in a run, the rest and the sum."""
    names = dict.fromkeys(name for run in runs for name in run)
    order = [name for name in names if name not in (REST, SUM)]
    shown = [name for name in order if any(run.get(name, 0.0) >= 0.005 for run in runs)]
    return [(name, *(f"{run.get(name, 0.0):.2f}" for run in runs)) for name in (*shown, REST, SUM)]
