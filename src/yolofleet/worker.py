"""The composition root of one process: find my place, join the fleet, build the parts, run, always close.

:func:`run` is called in the caller's process for one device or under somebody's torchrun; ``python -m
yolofleet.worker FOLDER`` is what our own launcher starts, one per device, and reads the job in FOLDER.
"""

from __future__ import annotations

import faulthandler
import json
import os
import platform
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from yolofleet import devices
from yolofleet.checkpoint.store import CheckpointStore, set_aside
from yolofleet.checkpoint.weights import WeightsHeader
from yolofleet.config.checks import divisors, micro_batch_of
from yolofleet.config.load import Resolved, dump_config, load_job
from yolofleet.config.recipe import with_default
from yolofleet.config.schema import Recipe, TrainConfig, ValConfig, Where
from yolofleet.data.cache import ImageCache
from yolofleet.data.index import build_index
from yolofleet.data.loader import train_loader
from yolofleet.data.sample import TrainSamples
from yolofleet.data.sources import load_dataset
from yolofleet.errors import (
    CheckpointError,
    ClusterError,
    ConfigError,
    DataError,
    Stopped,
    StorageError,
    YolofleetError,
)
from yolofleet.evaluate.export import detections_as_coco_json, detections_as_yolo_txt
from yolofleet.evaluate.run import Evaluation, evaluate
from yolofleet.export.runtime import Runtime, open_weights
from yolofleet.families import build_model, family_of, outline
from yolofleet.files.atomic import emit_json, open_append, write_json, write_text
from yolofleet.losses.loss import DetectionLoss
from yolofleet.models.detector import square_of
from yolofleet.models.fuse import fuse
from yolofleet.parallel.batchnorm import with_sync_batchnorm
from yolofleet.parallel.lanes import Lanes
from yolofleet.parallel.partition import Partition
from yolofleet.parallel.place import place_from_environment
from yolofleet.parallel.process import (
    agree,
    fleet_precision,
    lane_devices,
    loader_processes,
    place_text,
    prepare_process,
    set_kernels,
    versions,
)
from yolofleet.parallel.stall import PeerFailed
from yolofleet.parallel.watchdog import Watchdog
from yolofleet.parallel.world import World
from yolofleet.report.clock import Clock
from yolofleet.report.console import Console, NullConsole
from yolofleet.report.events import EventLog
from yolofleet.report.folder import RunFolder
from yolofleet.system.children import die_with_parent
from yolofleet.system.signals import stoppable
from yolofleet.text import echo
from yolofleet.train.agreement import all_alike, check_settings
from yolofleet.train.loop import StepSplitter, TrainingRun
from yolofleet.train.network import build_network, freeze, start_of, with_fitting_anchors
from yolofleet.train.pictures import draw_evaluation
from yolofleet.train.report import TrainReport, evaluation_figures, show_data_notes, show_evaluation
from yolofleet.train.resume import check_resume, fingerprint, snapshot_for_all, stored_description
from yolofleet.train.schedule import Schedule, lr_factor
from yolofleet.train.state import TrainState


def show(error: YolofleetError) -> None:
    """Print an error for whoever started this process."""
    echo(f"\n{error.render()}", to=sys.stderr)


def show_failure(problem: BaseException) -> int:
    """Print why this process fails; return its exit code."""
    if isinstance(problem, YolofleetError):
        show(problem)
        return problem.exit_code
    echo("".join(traceback.format_exception(problem)), to=sys.stderr)
    return 128 + signal.SIGINT if isinstance(problem, KeyboardInterrupt) else 1


def run(
    config: Resolved[TrainConfig] | Resolved[ValConfig],
    recipe: Resolved[Recipe] | None = None,
    folder: RunFolder | None = None,
    on_stall: Callable[[YolofleetError], None] = show,
    on_failure: Callable[[BaseException], int] = show_failure,
) -> None:
    """Be one rank of a run.

    Args:
        recipe: of a training run.
        folder: of the run, when the launcher made it or an earlier run did; else rank 0 makes it.
        on_stall: is given the report when ranks hang; then the process ends.
        on_failure: reports an exception and returns the exit code, where the process ends at once because its
            collectives could not be closed (``World.ends_by_exit``).

    Raises:
        YolofleetError: anything foreseen.
    """
    place = place_from_environment(os.environ)
    settings = config.value
    device = prepare_process(settings, place)
    world = World.join(place, device, settings.timeout_s)
    try:
        _run(config, recipe, folder, world, on_stall)
    except BaseException as problem:
        if world.ends_by_exit:
            exit_code = on_failure(problem)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(exit_code)
        world.close(failed=True)
        raise
    world.close()


