"""Build the parts of a validation from its settings, validate, and write the figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from yolofleet.config.checks import FP16_ON_CPU, check_suppression
from yolofleet.config.resolve import Resolved
from yolofleet.config.schema import ValConfig
from yolofleet.data.datasets.index import DataIndex, build_index
from yolofleet.data.datasets.labels import Id
from yolofleet.data.datasets.listing import files_digest
from yolofleet.families.networks.class_names import NameMatch, ReorderedClasses, match_names
from yolofleet.families.networks.combined import inference_network
from yolofleet.families.networks.detector import square_of
from yolofleet.families.networks.precision import inference_precision
from yolofleet.families.recipe_class import load_recipe_class
from yolofleet.inference.evaluate.figures import shared_sample, write_figures
from yolofleet.inference.evaluate.gather import Evaluation
from yolofleet.inference.evaluate.run import EvaluationSettings, Network, Validation
from yolofleet.inference.evaluate.summary import (
    accuracy_text,
    evaluation_figures,
    show_data_notes,
    show_evaluation,
)
from yolofleet.inference.export.runtime import ImageSize, Runtime, image_size, open_networks
from yolofleet.inference.predict.predictor import class_numbers
from yolofleet.inference.predict.results import Stems
from yolofleet.inference.predict.run import weights_text
from yolofleet.inference.predict.sources import common_folder
from yolofleet.runs.report.console import NullConsole
from yolofleet.runs.report.folder import RunFolder
from yolofleet.runs.report.page import write_report
from yolofleet.runs.report.plots import or_note
from yolofleet.storage.atomic import emit_json, write_csv, write_json, write_text
from yolofleet.support.errors import ConfigError
from yolofleet.tasks.table import task_of
from yolofleet.training.pages import draw_validation
from yolofleet.training.parallel.process import check_equal, fleet_precision, loader_processes, place_text
from yolofleet.training.parallel.world import World
from yolofleet.training.rank.folder import open_console, write_config


def validate(
    resolved: Resolved[ValConfig], _recipe: None, world: World, _clock: None, folder: RunFolder
) -> None:
    """Do one rank's part of ``yolofleet val``. Collective: every rank."""
    write_config(folder, resolved)
    with open_console(resolved.value, world, folder):
        _validate(resolved.value, world, folder)


def _validate(config: ValConfig, world: World, folder: RunFolder) -> None:
    console = world.console
    with world.activity.doing("data set"):
        recipe_class = load_recipe_class(config.recipe_class)
        spec = recipe_class.dataset(config.data)
    with world.activity.doing("indexing"):
        told = partial(console.progress, "reading labels", unit="images")
        index = build_index(spec, config.split, single_cls=config.single_cls, ranks=world, on_progress=told)
    check_equal(world, "the data set", files_digest(index))
    opened = _opened(config, world)
    if task_of(opened.model).reads_masks:
        with world.activity.doing("indexing"):
            index = build_index(
                spec, config.split, single_cls=config.single_cls, masks=True, ranks=world, on_progress=told
            )
        from yolofleet.training.rank.masks import check_masks

        check_masks(index, instead="validate a network without masks")
        check_equal(world, "the masks", files_digest(index))
    check_suppression(config, needs_nms=opened.model.needs_nms)
    task_of(opened.model).check(
        {
            "--save-json": config.save_json,
            "--save-txt": config.save_txt,
            "--error-analysis": config.error_analysis,
            "--worst": config.worst > 0,
            "--metric": config.metric != "coco",
        }
    )
    config = config.model_copy(update={"img": opened.size.px})
    if opened.model.nc != len(index.names) and not config.single_cls:
        raise ConfigError(
            f"{', '.join(config.weights)} detects {opened.model.nc} classes, {config.data} has {len(index.names)}",
            source="--weights, --data",
            hint="validate with the data set that the weights were trained on",
        )
    assumed = "names" in getattr(opened.model, "assumed", {})
    match = NameMatch() if config.single_cls else match_names(opened.names, index.names, assumed=assumed)
    if len(match.pairs) == len(index.names) > 1:
        raise ConfigError(
            f"no class of {', '.join(config.weights)} is one of {config.data}: {match.text}",
            source="--weights, --data",
            hint="validate with the data set that the weights were trained on, or give its names to the same classes",
        )
    if match.columns is not None and not hasattr(task_of(opened.model).decoded, "of_classes"):
        raise ConfigError(
            f"{match.text}; classes of {opened.model.task} cannot be reordered",
            source="--weights, --data",
            hint="validate with a data set that has the classes in the order of the weights",
        )
    console.header(
        "yolofleet val",
        {
            "weights": weights_text(config),
            "image size": opened.size.text,
            "data": f"{config.data}, {config.split}: {len(index)} images, {len(index.names)} classes",
            "where": opened.where,
            "results": str(folder.path),
        },
    )
    show_data_notes(console, spec.notes, [index])
    if opened.size.note:
        console.note(opened.size.note)
    if match.text:
        (console.warn if match.pairs else console.note)(match.note)
    if config.precision == "fp16" and opened.precision == "fp32":
        console.note(FP16_ON_CPU)

    settings = EvaluationSettings(
        config,
        precision=opened.precision,
        size_hw=opened.size_hw,
        classes=tuple(class_numbers(config.classes, index.names)) or None,
        gather_detections=config.save_json
        or config.save_txt
        or config.error_analysis
        or config.worst > 0
        or config.metric != "coco",
    )
    workers = loader_processes(config.workers, world)
    evaluation = Validation(
        opened.model if match.columns is None else ReorderedClasses(opened.model, match.columns),
        index,
        settings,
        world=world,
        device=opened.device,
        workers=workers,
        on_batch=world.tell_validated,
    ).evaluate()
    show_evaluation(console, evaluation, per_class=config.verbose)
    sample = None
    if config.plots:
        sample = shared_sample(evaluation, None if settings.gather_detections else world)
    if world.is_main:
        ids = None if config.single_cls else spec.category_ids
        _write(config, folder, evaluation, index, sample, console, ids)


