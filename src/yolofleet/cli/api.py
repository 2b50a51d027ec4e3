"""The Python interface: the verbs of the command line as methods of one class.

from yolofleet import Model

model = Model("yolov5n.pt")
run = model.train(data="coco128.yaml", epochs=3, device="0,1")  # the model now has the weights of this run
print(model.val(data="coco128.yaml").metrics["mAP50-95"])
for prediction in model.predict("street.jpg", conf=0.4):
    print(prediction.counts())
model.export(format="onnx,openvino")
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import BaseModel

from yolofleet.cli.weights import facts_of
from yolofleet.config.hub_names import is_hub_name
from yolofleet.config.load import (
    predict_config,
    resolve_bench,
    resolve_export,
    resolve_predict,
    resolve_train,
    resolve_tune,
    resolve_val,
)
from yolofleet.config.schema import TrainConfig, ValConfig, best_weights, group_of
from yolofleet.config.schema.fields import file_of_weights
from yolofleet.config.schema.measure import TuneConfig
from yolofleet.config.schema.verbs import BenchConfig, ExportConfig, PredictConfig
from yolofleet.families.networks.description import preset_names
from yolofleet.families.weights.catalogue import resolve_weights
from yolofleet.fleet.hosts.fleet import HERE, Fleet, named_fleet
from yolofleet.fleet.launch.machines import RunPlan
from yolofleet.fleet.launch.plan import is_worker, plan_run, start
from yolofleet.inference.export.exporter import export_all
from yolofleet.inference.export.formats import format_of
from yolofleet.inference.predict.predictor import Predictor, sources_in
from yolofleet.inference.predict.results import Prediction, Predictions
from yolofleet.inference.predict.run import Output, predictor_of, show
from yolofleet.measure.bench_inference import bench
from yolofleet.measure.tune.search import TuneResult, tune
from yolofleet.runs.report.console import Console
from yolofleet.runs.report.folder import RunFolder
from yolofleet.support.errors import ClusterError, ConfigError, NonFiniteError, Stopped, YolofleetError
from yolofleet.support.text import inform

# groups of settings of predict that decide the predictor, and not what happens with its predictions
PREDICTOR_GROUPS = ("input", "your own code", "method", "execution")
# settings of predict that write files
WRITES = ("save", "save_as", "save_txt", "save_json", "save_csv", "save_crop")


def load_model(
    weights: str | Path, *, cfg: str | Path = "", device: str = "auto", **settings: Any
) -> Predictor:
    """Load a detector from a weights file. No code from the file is executed.

    Args:
        weights: a weights file (.safetensors, .pt, .weights, .pdparams), an exported file, or the folder of a run
            (its best weights).
        cfg: description of the network, if the file has none (.weights).
        device: auto | cpu | mps | one CUDA id.
        settings: settings of ``yolofleet predict`` that decide its boxes: conf, iou, classes,
            img (default: as in training), ...

    Raises:
        CheckpointError: the file is missing, or has no weights.
        ConfigError: the device, class or precision does not exist.
    """
    config = predict_config(weights=(str(weights),), cfg=str(cfg), device=device, **settings)
    return _with_size_note(predictor_of(config))


# -- results ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainResult:
    """The result of a finished run.

    Attributes:
        folder: of the run.
        metrics: of the last validation, as in results.json.
        weights: file of the best weights.
    """

    folder: Path
    metrics: dict[str, float]
    weights: Path


@dataclass(frozen=True)
class ValResult:
    """The result of a validation.

    Attributes:
        folder: with results.json, plots and the files that the settings ask for.
        metrics: the figures by name, as in results.json.
        per_class: figures by class name.
        images: number of images.
        seconds: by phase.
    """

    folder: Path
    metrics: dict[str, float]
    per_class: dict[str, dict[str, float]]
    images: int
    seconds: dict[str, float]


@dataclass(frozen=True)
class ExportResult:
    """One exported file.

    Attributes:
        file: the file, or the folder of a format with several files.
        format: its name.
        mib: size in MiB.
        verified: the file ran here, and its output agrees with the network's.
        figures: all figures, as ``--json`` writes them: differences, runtime, or why the file is not verified.
    """

    file: Path
    format: str
    mib: float
    verified: bool
    figures: Mapping[str, Any]


@dataclass(frozen=True)
class BenchResult:
    """The measured speed of a model.

    Attributes:
        median_ms: median milliseconds of a pass by stage: "letterbox", "forward", "nms", "all".
        images_per_s: throughput.
        figures: all figures, as ``--json`` writes them.
    """

    median_ms: dict[str, float]
    images_per_s: float
    figures: Mapping[str, Any]


Method = TypeVar("Method", bound=Callable[..., Any])


def takes(config: type[BaseModel]) -> Callable[[Method], Method]:
    """Show ``**settings`` of a method as the settings of a command, with their defaults, to help() and to completion."""

    def shown(method: Method) -> Method:
        written = inspect.signature(method)
        own = [one for one in written.parameters.values() if one.kind is not one.VAR_KEYWORD]
        settings = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.annotation
            )
            for name, field in config.model_fields.items()
            if name not in written.parameters
        ]
        vars(method)["__signature__"] = written.replace(parameters=[*own, *settings])
        return method

    return shown


# -- the model -------------------------------------------------------------------------------------------------


class Model:
    """A detector and what can be done with it. Each method takes every setting of the command of its name.

    The names of settings have underscores: ``nominal_batch=32``. A method runs in this process for one device, in one
    process for each of several (``device="0,1"``, ``device="cpu:2"``), or on ``hosts``, after the checks of the command.

    Args:
        model: a weights file or its published name, an exported file, the folder of a run (its best weights), a built-in
            model (``yolov5n``), or a model description (.yaml, .cfg).
        cfg: description of the network for weights that have none (.weights).
        recipe_class: your own model, loss or data set, ``FILE.py:CLASS``; with ``model=""`` the class has the network.

    Attributes:
        weights: the weights file; "" until an untrained model is trained.
    """

    def __init__(self, model: str | Path = "", *, cfg: str | Path = "", recipe_class: str = "") -> None:
        path, name = Path(model), str(model)
        self.model, self.cfg, self.weights, self.recipe_class = "", str(cfg), "", recipe_class
        self._predictor: tuple[dict[str, Any], Predictor] | None = None
        if not (name or recipe_class):
            raise ConfigError("no model: expected a weights file, a built-in name or a description")
        if path.suffix.lower() in (".yaml", ".yml", ".cfg") and not is_hub_name(name):
            self.cfg = name
        elif name in preset_names():
            self.model = name
        else:
            self.weights = file_of_weights(name)
            if name and "://" not in name and not (path.exists() and format_of(path)):
                resolve_weights(self.weights, download=False)  # raises if no file has that name

    def __repr__(self) -> str:
        return f"Model({self.weights or self.cfg or self.model!r})"

    @takes(TrainConfig)
    def train(self, **settings: Any) -> TrainResult:
        """Train, and take the best weights of the run. Ctrl-C, or the interrupt of a notebook's cell, saves and stops it.

        Args:
            settings: of ``yolofleet train``; ``set=("lr0=0.005",)`` changes the recipe, ``resume=FOLDER`` goes on with
                that run instead of starting one from this model. With ``detach=True`` the run goes on after an interrupt,
                and when this process has ended; :func:`attach` shows it again (Linux).

        Raises:
            YolofleetError: any expected failure, with the text of the command; Stopped if the run got a stop request and
                can be resumed.
            KeyboardInterrupt: an interrupt of this view of a detached run.
        """
        if settings.get("resume") is True:  # as Ultralytics resumes the run of a model
            settings["resume"] = self.weights or "auto"
        mine = self._network(resumes=bool(settings.get("resume")))
        result = _train({**mine, **settings}, "Model.train(...)")
        self.model, self.cfg, self.weights, self._predictor = "", "", str(result.weights), None
        return result

    @takes(ValConfig)
    def val(self, **settings: Any) -> ValResult:
        """Measure the accuracy on ``data``. Takes the settings of ``yolofleet val``; raises as :meth:`train`."""
        folder = _run(plan_run(self._resolved("val", resolve_val, settings)), "val")
        results = _results(folder)
        parts = {name: results[name] for name in ("metrics", "per_class", "images", "seconds")}
        return ValResult(folder.path, **parts)

    @takes(PredictConfig)
    def predict(self, source: Any, **settings: Any) -> Predictions:
        """Return the boxes of all images of ``source``; for long videos use :meth:`stream`.

        Args:
            source: a source of ``yolofleet predict``, a picture in memory (:func:`yolofleet.inference.predict.pictures.pixels_of`), or
                a list of these.
            settings: of ``yolofleet predict``. Files are written only if a setting asks for it: ``save="images"``,
                ``save_txt=True``, ... ``img`` is the size in training by default.

        Raises:
            DataError: an image cannot be read. ConfigError, CheckpointError, StorageError: as the command. ConfigError:
                the source may have no end, such as a camera.
        """
        return Predictions(self.stream(sources_in(source, must_end=True), **settings))

    __call__ = predict

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the classes of its weights. Raises as :meth:`predict`."""
        return self._opened(self._resolved("predict", resolve_predict, {"source": "in memory"}).value).names

    def info(self) -> dict[str, Any]:
        """Return what ``yolofleet weights inspect`` shows: family, model, names, image size. Raise CheckpointError."""
        from yolofleet.families.weights.contents import contents

        config = self._resolved("predict", resolve_predict, {"source": "in memory"}).value
        return facts_of(contents(resolve_weights(config.weights[0], download=True)))

    @takes(PredictConfig)
    def stream(self, source: Any, **settings: Any) -> Iterator[Prediction]:
        """Yield the predictions of :meth:`predict` one by one, and keep none in memory."""
        settings = {"source": "in memory", "save": "none", **settings}
        config = self._resolved("predict", resolve_predict, settings).value
        if config.threads:
            torch.set_num_threads(config.threads)
        predictor = self._opened(config)
        with ExitStack() as stack:
            output = None
            if any(getattr(config, name) not in ("none", False) for name in WRITES):
                folder = RunFolder.create(
                    "predict", project=config.project, name=config.name, exist_ok=config.exist_ok
                )
                output = stack.enter_context(Output(config, folder.path))
            for prediction in predictor.each(sources_in(source), config.vid_stride):
                if output is not None:
                    output.write(prediction)
                yield prediction
                if config.show and not show(prediction, config):
                    return
            if output is not None:
                output.finish()

    @takes(ExportConfig)
    def export(self, **settings: Any) -> list[ExportResult]:
        """Write files for other runtimes, one for each of ``format``. Takes the settings of ``yolofleet export``.

        Raises:
            YolofleetError: as the command; NumericsError if a file differs from the network by more than rounding.
        """
        config = self._resolved("export", resolve_export, settings).value
        with Console() as console:
            found = export_all(config, console)
        return [
            ExportResult(Path(one["file"]), one["format"], one["mib"], one["verified"], one) for one in found
        ]

    @takes(BenchConfig)
    def bench(self, **settings: Any) -> BenchResult:
        """Measure the speed on this machine. Takes the settings of ``yolofleet bench``."""
        config = self._resolved("bench", resolve_bench, settings).value
        figures, _, size = bench(config)
        if size.note:
            inform(f"note: {size.note}")
        return BenchResult(figures["median_ms"], figures["images_per_s"], figures)

    @takes(TuneConfig)
    def tune(self, **settings: Any) -> TuneResult:
        """Search recipe values with many trainings of this model. Takes the settings of ``yolofleet tune``.

        Raises:
            ConfigError: a setting is wrong, Optuna is not installed, or several trials in a row failed.
            Stopped: on a request to stop; ``resume=FOLDER`` goes on. YolofleetError: another expected failure.
        """
        mine = self._network(resumes=bool(settings.get("resume")))
        config, recipe = resolve_tune(_texts({**mine, **settings}), source="Model.tune(...)")
        return tune(_with_notes(config), recipe)

    def _network(self, *, resumes: bool = False) -> dict[str, str]:
        """Return the settings of a training that name this model; a resumed run has its own network."""
        names = ("recipe_class",) if resumes else ("weights", "model", "cfg", "recipe_class")
        return {name: value for name in names if (value := getattr(self, name))}

    def _resolved(self, verb: str, resolve: Callable[..., Any], settings: Mapping[str, Any]) -> Any:
        """Return the settings of a verb that needs this model's weights, and print the notes about them.

        Raises:
            ConfigError: it has none, or a setting is wrong.
        """
        if not self.weights:
            raise ConfigError(
                f"{self!r} has no weights to {verb} with",
                source=f"Model.{verb}(...)",
                hint="call train first, or name a weights file or the folder of a run",
            )
        return _with_notes(resolve(_texts({**self._network(), **settings}), source=f"Model.{verb}(...)"))

    def _opened(self, config: PredictConfig) -> Predictor:
        """Return the predictor of these settings; the one of the last call if they are equal."""
        fields = PredictConfig.model_fields.items()
        names = [name for name, field in fields if group_of(field) in PREDICTOR_GROUPS and name != "source"]
        wanted = {name: getattr(config, name) for name in names}
        if self._predictor is None or self._predictor[0] != wanted:
            self._predictor = wanted, _with_size_note(predictor_of(config))
        return self._predictor[1]


