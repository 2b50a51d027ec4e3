"""Continue a run at the step where a checkpoint was made, on any fleet.

The order in which states are tried is in ``checkpoint/store.py``; what a user may change on the way is in
``config/resume.py``. Here: the state reaches every rank, and is refused where it is not this run's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from yolofleet.checkpoint.format import decode_tensors
from yolofleet.checkpoint.store import CheckpointStore, Snapshot, decode_snapshot
from yolofleet.config.checks import micro_batch_of
from yolofleet.config.schema import Recipe, TrainConfig
from yolofleet.data.index import DataIndex
from yolofleet.errors import CheckpointError, ClusterError, DataError, YolofleetError
from yolofleet.models.detection import DetectionModel
from yolofleet.parallel.world import World
from yolofleet.report.console import NullConsole


def fingerprint(
    config: TrainConfig, recipe: Recipe, index: DataIndex, model: DetectionModel
) -> dict[str, Any]:
    """What the run's result is a function of; a checkpoint continues only where this is equal."""
    fixed = [
        "img",
        "single_cls",
        "batch",
        "nominal_batch",
        "optimizer",
        "lr_schedule",
        "multi_scale",
        "freeze",
        "seed",
        "sync_bn",
    ]
    return {
        "settings": {name: getattr(config, name) for name in fixed} | {"micro_batch": micro_batch_of(config)},
        "recipe": recipe.model_dump(),
        "data": index.digest,
        "model": model.description.to_dict(),
        "names": list(model.names),
    }


def snapshot_for_all(world: World, resume_from: Path | None, console: NullConsole) -> Snapshot | None:
    """Rank 0 finds and verifies the state, all get its bytes (folders need not be shared).

    Collective: every rank.
    """
    if resume_from is None:
        return None
    content, origin, problem = b"", "", None
    if world.is_main:
        try:
            if resume_from.is_dir():
                found, passed_over = CheckpointStore(resume_from / "checkpoints").newest()
                for note in passed_over:
                    console.warn(f"passed over: {note}")
            else:
                found = resume_from
            content, origin = found.read_bytes(), str(found)
        except YolofleetError as error:
            problem = error
        except OSError as error:
            problem = CheckpointError(f"cannot read {resume_from}: {error.strerror}")
    content = world.broadcast_bytes(content)
    if problem is not None:
        raise problem
    if not content:
        raise ClusterError("rank 0 could not read the checkpoint; its message says why")
    return decode_snapshot(decode_tensors(content, origin or "the checkpoint sent by rank 0"), origin)


def check_resume(then: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse to continue something else (``config/resume.py`` has told the user what may change).

    Raises:
        CheckpointError, DataError: settings, recipe, model or data are not the checkpoint's.
    """
    for part in ("settings", "recipe", "model", "names"):
        if then[part] != now[part]:
            raise CheckpointError(
                f"the checkpoint was made with another {part}: {first_difference(then[part], now[part])}",
                hint="resume with the run's own configuration, or start a new run with --weights",
            )
    if then["data"] != now["data"]:
        raise DataError(
            "the training data changed since the checkpoint (images, sizes or labels)",
            hint="restore the data set, or start a new run with --weights",
        )


def first_difference(then: Any, now: Any) -> str:
    if isinstance(then, dict) and isinstance(now, dict):
        for key in sorted({*then, *now}):
            if then.get(key) != now.get(key):
                return f"{key} was {then.get(key)}, is {now.get(key)}"
    return f"was {then}, is {now}"[:300]
