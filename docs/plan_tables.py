"""Write the tables of plan.md from the package: ``python docs/plan_tables.py``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from yolofleet.fleet.plan.formula import predict, validation_s
from yolofleet.fleet.plan.inputs import Machine, Workload
from yolofleet.fleet.plan.library import Library, network_of
from yolofleet.support.terminal import duration

HERE = Path(__file__).resolve().parent
COCO_IMAGES, COCO_VAL_IMAGES = 118_287, 5_000
# YOLOv5's multi-GPU guide: YOLOv5l on A100 SXM4 (AWS P4d), one epoch of COCO, seconds of training and of validation
YOLOV5L_S = {1: (1239, 55), 2: (703, 57), 4: (357, 55), 8: (189, 57)}
# PaddleDetection's guide, "Distributed training": hours on one machine of 8 V100, and on several
PADDLE_H = [
    ("Objects365", "ppyoloe-s", 301, 3, 162),
    ("Objects365", "ppyoloe-l", 401, 3, 178),
    ("COCO", "ppyoloe-s", 39, 4, 13),
    ("Objects365", "ppyoloe-m", 337, 4, 112),
    ("Objects365", "ppyoloe-x", 464, 4, 125),
]
# The one input term: a machine of a cluster takes so much longer to read an image than the lone machine.
CLUSTER_INPUT = 1.45
READERS = 4  # loader processes of a rank; only their product with the seconds of an image counts


class Row(NamedTuple):
    """A published figure and its prediction."""

    name: str
    predicted: float
    published: float

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


def yolov5l(devices: int, *, val_devices: int = 1) -> tuple[float, float]:
    """Return the predicted seconds of training and of validation of an epoch on A100s; YOLOv5 validates on one of them."""
    work = Workload(
        network=network_of("yolov5l"),
        img=640,
        images=COCO_IMAGES,
        val_images=COCO_VAL_IMAGES,
        image_bytes=163_000,
        epochs=1,
        step_images=16 * devices,
        micro_batch=16,
        workers=8,
        precision="fp16",
    )
    machine = Library.read().machine(f"{devices}xA100", work)
    validation = validation_s(work, [replace(machine, devices=val_devices)])
    return work.steps * predict(work, [machine]).first.total, validation


def yolov5l_rows() -> list[Row]:
    return [Row(f"{n} x A100", yolov5l(n)[0], train_s) for n, (train_s, _) in YOLOV5L_S.items()]


def validation_rows() -> list[Row]:
    return [Row(f"{n} x A100", yolov5l(n)[1], val_s) for n, (_, val_s) in YOLOV5L_S.items()]


def paddle_rows() -> list[Row]:
    """Return the predicted hours on several machines, from those on one.

    The network with the least hours on a data set gives the rate of the input, which all its rows share.
    """
    found = []
    for data, name, one_h, machines, many_h in PADDLE_H:
        input_h = min(row[2] for row in PADDLE_H if row[0] == data)
        predicted = paddle_step_s(name, one_h, input_h, machines) / paddle_step_s(name, one_h, input_h, 1)
        found.append(Row(f"{name}, {data}, {machines} machines", one_h * predicted / machines, many_h))
    return found


def paddle_step_s(name: str, one_h: float, input_h: float, machines: int) -> float:
    """Return the predicted seconds of a step of 8 images a device, where a step of one machine takes 1 s."""
    work = Workload(
        network=network_of(name), img=640, images=COCO_IMAGES, val_images=0, image_bytes=163_000, epochs=300,
        step_images=64 * machines, micro_batch=8, workers=READERS, precision="fp32",
    )  # fmt: skip
    library = Library.read().machine("8xV100", work)
    compute_s = 1.0 - library.pass_s - library.update_s
    load_s = READERS * input_h / one_h / 8 * (CLUSTER_INPUT if machines > 1 else 1.0)
    machine: Machine = replace(library, image_s=compute_s / 8, load_s=load_s, read_bytes_s=1e12)
    found = predict(work, [machine] * machines)
    return found.first.total


def machine_table() -> Iterator[str]:
    yield "| machine | devices | vCPUs | network, Gbit/s | $/h |"
    yield "|---|---|---|---|---|"
    for name, machine in Library.read().machines.items():
        yield (
            f"| `{name}` | {machine.devices} x {machine.device} | {machine.vcpus} | {machine.network_gbit:g} | "
            f"{machine.price_hour:g} |"
        )


def guide_tables() -> Iterator[str]:
    yield "| YOLOv5l, an epoch | predicted | published | error | validation | published |"
    yield "|---|---|---|---|---|---|"
    for row, val in zip(yolov5l_rows(), validation_rows(), strict=True):
        yield (
            f"| {row.name} | {duration(row.predicted)} | {duration(row.published)} | {row.error:+.1%} | "
            f"{val.predicted:.0f} s | {val.published:.0f} s |"
        )
    yield ""
    yield "| PP-YOLOE | predicted | published | error |"
    yield "|---|---|---|---|"
    for row in paddle_rows():
        yield f"| {row.name} | {row.predicted:.0f} h | {row.published:.0f} h | {row.error:+.0%} |"


TABLES = {"machines": machine_table, "guides": guide_tables}


def written(text: str) -> str:
    """Return the page with its tables as they are now."""
    for name, rows in TABLES.items():
        begin, end = f"<!-- {name}: python docs/plan_tables.py writes this -->\n", f"<!-- end of {name} -->\n"
        table = "\n".join(rows()) + "\n"
        text = re.sub(f"{begin}.*?{end}", lambda _, b=begin, t=table, e=end: b + t + e, text, flags=re.S)
    return text


if __name__ == "__main__":
    page = HERE / "plan.md"
    page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")
