"""Collect the settings that decide how much memory, processes and disk a run needs of a machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from yolofleet.config.schema import TrainConfig, ValConfig
from yolofleet.config.schema.machine import DoctorConfig


@dataclass(frozen=True)
class RunResources:
    """Settings of a run that the doctor needs to check a machine.

    Attributes:
        device: as ``--device``; a host of a fleet may have another.
        one_process: one process drives all devices (``--parallel dp``).
        workers: loader processes of each rank; -1 = chosen from the number of cores.
        prefetch: micro-batches that each loader process prepares ahead.
        micro_batch, val_batch: images.
        is_measured: the run will measure its micro-batch, so ``micro_batch`` is an assumption.
        img: side of an image, pixels.
        augments_on_device: loader processes leave it to the device to render images.
        data: the data set; "" for none.
        single_cls: treat all its classes as one.
        results: parent folder of the run folder.
        data_digest: module that prints digests of a data set when it is started with ``python -m``.
    """

    device: str
    one_process: bool
    workers: int
    prefetch: int
    micro_batch: int
    val_batch: int
    img: int
    augments_on_device: bool
    data: str
    single_cls: bool
    results: Path
    is_measured: bool = False
    data_digest: str = "yolofleet.fleet.launch.data_digest"


def resources_of(settings: TrainConfig | ValConfig | DoctorConfig) -> RunResources:
    """Return the resources of a run with these settings; settings that the doctor lacks have the defaults of training."""
    if isinstance(settings, DoctorConfig):
        shared = TrainConfig.model_fields.keys() & DoctorConfig.model_fields.keys()
        settings = TrainConfig(**{name: getattr(settings, name) for name in shared})
    if isinstance(settings, ValConfig):
        prefetch, micro_batch, val_batch = TrainConfig.model_fields["prefetch"].default, 1, settings.batch
        augments_on_device = is_measured = False
    else:
        prefetch, micro_batch, val_batch = (
            settings.prefetch,
            settings.likely_micro_batch,
            settings.val_batch,
        )
        augments_on_device = settings.augment_on == "device"
        is_measured = settings.batch < 0 or settings.micro_batch < 0
    return RunResources(
        device=settings.device,
        one_process=settings.parallel == "dp",
        workers=settings.workers,
        prefetch=prefetch,
        micro_batch=micro_batch,
        val_batch=val_batch,
        img=settings.img or 640,  # 0: that of the weights, which only the ranks read
        augments_on_device=augments_on_device,
        data="" if settings.recipe_class else settings.data,  # only the class may be able to read it
        single_cls=settings.single_cls,
        results=settings.project or Path("runs", settings.verb),
        is_measured=is_measured,
    )
