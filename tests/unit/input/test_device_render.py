"""Images that the device renders are those of the CPU path, and their labels are equal."""

from itertools import cycle

import cv2
import numpy as np
import pytest
import torch
from test_loader import count_labels, keys
from test_sample import FULL, Pictures

from yolofleet.config.schema import Recipe
from yolofleet.data.input import device_render
from yolofleet.data.input.augment import Drawn, Look, Scene, Tile, View, finish, render
from yolofleet.data.input.device_render import PackedImages, pack
from yolofleet.data.input.loader import _mapped
from yolofleet.data.input.sample import MicroBatchKey, TrainSamples, train_loader

CPU = torch.device("cpu")
IMG = 96
RECIPES = {
    "default": Recipe(),
    "rotation and shear": Recipe(degrees=10, shear=5),
    "perspective": Recipe(perspective=0.001, degrees=5),
    "nine images": Recipe(mosaic9=1.0),
    "mixed": Recipe(mixup=1.0),
    "mixed warps": Recipe(mixup=0.5, degrees=5, shear=2),
    "closed mosaic": Recipe(close_mosaic=10),
    "flips": Recipe(flipud=0.5, fliplr=0.5),
    "flipped warps": Recipe(flipud=0.5, fliplr=0.5, degrees=10),
    "no change of colours": Recipe(hsv_h=0, hsv_s=0, hsv_v=0, mixup=0.3),
    "crops and warps": Recipe(scale=0.9, mosaic=0.8, mosaic9=0.3, mixup=0.3, flipud=0.5),
}
OF_THE_SAME_BYTES = ("default", "nine images", "closed mosaic", "flips")  # neither warps nor mixing
# before version 5, OpenCV rounds coordinates of a warp to 1/32 pixel
MOST_MEAN = 0.1 if int(cv2.__version__.partition(".")[0]) >= 5 else 0.6


def made(recipe: Recipe) -> TrainSamples:
    pictures, scale = Pictures(12), IMG / 64
    pictures.images = [
        cv2.resize(image, None, fx=scale, fy=scale, interpolation=cv2.INTER_CUBIC)
        for image in pictures.images
    ]
    return TrainSamples(pictures, pictures, recipe, img=IMG, seed=0, epochs=10)


def buffer(size: int) -> torch.Tensor:
    return torch.full((size,), 0x5A, dtype=torch.uint8)


def pixels_of(images: torch.Tensor) -> np.ndarray:
    assert images.dtype == torch.uint8 and images.is_contiguous(memory_format=torch.channels_last)
    return images.permute(0, 2, 3, 1).numpy()


