"""The Python face: what ``yolofleet train`` and ``yolofleet predict`` do, as two names.

from yolofleet import Trainer, load_model

result = Trainer(data="coco128.yaml", weights="yolov5n.pt", epochs=3, device="0,1").fit()
for prediction in load_model(result.weights).predict("street.jpg"):
    print(prediction.counts())
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from yolofleet.checkpoint.reader import load_weights
from yolofleet.checkpoint.weights import model_from_weights
from yolofleet.config.load import resolve_train
from yolofleet.errors import (
    ClusterError,
    ConfigError,
    DataError,
    NumericsError,
    Stopped,
    StorageError,
    YolofleetError,
)
from yolofleet.export.formats import format_of
from yolofleet.export.runtime import open_weights
from yolofleet.predict.predictor import Predictor, one_device
from yolofleet.report.folder import RunFolder
from yolofleet.runs.plan import is_worker, plan_run
from yolofleet.runs.start import start


def load_model(
    weights: str | Path, *, cfg: str | Path = "", device: str = "auto", **settings: Any
) -> Predictor:
    """A detector from a weights file (.safetensors, or a foreign one, which is read without executing it).

    Args:
        weights: a file, exported or not, or the folder of a run (its best weights).
        cfg: description of the network where the file has none (.weights).
        device: auto | cpu | mps | one CUDA id.
        settings: further arguments of :class:`yolofleet.predict.predictor.Predictor`: conf, iou, classes,
            img (default: as in training), ...

    Raises:
        CheckpointError: no such file, or not weights.
        ConfigError: no such device, class or precision.
    """
    path = Path(weights)
    if format_of(path) is not None:
        chosen = None if device == "auto" else one_device(device)
        return Predictor(open_weights(str(path), str(cfg), device=chosen), **settings)
    if path.is_dir():
        path = best_weights(path)
    found = load_weights(str(path), str(cfg))
    return Predictor(model_from_weights(found), device=device, **{"img": found.header.img, **settings})


def best_weights(run: Path) -> Path:
    """Of a run's folder: those of the best validation, or the last ones of a run that never validated."""
    best = run / "weights" / "best.safetensors"
    return best if best.exists() else best.with_name("last.safetensors")


@dataclass(frozen=True)
class TrainResult:
    """What a finished run left behind.

    Attributes:
        folder: of the run.
        metrics: of its last validation, as in results.json: "P", "R", "mAP50", "mAP50-95", ...
        weights: its best.
    """

    folder: Path
    metrics: dict[str, float]
    weights: Path


class Trainer:
    """A training run, checked when it is made and done by :meth:`fit`.

    Args:
        settings: every setting of ``yolofleet train``, by its name with underscores: data, model, weights,
            epochs, batch, device, ...; ``set=("lr0=0.005",)`` changes the recipe.

    Raises:
        ConfigError: an unknown name (with the nearest one), a wrong value, or some that exclude each other.
    """

    def __init__(self, **settings: Any) -> None:
        given = {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()}
        self.config, self.recipe = resolve_train(given, source="Trainer(...)")

    def fit(self) -> TrainResult:
        """Train: here for one device, in a process per device for several (also from a notebook), or on ``hosts``.

        Raises:
            YolofleetError: anything foreseen; Stopped when the run was asked to stop and can be resumed.
        """
        if is_worker():
            raise ConfigError(
                "Trainer starts its processes by itself, and this one was started by torchrun",
                hint="start the script with python, or use torchrun with -m yolofleet train",
            )
        code, folder = start(plan_run(self.config, self.recipe))
        return self._result(code, folder)

    def _result(self, code: int, folder: RunFolder) -> TrainResult:
        if code:
            raise failure(code, folder)
        results = json.loads(folder.results_json.read_text(encoding="utf-8"))
        return TrainResult(folder.path, results["metrics"], best_weights(folder.path))


def failure(exit_code: int, folder: RunFolder) -> YolofleetError:
    """The error of a job whose processes ended with ``exit_code``; they have said why on standard error."""
    kinds = (ConfigError, DataError, StorageError, ClusterError, NumericsError, Stopped)
    kind = next((kind for kind in kinds if kind.exit_code == exit_code), YolofleetError)
    if kind is Stopped:
        return Stopped(
            "the run was stopped; its state is saved", hint=f"Trainer(resume={str(folder.path)!r}).fit()"
        )
    return kind(
        f"the run ended with exit code {exit_code}", source=str(folder.logs), hint="its message is above"
    )