def _train(settings: Mapping[str, Any], source: str) -> TrainResult:
    config, recipe = resolve_train(_texts(settings), source=source)
    _with_notes(config)
    plan = plan_run(config, recipe)
    if config.value.detach:
        from yolofleet.fleet.launch.detached.attach import begin

        return _followed(*begin(plan))
    return _train_result(_run(plan, "train"))


def attach(run: str | Path = "", *, hosts: str = "", fleet: str = "") -> TrainResult:
    """Show a training that was started with ``detach=True`` or ``--detach`` until it ends, and return its result.

    Args:
        run: its folder on this machine, the name of its job or its first letters; "": the only one that runs.
        hosts, fleet: the hosts, or their YAML file, as for ``yolofleet train``; "": this machine.

    Raises:
        ConfigError: there is no such run. Others: as :meth:`Model.train`.
    """
    found = named_fleet(hosts if hosts or fleet else HERE, fleet or None, "cpu")
    assert found is not None
    return _followed(found, str(run))


def _followed(fleet: Fleet, job: str) -> TrainResult:
    from yolofleet.fleet.launch.detached.attach import follow

    code, path = follow(fleet, job)
    folder = RunFolder(path or Path())
    if code:
        raise failure(code, folder)
    if path is None:
        raise ClusterError(
            "the run has ended, and its results are not on this machine", hint="see the warning above"
        )
    return _train_result(folder)


