"""``--augment-on device``: the accelerator renders the CPU's bytes, without a wait and without a loop over images."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from miniature import Accelerator
from small_data import picture
from small_training import CLASSES, SmallRun, small_run

from yolofleet.config.schema import Recipe
from yolofleet.data.input.sample import Match, MicroBatch, MicroBatchKey, TrainSamples, train_loader

CPU, ZERO = torch.device("cpu"), torch.device("mini", 0)
IMG = 64
RECIPES = {  # and the number of operations that a micro-batch may launch, with --multi-scale
    "default": (Recipe(), 110),
    "mixed": (Recipe(mixup=0.5), 120),
    "warps": (Recipe(perspective=0.0005, degrees=5, shear=2, flipud=0.5), 150),
    "crops and warps": (Recipe(scale=0.9, mixup=0.5), 180),
    "no change of colours": (Recipe(hsv_h=0, hsv_s=0, hsv_v=0), 40),
}


class Pictures:
    """Stands in for index and cache."""

    def __init__(self) -> None:
        self.images = [picture(IMG, 40 + 2 * i, seed=i) for i in range(12)]

    def __len__(self) -> int:
        return len(self.images)

    def get(self, image: int, seen: object = None, /) -> np.ndarray:
        return self.images[image]

    def labels(self, image: int, /) -> np.ndarray:
        return np.array([(image % CLASSES, 0.4, 0.5, 0.3, 0.4), (0, 0.7, 0.6, 0.2, 0.2)], np.float32)

    def outlines(self, image: int, /) -> list[list[np.ndarray]]:
        return []


def no_targets(labels: np.ndarray, images: int, size_hw: tuple[int, int]) -> None:
    """Stands in for a loss's match."""


def micro_batches(
    recipe: Recipe,
    *sizes: int,
    on_device: bool,
    match: Match = no_targets,
    side: int | None = None,
    workers: int = 0,
) -> list[MicroBatch]:
    """Micro-batches of as many images as ``sizes`` say."""
    samples = TrainSamples(Pictures(), Pictures(), recipe, img=IMG, seed=0, epochs=10)
    keys = (
        MicroBatchKey(0, number, tuple((number, i) for i in range(size)), side)
        for number, size in enumerate(sizes)
    )
    with train_loader(
        samples, keys, match, workers=workers, pin_memory=on_device, on_device=on_device
    ) as loader:
        return list(loader)


@pytest.mark.parametrize("side", [None, 96])
@pytest.mark.parametrize("name", RECIPES)
def test_the_accelerator_renders_the_bytes_of_the_cpu_without_a_wait(
    accelerator: Accelerator, name: str, side: int | None
):
    recipe, _ = RECIPES[name]
    for batch in micro_batches(recipe, 4, 0, 1, on_device=True, side=side):
        accelerator.reset()
        with accelerator.only_waits():
            images = batch.images_on(ZERO)
        assert accelerator.unpinned == [] and images.device == ZERO
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(images.to(CPU), batch.images_on(CPU))


@pytest.mark.parametrize("name", RECIPES)
def test_as_many_operations_render_twelve_images_as_four(accelerator: Accelerator, name: str):
    recipe, most = RECIPES[name]
    launched = []
    for batch in micro_batches(recipe, 4, 12, on_device=True, side=96):
        accelerator.reset()
        batch.images_on(ZERO)
        launched.append(accelerator.launched())
    assert launched[0] <= launched[1] <= most


@pytest.mark.parametrize("devices", [("mini:0",), ("mini:0", "mini:1")])
def test_a_step_on_rendered_images_gives_the_bits_of_a_step_on_loaded_ones(
    accelerator: Accelerator, devices: tuple[str, ...]
):
    def trained(*, on_device: bool, devices: tuple[str, ...]) -> SmallRun:
        run = small_run(devices=devices, pin=on_device, images=4)
        made = micro_batches(Recipe(), 2, 2, on_device=on_device, match=run.loss.match)
        shares = [[batch] for batch in made] if len(devices) > 1 else [made]
        accelerator.reset()
        run.do(1, shares=shares)
        run.do(1, shares=[made, *([[]] * (len(devices) - 1))])  # the second device has no work
        return run

    here = trained(on_device=False, devices=tuple("cpu" for _ in devices))
    there = trained(on_device=True, devices=devices)
    assert not [wait for wait in accelerator.waits if wait.where.startswith("device_render")]
    assert accelerator.unpinned == []
    mine, theirs = there.tensors(), here.tensors()
    assert not [name for name, t in mine.items() if not torch.equal(t, theirs[name])]


def test_loader_processes_send_page_locked_buffers_and_fill_theirs_again(accelerator: Accelerator):
    sizes = [2] * 40
    there = micro_batches(Recipe(), *sizes, on_device=True, workers=1)
    here = micro_batches(Recipe(), *sizes, on_device=True)
    for mine, theirs in zip(there, here, strict=True):
        assert torch.equal(mine.images_on(ZERO).to(CPU), theirs.images_on(CPU))
    assert accelerator.unpinned == []
