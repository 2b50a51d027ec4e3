"""The stages of speed: ``yolofleet bench train`` on networks of several sizes, judged beside goals that are estimates."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gpu_check.machine import Found, Machine
from gpu_check.processes import command

COCO_IMAGES, COCO_VAL_IMAGES = 118_287, 5_000
LARGE_GIB = 15.0  # of a device that can take micro-batches of 16 images of the largest network
FLOORS = {  # ratio -> its goal
    "loader / step": 0.95,
    "loop / bare network": 0.97,
    "whole run / slower part": 0.95,
    "validation / its forward passes": 0.5,
    "checkpoint / one write": 0.1,  # it is also read back and compared
}
EXACT_FLOORS = {**FLOORS, "loop / bare network": 0.85}  # integer sums cost up to 14 % on CPUs
RATES = {  # part of a device's name -> images/s of a step at 640 px in fp16: 80 % of what was measured, or estimates
    "H100": {"yolov5n": 1400, "yolov5s": 740, "yolov5l": 240},
    "H200": {"yolov5n": 2000, "yolov5s": 1400, "yolov5l": 470},
}  # fmt: skip


def speed(
    model: str, *more: str, batch: int = 64, per_device: bool = False, count: int = 1
) -> Callable[[Machine], Found]:
    """Return a stage that measures the parts of a training (``yolofleet bench train``).

    Args:
        batch: images of a step; with ``per_device`` for each device.
    """

    def run(machine: Machine) -> Found:
        step_images, pixels, micro, steps = batch * (count if per_device else 1), 640, 16, 20
        if machine.memory_gib and machine.memory_gib < LARGE_GIB:
            micro = 4
        if machine.minutes >= 30:
            steps = 60
        network = model
        toy: list[str] = []
        if machine.is_toy:
            step_images, pixels, micro, steps = 4 * count, 64, 2, 1
            network, toy = machine.network, ["--workers", "0", "--threads", "1"]
        size = f"--img {pixels} --batch {step_images} --nominal-batch {step_images} --micro-batch {micro}"
        setup = (
            f"--device {machine.first(count)} --precision {machine.precision} --cache auto --steps {steps}"
        )
        target = machine.work / "figures.json"
        files: list[str | Path] = ["--data", machine.data, "--project", machine.work, "--json", target]
        command("bench", "train", "--model", network, *size.split(), *setup.split(), *files, *toy, *more)
        return speed_found(machine, json.loads(target.read_text(encoding="utf-8")), count)

    return run


def speed_found(machine: Machine, figures: Mapping[str, Any], count: int) -> Found:
    """Return the figures of ``bench train`` as a row of the tables, beside the goals."""
    parts = {part["name"]: part for part in figures["parts"]}
    found = {  # of FLOORS
        "loader / step": parts["loader"]["rate"] / parts["step"]["rate"],
        "loop / bare network": figures["loop_of_bare_network"],
        "whole run / slower part": parts["whole run"]["share"],
        "validation / its forward passes": parts["validation"]["share"],
        "checkpoint / one write": parts["checkpoint"]["share"],
    }
    rate, setup, model = parts["whole run"]["rate"], figures["setup"], figures["model"]
    step_rate = parts["step"]["rate"]
    row = {
        "model": model,
        "devices": count,
        "batch": setup["step_images"],
        "precision": setup["precision"],
        "reduce": setup["reduce"],
        "img": figures["img"],
        "step_img_s": step_rate,
        "run_img_s": rate,
        "memory_gib": figures["device_memory_mib"] / 1024,
        "coco_train_s": COCO_IMAGES / rate,
        "coco_val_s": COCO_VAL_IMAGES / parts["validation"]["rate"],
        "ratios": found,
        "binds": figures["binds"],
    }
    missed = []
    if not machine.is_toy:
        floors = EXACT_FLOORS if setup["reduce"] == "exact" else FLOORS
        pairs = [(name, found[name], floor) for name, floor in floors.items()]
        missed = [f"{name} {ratio:.2f} < {floor}" for name, ratio, floor in pairs if ratio < floor]
        goals = next((goals for name, goals in RATES.items() if name in machine.name), {})
        goal = goals.get(model, 0) * count
        has_goal = (figures["img"], setup["precision"], setup["reduce"]) == (640, "fp16", "fast")
        if has_goal and step_rate < goal:
            missed.append(f"step {step_rate:,.0f} img/s < {goal:,}")
    text = f"{step_rate:,.4g} img/s, loop / bare network {found['loop / bare network']:.2f}, {row['memory_gib']:.1f} GiB"
    return Found(text, row, missed)
