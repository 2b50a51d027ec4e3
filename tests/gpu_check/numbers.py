"""The stages of numbers and features that compare this machine with itself: devices, sums, passes, suppression."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_check.machine import TOY_NETWORK, Found, Machine, StageFailed
from yolofleet.config.schema.verbs import SelftestConfig
from yolofleet.data.datasets.shapes import make_shapes
from yolofleet.measure.selftest.checks import Comparison, Leg, judge, lone_devices, plan
from yolofleet.measure.selftest.contract import checked_devices, copy_of_this_process, run_legs
from yolofleet.measure.trainings import outcome_of, run_training, write_job
from yolofleet.runs.report.folder import RunFolder
from yolofleet.storage.atomic import write_text
from yolofleet.support.text import echo

SAME_UPDATE = 5e-3  # of a first update in float32 with other kernels; measured on CPUs: 2e-4
NOT_FUSED = ("RMSProp", "Adamax", "NAdam", "RAdam")


def make_data(machine: Machine) -> Found:
    images, val_images, img = (20, 8, 64) if machine.is_toy else (512 * (1 + (machine.devices > 1)), 64, 320)
    make_shapes(machine.data.parent, images=images, val_images=val_images, img=img)
    if machine.is_toy:
        write_text(Path(machine.network), TOY_NETWORK)
    return Found(f"{images} images to train, {val_images} to validate", {"images": images})


def overflow(machine: Machine) -> Found:
    from gpu_check.overflow import forgets_an_overflow_in_a_layer
    from yolofleet.support.devices import device_of, is_host, select

    device = device_of(machine.one, 0)
    select(device)
    precision = "fp32" if is_host(device) else "fp16"
    texts = [
        forgets_an_overflow_in_a_layer(device, precision, per_pass, machine.network) for per_pass in (1, 2)
    ]
    return Found(f"{precision}: {texts[-1]}")


def device_checks(machine: Machine) -> Found:
    # the second device of the simulated accelerator is its first one for PyTorch's C++ code
    devices = lone_devices(machine.device)[: 1 if machine.is_toy else None]
    failed = set()
    for check in checked_devices(devices, machine.network):
        failed |= set() if check["passed"] else {check["device"]}
        echo(
            f"{check['device']}  {check['name']}: {check['detail']}"
            if check["passed"]
            else f"CheckError: {check['name']}: {check['detail']}"
        )
    if failed:
        raise StageFailed(f"checks of device {', '.join(sorted(failed))} failed")
    return Found(f"all checks of device {', '.join(devices)}")


def comparison_of(machine: Machine, legs: Sequence[Leg]) -> Comparison:
    import torch

    # a copy of a process that has computed with several threads would wait for them forever
    torch.set_num_threads(1)
    config = SelftestConfig(model=machine.network, img=64 if machine.is_toy else 128, steps=2)
    return Comparison(config, legs, machine.work)


def equal_bits(machine: Machine) -> Found:
    legs = [leg for leg in plan(machine.device) if leg.processes == 1 or machine.has_processes]
    if (machine.is_toy or machine.minutes < 5) and len(legs) > 4:
        exact = [leg for leg in legs if leg.kind == "exact" and (leg.shares or leg.parallel == "dp")]
        legs = [legs[0], *exact, next(leg for leg in legs if leg.kind == "fast" and leg.parallel == "dp")]
    comparison = comparison_of(machine, legs)
    records = []
    for record in run_legs(comparison, legs, machine.work, train=train_here):
        records.append(record)
        echo(f"{record.leg.title}: {record.sha256[:12] or record.problem}")
    verdict = judge(records)
    if verdict.cause is not None:
        raise StageFailed(f"{verdict.text}; {verdict.cause.what}")
    return Found(verdict.text, {record.leg.title: record.sha256 for record in records})


def train_here(
    settings: Mapping[str, Any], processes: int, folder: RunFolder, extra: Mapping[str, str]
) -> tuple[int, str]:
    """As ``run_training``: a run of one process in a copy of this one, which has torch loaded."""
    if processes > 1:
        return run_training(settings, processes, folder, extra)
    argv = write_job(settings, folder)
    process = copy_of_this_process(_worker, argv)
    process.join()
    return outcome_of(folder, process.exitcode or 0)


def _worker(argv: list[str]) -> int:
    from yolofleet.training.rank import worker

    return worker.main(argv)


def passes(machine: Machine) -> Found:
    legs = [Leg("fast", "one micro-batch a pass", machine.one), Leg("fast", "several", machine.one)]
    comparison = comparison_of(machine, legs)
    for number, (leg, together) in enumerate(zip(legs, (1, 4), strict=True)):
        folder = RunFolder(machine.work / f"passes-{together}")
        settings = comparison.settings_of(leg) | {"precision": "fp32", "micro_batches_per_pass": together}
        code, problem = train_here(settings, 1, folder, {})
        if code:
            raise StageFailed(f"--micro-batches-per-pass {together}: {problem}")
        record = comparison.read(leg, folder)
        if number and not max(record.update_difference, record.loss_difference) <= SAME_UPDATE:
            raise StageFailed(
                f"the first update of {together} micro-batches in a pass is off by {record.update_difference:.1e} and the "
                f"loss by {record.loss_difference:.1e}, expected at most {SAME_UPDATE:.0e}"
            )
    off = max(record.update_difference, record.loss_difference)
    return Found(f"first update off by {off:.1e}", {"update_difference": off})


def suppression(machine: Machine) -> Found:
    import torch

    from yolofleet.data.geometry.boxes import Decoded
    from yolofleet.data.geometry.nms import detections
    from yolofleet.support.devices import device_of

    draws = torch.Generator().manual_seed(0)
    boxes = torch.rand(4 if machine.is_toy else 32, 400 if machine.is_toy else 2000, 9, generator=draws)
    boxes[..., :2] *= 600
    boxes[..., 2:4] = 8 + 100 * boxes[..., 2:4]
    for multi_label in (True, False):
        on_cpu, on_device = (
            detections(Decoded(boxes.to(device)), conf=0.3, iou=0.6, max_det=300, multi_label=multi_label)[0]
            for device in (torch.device("cpu"), device_of(machine.one, 0))
        )
        for image, (expected, found) in enumerate(zip(on_cpu, on_device, strict=True)):
            if expected.shape != found.shape or not torch.allclose(
                expected, found.cpu(), rtol=1e-5, atol=1e-3
            ):
                raise StageFailed(f"image {image}: {len(found)} boxes, {len(expected)} on the CPU, or others")
    return Found(f"the boxes of {len(boxes)} images are those of the CPU")


def optimizers(machine: Machine) -> Found:
    from yolofleet.measure.selftest.device_checks import resumes
    from yolofleet.support.devices import device_of, select

    device = device_of(machine.one, 0)
    select(device)
    names = NOT_FUSED[:2] if machine.is_toy else NOT_FUSED
    for name in names:
        echo(f"{name}: {resumes(device, name, machine.network)}")
    return Found(f"{', '.join(names)}: two steps, and resumed")
