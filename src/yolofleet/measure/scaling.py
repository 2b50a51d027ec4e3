"""Train on 1, 2, 4 ... devices of this machine with the same settings, and compare: ``yolofleet bench scaling``."""

from __future__ import annotations

import math
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from yolofleet.config.load import resolve_train
from yolofleet.config.resolve import Resolved
from yolofleet.config.schema import TrainConfig, step_images_of
from yolofleet.config.schema.measure import BenchScalingConfig
from yolofleet.data.datasets.index import build_index
from yolofleet.data.datasets.sources import load_dataset
from yolofleet.measure.trainings import run_training
from yolofleet.runs.report.console import NullConsole
from yolofleet.runs.report.folder import RunFolder
from yolofleet.runs.report.results import numbers, read_rows
from yolofleet.storage.atomic import write_text
from yolofleet.support import devices
from yolofleet.support.device_names import ALL, gpu_ids
from yolofleet.support.errors import ConfigError, DataError, YolofleetError
from yolofleet.support.terminal import duration
from yolofleet.training.parallel.partition import Partition
from yolofleet.training.parallel.process import usable_cores

# The steps are like those after the warm-up of a run, and leave the weights nearly as they are.
RECIPE = ("warmup_epochs=0", "lr0=1e-6")
OWN = ("device", "project", "name", "set")  # settings of a run that the comparison chooses
COLUMNS = (
    *("devices", "batch", "images/s", "speed-up", "efficiency", "memory per device"),
    *("training, an epoch", "validation, an epoch", "validation speed-up"),
)


@dataclass(frozen=True)
class Scale:
    """The figures of one run.

    Attributes:
        batch: images of a step's batch, over all devices.
        rate_img_s: median of the epochs after the first one, or without the first steps if there is one only.
        memory_mib: peak of a device, the largest of them; NaN on a CPU.
        train_s: seconds of the training of an epoch at that rate.
        val_s: seconds of a validation; NaN if the run had none.
    """

    devices: int
    batch: int
    rate_img_s: float
    memory_mib: float
    train_s: float
    val_s: float


def counts_of(devices: str) -> list[int]:
    """Return the numbers of ``--devices``, ascending, each once."""
    return sorted({int(count) for count in devices.split(",")})


def device_of(device: str, count: int, gpus: int) -> str:
    """Return the ``--device`` of a run on the first ``count`` devices that ``device`` names.

    Args:
        device: auto | cpu | cpu:N | GPUs, as 4,5,6,7. gpus: of this machine; auto is the CPU without any.

    Raises:
        ConfigError: there are fewer.
    """
    if device.startswith("cpu") or (device == "auto" and not gpus):
        return f"cpu:{count}"
    if device == ALL:
        device = "auto" if gpus else devices.all_devices()
    if device == "mps":
        raise ConfigError("--device mps is one device: there is nothing to compare", hint="--device cpu")
    ids = list(range(gpus)) if device == "auto" else gpu_ids(device)
    if count > len(ids):
        named = (
            f"this machine has {len(ids)} GPUs" if device == "auto" else f"--device {device} names {len(ids)}"
        )
        fitting = ",".join(str(n) for n in (1, 2, 4, 8, 16) if n <= len(ids))
        raise ConfigError(f"--devices {count}: {named}", hint=f"--devices {fitting}, or --device cpu")
    return ",".join(map(str, ids[:count]))