def _run(
    config: Resolved[TrainConfig] | Resolved[ValConfig],
    recipe: Resolved[Recipe] | None,
    folder: RunFolder | None,
    world: World,
    on_stall: Callable[[YolofleetError], None],
) -> None:
    """Do the work of :func:`run` among the ranks of ``world``."""
    settings, run_folder = config.value, folder
    try:
        with stoppable(), ExitStack() as lock:
            verb = "train" if isinstance(settings, TrainConfig) else "val"
            run_folder = shared_folder(world, verb, settings, folder, lock)
            with Watchdog(
                world,
                stall_s=settings.stall_s,
                timeout_s=settings.timeout_s,
                log=run_folder.log(world.rank),
                checkpoints=run_folder.checkpoints,
                resume=run_folder.resume_command if verb == "train" else "",
                say=on_stall,
            ):
                try:
                    world.connect()
                except ClusterError:  # nothing has been trained
                    run_folder.discard_unless_used()
                    raise
                if isinstance(settings, TrainConfig):
                    assert recipe is not None
                    train(cast(Resolved[TrainConfig], config), recipe, world, run_folder)
                else:
                    write_config(world, run_folder, config)
                    validate(settings, world, run_folder)
    except (ConfigError, DataError, CheckpointError, StorageError, Stopped, KeyboardInterrupt):
        if run_folder:
            run_folder.discard_unless_used()
        raise
    except (RuntimeError, MemoryError) as problem:
        if not is_out_of_memory(problem):
            raise
        if run_folder:
            run_folder.discard_unless_used()
        raise out_of_memory(problem, settings, world.device) from None


def is_out_of_memory(problem: Exception) -> bool:
    """CUDA's and the CPU allocator's refusals, and Python's and NumPy's."""
    words = ("out of memory", "allocate memory", "not enough memory")
    return isinstance(problem, (MemoryError, torch.OutOfMemoryError)) or any(
        word in str(problem) for word in words
    )


def out_of_memory(problem: Exception, settings: TrainConfig | ValConfig, device: torch.device) -> ConfigError:
    """What to make smaller."""
    if isinstance(settings, TrainConfig):
        micro_batch = micro_batch_of(settings)
        smaller = [str(d) for d in divisors(settings.batch) if d < micro_batch]
        at_once = f"--micro-batch {micro_batch}, --img {settings.img}"
        hint = f"--micro-batch {smaller[-1]}" if smaller else "a smaller --img or --model"
        hint += ", or --val-batch with a lower number if it was validating"
    else:
        at_once = f"--batch {settings.batch}, --img {settings.img}"
        hint = f"--batch {max(1, settings.batch // 2)}: it does not change the figures"
    return ConfigError(
        f"{device} has too little memory for {at_once}",
        source=" ".join(str(problem).split())[:300] or type(problem).__name__,
        hint=hint,
    )


def write_config(
    world: World, folder: RunFolder, config: Resolved[Any], recipe: Resolved[Recipe] | None = None
) -> None:
    """``config.yaml``, by rank 0."""
    if world.is_main:
        write_text(folder.config, dump_config(config, recipe))


def shared_folder(
    world: World, verb: str, where: Where, given: RunFolder | None, lock: ExitStack
) -> RunFolder:
    """Return the run's folder: given by our launcher, else made by rank 0. Collective: every rank.

    Args:
        lock: rank 0 holds the folder's lock until this ends.
    Raises:
        ConfigError: another process writes into the folder.
    """
    made, problem = given, None
    if world.is_main:
        try:
            made = given or RunFolder.create(
                verb, project=where.project, name=where.name, exist_ok=where.exist_ok
            )
            lock.enter_context(made.locked())
        except YolofleetError as error:
            problem = error
    path = world.broadcast_bytes(os.fsencode(made.path) if made and not problem else b"")
    if problem is not None:
        raise problem
    if not path:
        raise ClusterError("rank 0 could not use the run's folder; its message says why")
    return made or RunFolder(Path(os.fsdecode(path)))


