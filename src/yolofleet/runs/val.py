"""Build the parts of a validation from its settings, validate, and write the figures."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch

from yolofleet.config.schema import ValConfig
from yolofleet.datasets.index import DataIndex, build_index
from yolofleet.errors import ConfigError
from yolofleet.evaluate.export import detections_as_coco_json, detections_as_yolo_txt
from yolofleet.evaluate.run import Evaluation, EvaluationSettings, Validation
from yolofleet.export.runtime import Runtime, open_weights
from yolofleet.files.atomic import emit_json, write_json, write_text
from yolofleet.models.detector import square_of
from yolofleet.models.fuse import fuse
from yolofleet.parallel.process import check_equal, fleet_precision, loader_processes, place_text
from yolofleet.parallel.world import World
from yolofleet.recipe_class import load_recipe_class
from yolofleet.report.console import Console, NullConsole
from yolofleet.report.folder import RunFolder
from yolofleet.train.pictures import draw_evaluation
from yolofleet.train.report import evaluation_figures, show_data_notes, show_evaluation


def validate(config: ValConfig, world: World, folder: RunFolder) -> None:
    """Do one rank's part of ``yolofleet val``. Collective: every rank.

    Raises:
        YolofleetError: any expected failure.
    """
    stream = sys.stderr if config.json_out == "-" else sys.stdout  # stdout has only the JSON then
    with (
        Console(folder.log(0), stream=stream) if world.is_main else NullConsole(folder.log(world.rank))
    ) as console:
        _validate(config, world, folder, console)


def validation_progress(world: World, console: NullConsole) -> Callable[[int, int], None]:
    """Return a function of (batches done, batches) that tells the watchdog and the console of each batch."""

    def on_batch(done: int, batches: int) -> None:
        world.activity.tick()
        console.validating(done, batches)

    return on_batch


def _validate(config: ValConfig, world: World, folder: RunFolder, console: NullConsole) -> None:
    with world.activity.doing("data set"):
        recipe_class = load_recipe_class(config.recipe_class)
        spec = recipe_class.dataset(config.data)
    with world.activity.doing("indexing"):
        index = build_index(spec, config.split, single_cls=config.single_cls, ranks=world)
    check_equal(world, "the data set", index.digest)
    model = open_weights(config.weights, config.cfg, device=None if config.device == "auto" else world.device)
    device, precision, size_hw, where = world.device, "fp32", None, place_text(world)
    if isinstance(model, Runtime):
        model.check_settings(img=config.img, precision=config.precision)
        model.check_unsuppressed()
        device, size_hw, where = torch.device("cpu"), model.metadata.size_hw, f"{where}; {model.place}"
    else:
        precision = fleet_precision(config.precision, world)
        size_hw = square_of(model, config.img, config.fit)
        model = cast(Any, fuse(model)).to(device, memory_format=torch.channels_last)
    if model.nc != len(index.names) and not config.single_cls:
        raise ConfigError(
            f"{config.weights} detects {model.nc} classes, {config.data} has {len(index.names)}",
            source="--weights, --data",
            hint="validate with the data set that the weights were trained on",
        )
    console.header(
        "yolofleet val",
        {
            "weights": config.weights,
            "data": f"{config.data}, {config.split}: {len(index)} images, {len(index.names)} classes",
            "where": where,
            "results": str(folder.path),
        },
    )
    show_data_notes(console, spec.notes, [index])

    settings = EvaluationSettings(
        precision=precision,
        img=max(size_hw) if size_hw else config.img,
        size_hw=size_hw,
        batch=config.batch,
        conf=config.conf,
        iou=config.iou,
        max_det=config.max_det,
        single_cls=config.single_cls,
        gather_detections=config.save_json or config.save_txt,
    )
    workers = loader_processes(config.workers, world)
    evaluation = Validation(
        model,
        index,
        settings,
        world=world,
        device=device,
        workers=workers,
        on_batch=validation_progress(world, console),
    ).evaluate()
    show_evaluation(console, evaluation, per_class=config.verbose)
    if world.is_main:
        _write(config, folder, evaluation, index, console)


def _write(
    config: ValConfig, folder: RunFolder, evaluation: Evaluation, index: DataIndex, console: NullConsole
) -> None:
    figures = evaluation_figures(evaluation)
    write_json(folder.results_json, figures)
    emit_json(figures, config.json_out)
    if config.save_json:
        rows = detections_as_coco_json(evaluation.detections, index.image_ids.tolist())
        write_json(folder.path / "predictions.json", rows)
    if config.save_txt:
        texts = detections_as_yolo_txt(evaluation.detections, index, scores=config.save_conf)
        for image, text in texts.items():
            write_text(folder.path / "labels" / f"{Path(index.path(image)).stem}.txt", text)
    if config.plots:
        draw_evaluation(evaluation, index, folder.plots, console.note)
    console.summary("validated", {"results": str(folder.path)})