@dataclass(frozen=True)
class Opened:
    """The model of a validation.

    Attributes:
        size_hw: shape of every image, pixels; None: each image has its own.
        where: devices as text, for the header.
    """

    model: Network
    names: tuple[str, ...]
    device: torch.device
    precision: str
    size: ImageSize
    size_hw: tuple[int, int] | None
    where: str


def _opened(config: ValConfig, world: World) -> Opened:
    """Return the exported file, or the network or ensemble of the weights. Collective: every rank."""
    device = None if config.device == "auto" else world.device
    opened = open_networks(
        config.weights, config.cfg, device=device, augment=config.augment, trust=config.trust
    )
    size = image_size(opened, config.img)
    if isinstance(opened, Runtime):
        opened.check_precision(config.precision)
        opened.check_unsuppressed()
        where = f"{place_text(world)}; {opened.place}"
        return Opened(opened, opened.names, torch.device("cpu"), "fp32", size, opened.metadata.size_hw, where)
    precision = fleet_precision(inference_precision(config.precision, world.device), world)
    network = inference_network(opened, world.device, augment=config.augment, merge=config.merge)
    size_hw = square_of(network, size.px, config.fit)
    return Opened(network, network.names, world.device, precision, size, size_hw, place_text(world))


def _write(
    config: ValConfig,
    folder: RunFolder,
    evaluation: Evaluation,
    index: DataIndex,
    sample: Any,
    console: NullConsole,
    category_ids: Sequence[Id] | None,
) -> None:
    figures = evaluation_figures(evaluation)
    task, found = evaluation.task, evaluation.detections
    classes = class_numbers(config.classes, index.names) or None
    figures |= task.analysed(config, folder.path, found, index, classes, console)
    write_json(folder.results_json, figures)
    emit_json(figures, config.json_out)
    per_class = evaluation.metrics.per_class
    rows = [[name, *(f"{value:.6g}" for value in row.values())] for name, row in per_class.items()]
    write_csv(folder.path / "per_class.csv", [["class", *next(iter(per_class.values()), {})], *rows])
    if config.save_json:
        write_json(folder.path / "predictions.json", task.coco_results(found, index, category_ids))
    if config.save_txt:
        texts = task.yolo_texts(found, index, scores=config.save_conf)
        stems, base = Stems(), common_folder({Path(path).parent for path in index.paths})
        names = [stems.of_file(path, base) for path in index.paths]
        for image, text in texts.items():
            write_text(folder.path / "labels" / f"{names[image]}.txt", text)
    if config.plots:
        draw_validation(evaluation, index, folder.plots, console.note)
        splits: dict[str, DataIndex] = {config.split: index}
        or_note(console.note, folder.report_json, write_figures, folder, splits, evaluation, sample)
        or_note(console.note, folder.report, write_report, folder)
    else:
        folder.discard_report()  # of another validation, with --exist-ok
    console.summary(f"validated: {accuracy_text(evaluation)}", {"results": str(folder.path)})
