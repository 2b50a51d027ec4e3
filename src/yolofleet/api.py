"""The Python interface: ``yolofleet train`` and ``yolofleet predict`` as two names.

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
    """Load a detector from a weights file. No code from the file is executed.

    Args:
        weights: a weights file (.safetensors, .pt, .weights, .pdparams), an exported file, or the folder of a run
            (its best weights).
        cfg: description of the network, if the file has none (.weights).
        device: auto | cpu | mps | one CUDA id.
        settings: further arguments of :class:`yolofleet.predict.predictor.Predictor`: conf, iou, classes,
            img (default: as in training), ...

    Raises:
        CheckpointError: the file is missing, or has no weights.
        ConfigError: the device, class or precision does not exist.
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
    """Return the weights of the run's best validation, or the last ones if the run never validated."""
    best = run / "weights" / "best.safetensors"
    return best if best.exists() else best.with_name("last.safetensors")


@dataclass(frozen=True)
class TrainResult:
    """The result of a finished run.

    Attributes:
        folder: of the run.
        metrics: of the last validation, as in results.json: "P", "R", "mAP50", "mAP50-95", ...
        weights: file of the best weights.
    """

    folder: Path
    metrics: dict[str, float]
    weights: Path


class Trainer:
    """A training run. The constructor checks its settings, :meth:`fit` trains.

    Args:
        settings: any settings of ``yolofleet train``, with underscores in their names: data, model, weights,
            epochs, batch, device, ...; ``set=("lr0=0.005",)`` changes the recipe.

    Raises:
        ConfigError: a name is unknown, a value is not valid, or settings are mutually exclusive.
    """

    def __init__(self, **settings: Any) -> None:
        given = {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()}
        self.config, self.recipe = resolve_train(given, source="Trainer(...)")

    def fit(self) -> TrainResult:
        """Train in this process for one device, in one process per device for several, or on ``hosts``.

        Works in a notebook too.

        Raises:
            YolofleetError: any expected failure; Stopped if the run got a stop request and can be resumed.
        """
        if is_worker():
            raise ConfigError(
                "Trainer starts its own processes, so it cannot run in a process that torchrun started",
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
    """Return the error for processes that ended with ``exit_code``; they have printed the reason on standard error."""
    kinds = (ConfigError, DataError, StorageError, ClusterError, NumericsError, Stopped)
    kind = next((kind for kind in kinds if kind.exit_code == exit_code), YolofleetError)
    if kind is Stopped:
        return Stopped(
            "the run stopped on request; its state is saved",
            hint=f"Trainer(resume={str(folder.path)!r}).fit()",
        )
    return kind(
        f"the run ended with exit code {exit_code}", source=str(folder.logs), hint="see its message above"
    )