# -- train ---------------------------------------------------------------------------------------------------


def train(resolved: Resolved[TrainConfig], recipe: Resolved[Recipe], world: World, folder: RunFolder) -> None:
    """One rank of a training run. Collective: every rank."""
    if world.is_main:
        folder.make_tree()
    with (
        Console(folder.log(0)) if world.is_main else NullConsole(folder.log(world.rank)) as console,
        EventLog(folder.events(world.rank), rank=world.rank, warn=console.warn) as events,
    ):
        _train(resolved, recipe, world, folder, console, events)


def _train(
    resolved: Resolved[TrainConfig],
    recipe_sourced: Resolved[Recipe],
    world: World,
    folder: RunFolder,
    console: NullConsole,
    events: EventLog,
) -> None:
    config, clock, activity = resolved.value, Clock(), world.activity
    activity.clock = clock
    torch.manual_seed(config.seed)
    random.seed(config.seed)
    precision = fleet_precision(config.precision, world)
    micro_batch = micro_batch_of(config)

    check_settings(config, recipe_sourced.value, world)
    with activity.doing("data set"):
        spec = load_dataset(config.data)
    with activity.doing("indexing"):
        index = build_index(spec, "train", single_cls=config.single_cls)
        val_index = build_index(spec, "val", single_cls=config.single_cls)
    agree(world, "the data set", f"{index.digest} {val_index.digest}")

    snapshot = snapshot_for_all(world, Path(config.resume) if config.resume else None, console)
    resumed = stored_description(snapshot) if snapshot else None
    with activity.doing("weights"):
        description, weights = start_of(config, resumed)
    family = family_of(description)
    recipe_sourced = with_default(recipe_sourced, family.recipe_name)
    recipe = recipe_sourced.value
    stride = max(outline(description, len(index.names)).strides)
    img = -(-config.img // stride) * stride
    anchors = ""
    if config.autoanchor and not resumed:
        description, anchors = with_fitting_anchors(description, index, recipe.anchor_t, img, config.seed)
    model = build_network(description, weights, index.names, config.seed, console)
    sizes = (0.5, 1.5) if config.multi_scale else (recipe.size_low, recipe.size_high)
    set_kernels(config, sizes_vary=sizes != (1, 1), tf32=precision == "tf32")
    mark = fingerprint(config, recipe, index, model, world)
    header = WeightsHeader.of(model, img=img)
    loss = family.loss(model, recipe, img)
    model.to(world.device)
    if config.channels_last:
        cast(Any, model).to(memory_format=torch.channels_last)  # torch's stub does not know it
    model.train()
    frozen = freeze(model, config.freeze)
    synced = config.sync_bn and world.size > 1
    if synced:
        with_sync_batchnorm(model, world)
    on_devices = lane_devices(config, world)
    schedule = Schedule(
        recipe, len(index), config.batch, config.nominal_batch, config.epochs, config.lr_schedule
    )
    factor = lr_factor(config.lr_scale, schedule.step_images, recipe.reference_batch)
    schedule = replace(schedule, lr_factor=factor)
    state = TrainState.build(
        Lanes.build(model, on_devices, world, exact=config.reduce == "exact", synced=synced),
        recipe,
        optimizer=config.optimizer,
        weight_decay=schedule.weight_decay,
        precision=precision,
    )
    averaged = build_model(model.description, model.nc)  # shares its tensors with the moving average
    averaged.load_state_dict(state.weights(), strict=False, assign=True)
    averaged.names = model.names
    averaged.eval()

    if snapshot is not None:
        check_resume(snapshot.values["fingerprint"], mark, config, console)
        state.restore(snapshot)
        clock.restore(snapshot.values["clock"])
    elif world.is_main:
        for kept in set_aside(folder.path):
            console.note(f"an earlier run in this folder: its files are in {kept}")
    write_config(world, folder, resolved, recipe_sourced)

    token = world.broadcast_bytes(os.urandom(8).hex().encode()).decode()
    cache = ImageCache(index, img, config.cache, token=f"{token}-train")
    val_cache = ImageCache(val_index, img, config.cache, token=f"{token}-val")
    world.barrier()  # every process of this machine has them open: their names may go
    for opened in (cache, val_cache):
        opened.unlink()
    workers = loader_processes(config.workers, world)
    samples = TrainSamples(index, cache, recipe, img=img, seed=config.seed, epochs=config.epochs)
    report = TrainReport(
        folder,
        console,
        events,
        world,
        config,
        clock,
        terms=loss.terms,
        header=header,
        dataset_images=len(index),
    )

    store = CheckpointStore(folder.checkpoints, keep=config.keep_last)
    activity.settle = store.settle

    def on_batch(done: int, batches: int) -> None:
        activity.tick()
        console.validating(done, batches)

    def evaluate_average(loss: DetectionLoss) -> Evaluation:
        return evaluate(
            fuse(averaged),
            val_index,
            world=world,
            device=world.device,
            precision=precision,
            img=img,
            size_hw=square_of(model, img),
            batch=config.val_batch,
            single_cls=config.single_cls,
            workers=workers,
            cache=val_cache,
            loss=loss,
            on_batch=on_batch,
        )

    splitter = StepSplitter(
        partition=Partition.parse(
            "" if config.shares == "auto" else config.shares, world.size * len(on_devices)
        ),
        rank=world.rank,
        lanes=len(on_devices),
        micro_batch=micro_batch,
        batch=config.batch,
        dataset_images=len(index),
        sync_bn=config.sync_bn,
        sizes=sizes,
        img=img,
        stride=stride,
        seed=config.seed,
    )
    splitter.check()
    training = TrainingRun(
        config=config,
        state=state,
        schedule=schedule,
        splitter=splitter,
        loader=lambda keys: train_loader(
            samples,
            keys,
            loss.match,
            workers=workers,
            prefetch=config.prefetch,
            pin_memory=config.pin_memory and devices.can_pin(world.device),
        ),
        loss=loss,
        clip_norm=recipe.clip_norm,
        precision=precision,
        world=world,
        report=report,
        store=store,
        evaluate=evaluate_average,
        fingerprint=mark,
        alike=all_alike(world),
    )
    report.begin(
        state,
        index,
        val_index,
        data_notes=spec.notes,
        facts={
            "where": place_text(world, len(on_devices)),
            "model": f"{model.description.name}, {sum(p.numel() for p in model.parameters()):,} parameters"
            + (f", {len(frozen)} tensors frozen" if frozen else ""),
            "step": f"{schedule.step_images} images (after warm-up) as micro-batches of {micro_batch}, {precision}, "
            f"{config.reduce} sums",
            "rate": f"lr0 {recipe.lr0:g} x {factor:.4g} (--lr-scale {config.lr_scale}: recipe made for "
            f"{recipe.reference_batch} images a step)",
            "image": f"{img} px"
            + ("" if img == config.img else f" (--img {config.img} rounded up to stride {stride})"),
            "loader": (f"{workers} processes" if workers else "in this process") + f"; {cache.note}",
            **({"anchors": anchors} if anchors else {}),
        },
        settings=[
            (
                name,
                " ".join(value) if isinstance(value := getattr(config, name), tuple) else str(value),
                source,
            )
            for name, source in resolved.sources.items()
            if resolved.is_given(name)
        ],
        versions=versions(),
        resumed=snapshot is not None,
    )
    if idle := splitter.idle_note(schedule.step_images):
        console.warn(idle)
    try:
        training.train()
        report.finish(state)
    finally:
        cache.close()
        val_cache.close()


# -- val -----------------------------------------------------------------------------------------------------


def validate(config: ValConfig, world: World, folder: RunFolder) -> None:
    """One rank of ``yolofleet val``. Collective: every rank."""
    stream = sys.stderr if config.json_out == "-" else sys.stdout  # what reads the figures reads nothing else
    with (
        Console(folder.log(0), stream=stream) if world.is_main else NullConsole(folder.log(world.rank))
    ) as console:
        _validate(config, world, folder, console)


def _validate(config: ValConfig, world: World, folder: RunFolder, console: NullConsole) -> None:
    activity = world.activity
    with activity.doing("data set"):
        spec = load_dataset(config.data)
    with activity.doing("indexing"):
        index = build_index(spec, config.split, single_cls=config.single_cls)
    agree(world, "the data set", index.digest)
    model = open_weights(config.weights, config.cfg, device=None if config.device == "auto" else world.device)
    device, precision, size_hw, where = world.device, "fp32", None, place_text(world)
    if isinstance(model, Runtime):
        model.check_settings(img=config.img, precision=config.precision)
        model.check_unsuppressed()
        device, size_hw, where = torch.device("cpu"), model.facts.size_hw, f"{where}; {model.place}"
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

    def on_batch(done: int, batches: int) -> None:
        activity.tick()
        console.validating(done, batches)

    evaluation = evaluate(
        model,
        index,
        world=world,
        device=device,
        precision=precision,
        img=max(size_hw) if size_hw else config.img,
        size_hw=size_hw,
        batch=config.batch,
        conf=config.conf,
        iou=config.iou,
        max_det=config.max_det,
        single_cls=config.single_cls,
        workers=loader_processes(config.workers, world),
        gather_detections=config.save_json or config.save_txt,
        on_batch=on_batch,
    )
    show_evaluation(console, evaluation, per_class=config.verbose)
    if not world.is_main:
        return
    figures = evaluation_figures(evaluation)
    write_json(folder.results_json, figures)
    emit_json(figures, config.json_out)
    if config.save_json:
        rows = detections_as_coco_json(evaluation.detections, index.image_ids.tolist())
        write_json(folder.path / "predictions.json", rows)
    if config.save_txt:
        for image, text in detections_as_yolo_txt(
            evaluation.detections, index, scores=config.save_conf
        ).items():
            write_text(folder.path / "labels" / f"{Path(index.path(image)).stem}.txt", text)
    if config.plots:
        draw_evaluation(evaluation, index, folder.plots, console.note)
    console.summary("validated", {"results": str(folder.path)})


# -- started by our launcher ---------------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    """``python -m yolofleet.worker FOLDER [JOB]``: leaves its last words in FOLDER/logs when it fails."""
    die_with_parent()
    folder = RunFolder(Path(argv[0]))
    rank = int(os.environ.get("RANK", "0"))
    faulthandler.enable(os.dup(2))  # a crash goes into the agent's log, from where the launcher takes it
    if rank:  # rank 0 speaks; the others write
        with open_append(folder.log(rank)) as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)

    def last_words(message: str, exit_code: int, **more: Any) -> int:
        words = {"message": message, "exit_code": exit_code, **more}
        words |= {"rank": rank, "host": platform.node(), "time": time.time()}
        try:
            write_text(folder.failure(rank), json.dumps(words))
        except StorageError:
            echo(message)
        return exit_code

    def on_stall(error: YolofleetError) -> None:
        last_words(error.render(), error.exit_code, of_all=True, secondary=isinstance(error, PeerFailed))

    def on_failure(problem: BaseException) -> int:
        if isinstance(problem, YolofleetError):
            is_echo = isinstance(problem, ClusterError)  # most often of another rank's end
            return last_words(problem.render(), problem.exit_code, secondary=is_echo)
        if isinstance(problem, KeyboardInterrupt):
            return last_words("interrupted", 128 + signal.SIGINT)
        text = "".join(traceback.format_exception(problem))
        echo(text, to=sys.stderr)
        return last_words("this is a bug in yolofleet:\n" + text, 1)

    try:
        job = load_job(Path(argv[1]) if len(argv) > 1 else folder.job)
        run(job.config, job.recipe, folder, on_stall, on_failure)
        return 0
    except (Exception, KeyboardInterrupt) as problem:
        return on_failure(problem)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