def settings_of(config: Resolved[BenchScalingConfig], count: int, gpus: int, cores: int) -> dict[str, Any]:
    """Return the settings of the run on ``count`` devices: those that the user set, and those of a run that is measured.

    On a CPU every process has as many threads as in the run with the most processes, so that they are equal devices.

    Raises:
        ConfigError: there are fewer devices.
    """
    c, device = config.value, device_of(config.value.device, count, gpus)
    chosen = {
        name: getattr(c, name)
        for name in TrainConfig.model_fields.keys() & config.sources.keys()
        if config.is_given(name) and name not in OWN
    }
    times = count if c.per_device else 1
    most = max(counts_of(c.devices))
    threads = c.threads or (max(cores // most, 1) if device.startswith("cpu") else 0)
    return chosen | {
        "device": device,
        "set": (*RECIPE, *c.set),
        "epochs": c.epochs,
        "batch": c.batch * times,
        "nominal_batch": c.nominal_batch * times,
        "micro_batch": c.micro_batch,
        "threads": threads,
        "parallel": "ddp",
        "val_period": 1,
        "save_every": ("0",),
        "patience": 0,
        "plots": False,
    }


def read_scale(results_csv: Path, devices: int, batch: int, epoch_images: int) -> Scale:
    """Return the figures of a run from its ``results.csv``. Raise DataError if no epoch has enough steps for a rate."""
    epochs = list(map(numbers, read_rows(results_csv)))
    measured = epochs[1:] or epochs
    rates = [epoch["images_per_s"] for epoch in measured if "images_per_s" in epoch]
    if not rates:
        raise DataError(
            f"--devices {devices}: {len(epochs)} epochs of {epoch_images} images are too few for a rate, because the first "
            "steps of a run do not count",
            source=str(results_csv),
            hint="--epochs 5, or a smaller --nominal-batch",
        )
    rate = statistics.median(rates)
    validation = [epoch["val_seconds"] for epoch in measured if "val_seconds" in epoch]
    return Scale(
        devices,
        batch,
        rate,
        max(epoch.get("device_memory_mib", math.nan) for epoch in epochs),
        epoch_images / rate,
        statistics.median(validation) if validation else math.nan,
    )


def table(scales: Sequence[Scale]) -> list[list[str]]:
    """Return the rows under ``COLUMNS``; the first run is what others are compared with."""
    first = scales[0]
    cells = []
    for scale in scales:
        speedup = scale.rate_img_s / first.rate_img_s
        efficiency = speedup * first.devices / scale.devices
        cells.append(
            [
                str(scale.devices),
                str(scale.batch),
                f"{scale.rate_img_s:,.4g}",
                f"{speedup:.2f}",
                f"{efficiency:.0%}",
                "-" if math.isnan(scale.memory_mib) else f"{scale.memory_mib:,.0f} MiB",
                duration(scale.train_s),
                "-" if math.isnan(scale.val_s) else duration(scale.val_s),
                "-" if math.isnan(scale.val_s) else f"{first.val_s / scale.val_s:.2f}",
            ]
        )
    return cells


def markdown(title: str, facts: Mapping[str, str], scales: Sequence[Scale]) -> str:
    """Return the table as a Markdown page."""
    lines = [f"# {title}", "", *(f"- {name}: {text}" for name, text in facts.items()), ""]
    lines += [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    lines += [f"| {' | '.join(row)} |" for row in table(scales)]
    return "\n".join(lines) + "\n"


def run_all(config: Resolved[BenchScalingConfig], console: NullConsole) -> dict[str, Any]:
    """Run all trainings, write the table, and return the figures.

    Raises:
        YolofleetError: too few devices; the disk refused; a run failed (with its text and exit code) or was stopped.
    """
    c, cores = config.value, usable_cores()
    counts = counts_of(c.devices)
    gpus = devices.device_count() if devices.accelerator() not in ("", *devices.ONLY_WHEN_NAMED) else 0
    runs = [(count, settings_of(config, count, gpus, cores)) for count in counts]
    # all must be possible before the first one starts
    trainings = [resolve_train(settings, source="bench scaling")[0].value for _, settings in runs]
    index = build_index(load_dataset(c.data), "train", single_cls=c.single_cls)
    folder = RunFolder.create("bench", project=c.project, name=c.name)
    device = devices.device_of(runs[0][1]["device"], 0)
    on_cpu = runs[0][1]["device"].startswith("cpu")
    title = f"Scaling of {c.model or c.cfg or c.weights} on {devices.name_of(device)}"
    facts = {
        "data": f"{c.data}: {len(index)} images to train",
        "image": f"{c.img} px",
        "run": f"{c.epochs} epochs, without the first one"
        + (f", at most {c.max_steps} steps" if c.max_steps else ""),
        "step": ("for each device " if c.per_device else "")
        + f"--batch {c.batch} --nominal-batch {c.nominal_batch}, micro-batches of {runs[0][1]['micro_batch']}",
        **({"threads": f"{runs[0][1]['threads']} for each process, on {cores} cores"} if on_cpu else {}),
    }
    console.header("yolofleet bench scaling", {**facts, "results": str(folder.path)})
    if on_cpu and max(counts) > cores:
        console.warn(
            f"--devices {max(counts)}: more processes than the {cores} cores of this machine share them"
        )
    scales: list[Scale] = []
    for (count, settings), training in zip(runs, trainings, strict=True):
        images, micro_batch = (
            step_images_of(training.batch, training.nominal_batch),
            training.likely_micro_batch,
        )
        problem, instead = Partition.parse("", count).idle(images, micro_batch, training.batch)
        if problem:
            raise ConfigError(f"--devices {count}: {problem}", hint=instead)
        run = RunFolder(folder.path / f"devices-{count}")
        run.make_tree()
        code, problem = run_training(settings, count, run, {}, source="bench scaling")
        if code:
            failed = YolofleetError(problem)
            failed.printed, failed.exit_code = problem, code
            raise failed
        for unused in (run.checkpoints, run.weights, run.plots):
            shutil.rmtree(unused, ignore_errors=True)
        scales.append(read_scale(run.results_csv, count, settings["batch"], len(index)))
        console.fact(f"{count} device{'s' if count > 1 else ''}: {scales[-1].rate_img_s:,.4g} images/s")
    page = folder.path / "scaling.md"
    write_text(page, markdown(title, facts, scales))
    console.table(title, COLUMNS, table(scales))
    console.summary("measured", {"table": str(page)})
    return {"title": title, **facts, "runs": [asdict(scale) for scale in scales]}