def difference(mine: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    assert mine.shape == theirs.shape
    return np.abs(mine.astype(np.int64) - theirs)


@pytest.mark.parametrize(
    ("name", "size"),
    [*((name, None) for name in RECIPES), *zip(RECIPES, cycle([IMG // 2, 64, 128]), strict=False)],
)
def test_the_device_renders_what_the_cpu_renders(name: str, size: int | None):
    key = [MicroBatchKey(0, 0, tuple(divmod(i, 12) for i in range(24)), size)]
    samples = made(RECIPES[name])
    (theirs,) = train_loader(samples, iter(key), count_labels, workers=0)
    (mine,) = train_loader(samples, iter(key), count_labels, workers=0, on_device=True)
    assert np.array_equal(mine.labels, theirs.labels) and mine.targets == theirs.targets
    off = difference(pixels_of(mine.images_on(CPU)), pixels_of(theirs.images_on(CPU)))
    assert (off <= 2).mean() >= 0.999 or MOST_MEAN > 0.1
    assert off.mean() < MOST_MEAN
    if name in OF_THE_SAME_BYTES:
        assert not off.any()


def test_images_rendered_in_pieces_are_those_rendered_together(monkeypatch: pytest.MonkeyPatch):
    samples = made(RECIPES["crops and warps"])
    packed = pack([samples.draw(0, i) for i in range(12)], IMG, 64, buffer)
    whole = packed.render(CPU)
    monkeypatch.setattr(device_render, "PIECE_PX", 2 * IMG**2)
    assert torch.equal(packed.render(CPU), whole)
    assert len(whole) == 12


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("size", [None, 64])
def test_a_rank_without_work_gets_no_images(workers: int, size: int | None):
    key = [MicroBatchKey(0, 0, (), size)]
    with train_loader(made(FULL), iter(key), count_labels, workers=workers, on_device=True) as loader:
        (batch,) = loader
    assert batch.images_on(CPU).shape == (0, 3, size or IMG, size or IMG)
    assert batch.labels.shape == (0, 6)


def test_loader_processes_share_their_buffers():
    samples = made(FULL)
    with train_loader(samples, keys(3), count_labels, workers=2, on_device=True) as loader:
        there = []
        for batch in loader:
            assert isinstance(batch.images, PackedImages)
            assert batch.images.buffer.data_ptr() in {buffer.data_ptr() for buffer in _mapped.values()}
            there.append(batch)
    here = train_loader(samples, keys(3), count_labels, workers=0, on_device=True)
    for theirs, mine in zip(there, here, strict=True):
        assert torch.equal(theirs.images_on(CPU), mine.images_on(CPU))
        assert np.array_equal(theirs.labels, mine.labels)


def rendered_alone(view: View, look: Look) -> tuple[np.ndarray, np.ndarray]:
    """One picture that covers the canvas, as the device and as the CPU render it."""
    side = view.canvas_px
    picture = cv2.resize(np.random.default_rng(0).integers(0, 256, (7, 7, 3), np.uint8), (side, side))
    tiles = [Tile(picture, np.zeros((0, 5), np.float32), 0, 0)]
    sample = Drawn([Scene(tiles, view)], 1.0, look, np.zeros((0, 5), np.float32))
    mine = pack([sample], view.output_px, view.output_px, buffer).render(CPU)
    theirs = np.empty((view.output_px, view.output_px, 3), np.uint8)
    render(tiles, view, look, theirs)
    return pixels_of(mine)[0], theirs


def test_a_window_far_outside_of_the_canvas_is_grey():
    far = View(
        np.array([[1.0, 0, 9000], [0, 1, 9000], [0, 0, 1]]), 1.0, (0, 0, 1, 1), False, 80, 64, (64, 64)
    )
    mine, theirs = rendered_alone(far, Look(None, False, False))
    assert (mine == 114).all() and (theirs == 114).all()


@pytest.mark.parametrize("horizon", [0.0, 0.02, -0.05])
def test_a_map_with_a_horizon_in_the_output_renders(horizon: float):
    to_output = np.array([[1.0, 0.1, 3], [0.05, 1.1, -4], [0.0, horizon, 1]])
    view = View(to_output, 1.0, (0, 0, 80, 80), False, 80, 64, (64, 64))
    mine, theirs = rendered_alone(view, Look((1.2, 0.8, 1.1), True, False))
    assert (difference(mine, theirs) <= 2).mean() >= 0.99  # next to the horizon one pixel shows hundreds


def test_a_map_that_has_no_inverse_shows_one_colour():
    view = View(np.array([[1.0, 1, 0], [1, 1, 0], [0, 0, 1]]), 1.0, (0, 0, 80, 80), False, 80, 64, (64, 64))
    mine, _ = rendered_alone(view, Look(None, False, False))
    assert (mine == mine[0, 0]).all()


@pytest.mark.parametrize("gains", [(1.0, 1.0, 1.0), (1.015, 1.7, 1.4), (0.985, 0.3, 0.6), (2.0, 5.0, 0.0)])
def test_colours_change_as_on_the_cpu(gains: tuple[float, float, float]):
    rng = np.random.default_rng(1)
    colours = rng.integers(0, 256, (256, 256, 3), dtype=np.uint8)
    colours[:128] >>= rng.integers(0, 8, (128, 256, 1), dtype=np.uint8)  # dark ones
    colours[::3, :, 1] = colours[::3, :, 0]  # and those with two equal channels
    theirs = np.empty_like(colours)
    finish(colours, Look(gains, False, False), theirs)
    mine = device_render._recoloured(torch.from_numpy(colours)[None], torch.tensor([gains]))
    assert np.array_equal(mine[0].to(torch.uint8).numpy(), theirs)
