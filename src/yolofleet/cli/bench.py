"""`yolofleet bench`: the speed of weights, of the parts of a training, and of a training on 1, 2, 4 ... devices."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from yolofleet.cli.commands import JSON, SchemaCommand, print_notes
from yolofleet.config.load import resolve_bench, resolve_workload
from yolofleet.config.resolve import training_of
from yolofleet.config.schema.measure import BenchRun, BenchScalingConfig, BenchStartConfig, BenchTrainConfig
from yolofleet.config.schema.verbs import BenchConfig
from yolofleet.fleet.launch.plan import is_worker
from yolofleet.measure.bench_verdict import COLUMNS, StepTime, part_of
from yolofleet.runs.report.console import Console
from yolofleet.storage.atomic import emit_json, writing
from yolofleet.support.errors import ConfigError

# The measured steps are like those after the warm-up of a run, and leave the weights nearly as they are.
RECIPE = ("warmup_epochs=0", "lr0=1e-6", "size_low=1", "size_high=1", "close_mosaic=0")
SLOWER = 0.9  # of the slower part, for a note about the whole run


def run_inference(given: dict[str, Any], config_file: str) -> int:
    config = resolve_bench(given, config_file=config_file)
    from yolofleet.measure.bench_inference import bench_command

    return bench_command(config.value)


def run_train(given: dict[str, Any], config_file: str, json_out: str) -> int:
    code, figures = measure(BenchTrainConfig, BenchRun, given, config_file)
    if not code:
        show_parts(figures, json_out)
        emit_json(figures, json_out, indent=2)
    return code


def measure(
    model: type[BenchTrainConfig], measured: type[BenchRun], given: dict[str, Any], config_file: str
) -> tuple[int, dict[str, Any]]:
    """Run the measurements of a verb in a temporary folder; return the exit code and the figures, {} after a failure.

    Args:
        model: settings of the verb. measured: the training whose parts it measures.
    Raises:
        ConfigError: a setting is wrong, or a launcher started this process. StorageError: the folder cannot be made.
    """
    _refuse_launcher(model.verb)
    given = {**given, "set": (*given.get("set", ()), *RECIPE)}
    config, recipe = resolve_workload(model, given, config_file=config_file)
    print_notes([*config.notes, *recipe.notes])
    from yolofleet.fleet.launch.plan import plan_run, start

    with _folder_beside(config.value.project) as temporary:
        training = training_of(config, measured)
        own = {"project": Path(temporary), "name": "run", "restarts": 0}
        value = training.value.model_copy(update=own)
        code, folder = start(plan_run(replace(training, value=value), recipe))
        return code, {} if code else json.loads(folder.results_json.read_text(encoding="utf-8"))


def _folder_beside(project: Path | None) -> TemporaryDirectory[str]:
    """Return a folder for a block: in the folder of runs, or in the nearest one above it, because files are measured on that disk.

    Raises:
        StorageError: it cannot be made.
    """
    runs = (project or Path("runs")).absolute()
    disk = next(above for above in (runs, *runs.parents) if above.is_dir())
    with writing(disk):
        return TemporaryDirectory(prefix="yolofleet-bench-", dir=disk, ignore_cleanup_errors=True)


def run_start(given: dict[str, Any], config_file: str, json_out: str) -> int:
    _refuse_launcher("bench start")
    config, recipe = resolve_workload(BenchStartConfig, given, config_file=config_file)
    print_notes([*config.notes, *recipe.notes])
    from yolofleet.measure.start import measure_start, rows

    with _folder_beside(config.value.project) as temporary:
        code, figures = measure_start(config, recipe, Path(temporary))
    if code:
        return code
    with Console(stream=sys.stderr if json_out == "-" else None) as console:
        title = f"seconds from the command to the end of the first step; import torch alone takes {figures['torch_s']:.2f}"
        names = [f"run {number}" for number in range(1, len(figures["runs"]) + 1)]
        console.table(title, ["part of rank 0", *names], rows(figures["runs"]))
    emit_json(figures, json_out, indent=2)
    return 0


def _refuse_launcher(verb: str) -> None:
    if is_worker():
        raise ConfigError(f"{verb} starts its processes itself", hint="start it without torchrun")


def show_parts(figures: Mapping[str, Any], json_out: str) -> None:
    """Print the table of the parts, the bottleneck, and what to change."""
    setup, time = figures["setup"], StepTime(**figures["step_seconds"])
    workers = f"--workers {setup['workers']}" if setup["workers"] else "in the process of the network"
    with Console(stream=sys.stderr if json_out == "-" else None) as console:
        console.header(
            "yolofleet bench train",
            {
                "model": f"{figures['model']}, {figures['img']} px, {setup['precision']}",
                "where": figures["where"],
                "step": f"{setup['step_images']} images as micro-batches of {setup['micro_batch']}, {setup['reduce']} sums",
                "loader": f"{workers}; {figures['cache_note']}",
            },
        )
        parts = [part_of(part) for part in figures["parts"]]
        title = "parts of a training"
        if figures["shares_by_cpu"]:
            title += f"; shares of {' and '.join(figures['shares_by_cpu'])} by CPU seconds, which other jobs change less"
        console.table(title, COLUMNS, [part.cells() for part in parts])
        console.fact(
            f"the training loop reaches {figures['loop_of_bare_network']:.3f} of the bare network's rate"
        )
        if next(part for part in parts if part.name == "whole run").of_limit < SLOWER:
            console.note(
                "the whole run is slower than its parts: its processes share cores or memory with each other or with other "
                "jobs"
            )
        if figures["all_reduce"]:
            exposed_ms, whole_ms = 1000 * time.all_reduce, 1000 * time.compute
            adds = f"{exposed_ms:.3g} ms" if exposed_ms > 0 else "less than can be measured"
            console.fact(
                f"the all-reduce of {figures['all_reduce']['bytes'] / 1e6:.3g} MB adds {adds} to a step of {whole_ms:.4g} ms"
            )
        if figures["store_line"]:
            console.fact(figures["store_line"])
        console.fact(figures["checkpoint_line"])
        if figures["device_memory_mib"]:
            console.fact(f"peak memory of the device in a step: {figures['device_memory_mib']:,.0f} MiB")
        console.summary(figures["verdict"], figures["advice"])


def run_scaling(given: dict[str, Any], config_file: str, json_out: str) -> int:
    _refuse_launcher("bench scaling")
    config, recipe = resolve_workload(BenchScalingConfig, given, config_file=config_file)
    print_notes([*config.notes, *recipe.notes])
    from yolofleet.measure.scaling import run_all

    with Console(stream=sys.stderr if json_out == "-" else None) as console:
        figures = run_all(config, console)
    emit_json(figures, json_out, indent=2)
    return 0


inference_command = SchemaCommand(
    "inference",
    BenchConfig,
    run_inference,
    help="Measure the speed of weights or of an exported file on this machine: median milliseconds of each stage, and "
    "images per second.",
)
train_command = SchemaCommand(
    "train",
    BenchTrainConfig,
    run_train,
    spelled_as="train",
    extra_options=[JSON],
    help="Measure the parts of a training with these settings: the step, the sum over processes, the loader, a checkpoint, "
    "validation and the whole run, each beside its own limit. Name the bottleneck, and what to change. --config with the "
    "config.yaml of a run measures that run.",
    epilog="The other settings are those of `yolofleet train`. Nothing is kept.",
)
start_command = SchemaCommand(
    "start",
    BenchStartConfig,
    run_start,
    spelled_as="train",
    extra_options=[JSON],
    help="Measure where the time from a typed `yolofleet train` to the end of its first step goes: imports, data, network, compiled "
    "kernels, first batch, first step. Each run is that command with one step.",
    epilog="The other settings are those of `yolofleet train`. Nothing is kept but the cache folder.",
)
scaling_command = SchemaCommand(
    "scaling",
    BenchScalingConfig,
    run_scaling,
    spelled_as="train",
    extra_options=[JSON],
    help="Train with the same settings on 1, 2, 4 ... devices of this machine, and compare: images per second, speed-up, "
    "efficiency, memory of a device, seconds of training and of validation. Write the table as scaling.md "
    "into runs/bench/exp.",
    epilog="The other settings are those of `yolofleet train`.",
)