def _train_result(folder: RunFolder) -> TrainResult:
    return TrainResult(folder.path, _results(folder).get("metrics", {}), best_weights(folder.path))


def _results(folder: RunFolder) -> dict[str, Any]:
    results: dict[str, Any] = json.loads(folder.results_json.read_text(encoding="utf-8"))
    return results


def _texts(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as the schema reads them: paths as text, lists as they are."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()}


def _with_notes(config: Any) -> Any:
    """Print the notes about settings, and return ``config``."""
    for note in config.notes:
        inform(f"note: {note}")
    return config


def _with_size_note(predictor: Predictor) -> Predictor:
    """Print what a user should know about the image size, and return ``predictor``."""
    if predictor.size.note:
        inform(f"note: {predictor.size.note}")
    return predictor


def _run(plan: RunPlan, verb: str) -> RunFolder:
    """Execute a plan; return the folder of the run. Raises as :meth:`Model.train`."""
    if is_worker():
        raise ConfigError(
            f"{verb} starts its own processes, so it cannot run in a process that torchrun started",
            hint=f"start the script with python, or use torchrun with -m yolofleet {verb}",
        )
    code, folder = start(plan)
    if code:
        raise failure(code, folder)
    return folder


KINDS: tuple[type[YolofleetError], ...] = (*YolofleetError.__subclasses__(), NonFiniteError)


def failure(exit_code: int, folder: RunFolder) -> YolofleetError:
    """Return the error for processes that ended with ``exit_code``, with the text that they printed if it is known."""
    text = getattr(exit_code, "text", "")
    by_name = {kind.__name__: kind for kind in KINDS}
    by_code = next((kind for kind in KINDS if kind.exit_code == exit_code), YolofleetError)
    name, _, what = text.partition("\n")[0].partition(": ")
    kind: type[YolofleetError] = by_name.get(name, by_code)
    if text:
        error = kind(what or name)
        error.printed = text
        return error
    if kind is Stopped:
        return Stopped(
            "the run stopped on request; its state is saved", hint=f"Model.train(resume={str(folder.path)!r})"
        )
    return kind(
        f"the run ended with exit code {exit_code}", source=str(folder.logs), hint="see its message above"
    )
