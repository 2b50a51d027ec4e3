"""Start the trainings of ``yolofleet selftest`` in processes of their own, and read their results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from yolofleet.measure.selftest.checks import Comparison, Leg, Record, further_legs
from yolofleet.measure.trainings import run_training
from yolofleet.runs.checkpoint.names import step_of
from yolofleet.runs.report.folder import RunFolder
from yolofleet.support.errors import ClusterError

Trainer: TypeAlias = Callable[[Mapping[str, Any], int, RunFolder, Mapping[str, str]], tuple[int, str]]


def run_legs(
    comparison: Comparison,
    legs: Sequence[Leg],
    folder: Path,
    *,
    train: Trainer = run_training,
    environments: Mapping[str, Mapping[str, str]] | None = None,
) -> Iterator[Record]:
    """Run the legs one after another, and further ones that help to find a cause.

    Args:
        folder: for their runs and their cache. train: see :func:`run_training`.
        environments: by a leg's title, variables that only its processes get.
    Yields:
        The result of a leg when it has ended.
    Raises:
        ClusterError: the reference failed; its text and exit code are those of that run.
    """
    waiting, records = list(legs), list[Record]()
    while waiting:
        leg = waiting.pop(0)
        run = RunFolder(folder / f"run-{len(records)}")
        extra = {"YOLOFLEET_CACHE": str(folder / "cache"), **(environments or {}).get(leg.title, {})}
        code, problem = train(comparison.settings_of(leg), leg.processes, run, extra)
        if code and not records:
            failed = ClusterError(f"{leg.title} failed: {problem}")
            failed.printed, failed.exit_code = problem, code
            raise failed
        records.append(comparison.read(leg, run, problem))
        yield records[-1]
        if len(records) == len(legs):
            waiting = further_legs(records)


def newest_step(folder: RunFolder) -> int:
    """Return the step of the newest checkpoint, or 0 without any."""
    return max(map(step_of, folder.checkpoints.glob("step-*.safetensors")), default=0)
