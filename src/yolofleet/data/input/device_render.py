"""Render the images of a micro-batch on the device that trains (``--augment-on device``).

A loader process draws the samples as always. It copies what each output shows of its canvas into one buffer, behind a
few small tables. The device resizes or warps, mixes and recolours many images at once, and the host reads nothing from
it. Flips cost nothing: the tables of a flipped image are reversed.

Crops, colours and ``--multi-scale`` follow ``_pixels.c`` operation by operation. They are integer operations, or float
operations that IEEE 754 rounds in one way only, so the bytes are those of the CPU. Warped and mixed images may differ
by 1 before they are recoloured. OpenCV before version 5 rounds the coordinates of a warp to 1/32 pixel, so there a
quarter of the pixels of a warped image differ.

Legend: m images; K scenes: one of each image, then those that are mixed in; n of any of these; s side of an output;
P pixels of the buffer. Pixels are BGR until they are recoloured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import cv2
import numpy as np
import torch
from torch import Tensor

from yolofleet.data.input.augment import Drawn, Look, View, paint, window_to_output

# output pixels that are rendered at once; each needs about 100 bytes of the device's memory meanwhile
PIECE_PX = 2**23
FLOAT_TABLES = ("warps", "weights", "gains")  # the others are int32


@dataclass(frozen=True)
class PackedImages:
    """The images of a micro-batch before they are rendered. :func:`pack` makes them.

    Attributes:
        buffer: uint8, the tables with 4 bytes a number, then the pixels [P, 3] of the windows.
        tables: shape of each table, by its name.
        side: s before ``--multi-scale``, pixels.
    """

    buffer: Tensor
    tables: dict[str, tuple[int, ...]]
    side: int

    def pin_memory(self) -> PackedImages:
        return replace(self, buffer=self.buffer.pin_memory())

    def render(self, device: torch.device) -> Tensor:
        """Return the images on ``device``: uint8 [m, 3, s, s] RGB with channels-last strides."""
        buffer = self.buffer.to(device, non_blocking=True)
        tables, end = {}, 0
        for name, shape in self.tables.items():
            start, end = end, end + 4 * math.prod(shape)
            dtype = torch.float32 if name in FLOAT_TABLES else torch.int32
            tables[name] = buffer[start:end].view(dtype).view(shape)
        return _render(buffer[end:].view(-1, 3), tables, self.side).permute(0, 3, 1, 2)


# -- in the loader process -----------------------------------------------------------------------------------


def pack(
    samples: Sequence[Drawn], side: int, final_side: int, new_buffer: Callable[[int], Tensor]
) -> PackedImages:
    """Copy the windows of all scenes into a buffer, behind the tables that the device needs to render them.

    Tables: ``crops`` int32 [n, 2, 4, s] from :func:`_neighbours`; ``warps`` float32 [n, 9] maps from the output to the
    window, for coordinates of pixel centres; ``windows`` int32 [n, 3] of each warp: number of the first pixel, width and
    height, all without the grey border; ``order`` int32 [K] the place of each scene among all crops and then all warps;
    ``mixed`` int32 [K - m] the images with a second scene; ``weights`` float32 [K - m, 2] of their scenes; ``gains``
    float32 [m, 3] of hue, saturation and value, or [0, 3]; ``sizes`` int32 [m, 2, 4, final side] as crops, or [0, ...].

    Args:
        samples: of one recipe; may be empty.
        side, final_side: of the outputs in pixels, before and after ``--multi-scale`` resizes them.
        new_buffer: returns an uninitialised tensor uint8 of that many bytes.
    """
    mixed = [i for i, sample in enumerate(samples) if len(sample.scenes) == 2]
    scenes = [sample.scenes[0] for sample in samples] + [samples[i].scenes[1] for i in mixed]
    looks = [sample.look for sample in samples] + [samples[i].look for i in mixed]
    crops = [k for k, scene in enumerate(scenes) if scene.view.is_crop]
    warps = [k for k, scene in enumerate(scenes) if not scene.view.is_crop]
    windows = [_window(scenes[k].view) for k in crops + warps]

    sides_wh = np.array([(x2 - x1, y2 - y1) for x1, y1, x2, y2 in windows], np.int64).reshape(-1, 2)
    areas = sides_wh.prod(axis=1)
    starts = areas.cumsum() - areas
    is_warp = np.arange(len(windows)) >= len(crops)
    warped_wh, resized = sides_wh[is_warp], np.arange(len(samples) if final_side != side else 0)
    numbers: dict[str, Any] = {
        "crops": _neighbours(sides_wh[~is_warp, 0], starts[~is_warp], side, [looks[k] for k in crops]),
        "warps": np.reshape([_output_to_window(scenes[k].view, looks[k]) for k in warps], (-1, 9)),
        "windows": np.column_stack([starts[is_warp] + warped_wh[:, 0] + 1, warped_wh - 2]),
        "order": np.argsort(crops + warps),
        "mixed": mixed,
        "weights": np.reshape([(samples[i].weight, 1 - samples[i].weight) for i in mixed], (-1, 2)),
        "gains": np.reshape([sample.look.gains for sample in samples if sample.look.gains], (-1, 3)),
        "sizes": _neighbours(np.full(len(resized), side), resized * side**2, final_side),
    }
    tables = {
        name: np.asarray(table, np.float32 if name in FLOAT_TABLES else np.int32)
        for name, table in numbers.items()
    }
    header = np.concatenate([table.ravel().view(np.uint8) for table in tables.values()])
    buffer = new_buffer(len(header) + 3 * int(areas.sum()))
    content = buffer.numpy()
    content[: len(header)] = header
    pixels = content[len(header) :].reshape(-1, 3)
    for k, window, start, area in zip(crops + warps, windows, starts, areas, strict=True):
        tiles, view = scenes[k]
        out = pixels[start : start + area].reshape(window[3] - window[1], -1, 3)
        paint([(tile.image, tile.left, tile.top) for tile in tiles], window, view.canvas_px, out)
    return PackedImages(buffer, {name: table.shape for name, table in tables.items()}, side)


def _window(view: View) -> tuple[int, int, int, int]:
    """Return the window of a view, with a border of one pixel if it is warped: the colour outside of it."""
    x1, y1, x2, y2 = view.window_xyxy
    return view.window_xyxy if view.is_crop else (x1 - 1, y1 - 1, x2 + 1, y2 + 1)


def _output_to_window(view: View, look: Look) -> np.ndarray:
    """Return the float64 [3, 3] map from the flipped output to the window, for coordinates of pixel centres."""
    last = view.output_px - 1
    flip = np.diag([-1.0 if look.mirrored else 1.0, -1.0 if look.upside_down else 1.0, 1.0])
    flip[:2, 2] = last * look.mirrored, last * look.upside_down
    _, inverse = cv2.invert(window_to_output(view))  # all zeros for a singular map, as in OpenCV's warps
    return np.asarray(inverse @ flip)


def _neighbours(sides: np.ndarray, starts: np.ndarray, to: int, looks: Sequence[Look] = ()) -> np.ndarray:
    """Return which pixels make each pixel of square windows [n] resized to ``to``, as ``prepare_means`` in ``_pixels.c``.

    Args:
        starts: [n] number of the first pixel of each window.
        looks: of each window; default: no flips.
    Returns:
        int64 [n, 2, 4, to], for rows and for columns: two neighbours and their weights, of 2048. A neighbour of a row plus
        one of a column is the number of a pixel.
    """
    last = sides[:, None] - 1
    at = ((np.arange(to) + 0.5) * (sides[:, None] / to) - 0.5).astype(np.float32)
    first = np.floor(at)
    part = at - first
    rows = [first.clip(0, last), (first + 1).clip(0, last), np.rint((1 - part) * 2048), np.rint(part * 2048)]
    part[(first < 0) | (first >= last)] = 0
    columns = [*rows[:2], np.rint((1 - part) * 2048), np.rint(part * 2048)]
    table = np.stack([np.stack(rows, axis=1), np.stack(columns, axis=1)], axis=1).astype(np.int64)
    table[:, 0, :2] = table[:, 0, :2] * sides[:, None, None] + starts[:, None, None]
    for of_window, look in zip(table, looks, strict=False):
        if look.upside_down:
            of_window[0] = of_window[0, :, ::-1].copy()
        if look.mirrored:
            of_window[1] = of_window[1, :, ::-1].copy()
    return table


# -- on the device -------------------------------------------------------------------------------------------


def _render(pixels: Tensor, tables: dict[str, Tensor], side: int) -> Tensor:
    """Render uint8 [m, s, s, 3] RGB from the buffer's pixels [P, 3]."""
    crops, warps = tables["crops"], tables["warps"]
    scenes = [pixels.new_empty(0, side, side, 3)]
    scenes += [_crops(pixels, crops[piece]) for piece in _pieces(len(crops), side)]
    scenes += [
        _warps(pixels, warps[piece], tables["windows"][piece], side) for piece in _pieces(len(warps), side)
    ]
    images = torch.cat(scenes)
    if len(crops) and len(warps):
        images = images.index_select(0, tables["order"])
    mixed, weights = tables["mixed"], tables["weights"]
    images, others = images.split([len(images) - len(mixed), len(mixed)])
    for piece in _pieces(len(mixed), side):
        which = mixed[piece].long()
        first, second = weights[piece].view(-1, 2, 1, 1, 1).unbind(1)
        blend = images.index_select(0, which) * first + others[piece] * second
        images.index_copy_(0, which, blend.round_().to(torch.uint8))
    if len(tables["gains"]):
        for piece in _pieces(len(images), side):
            images[piece] = _recoloured(images[piece], tables["gains"][piece])
    else:
        images = images.flip(3)
    sizes, final_side = tables["sizes"], tables["sizes"].shape[3]
    if final_side != side:
        pixels, resized = images.reshape(-1, 3), [images.new_empty(0, final_side, final_side, 3)]
        resized += [_crops(pixels, sizes[piece]) for piece in _pieces(len(sizes), final_side)]
        images = torch.cat(resized)
    return images


def _pieces(count: int, side: int) -> Iterator[slice]:
    """Cut ``count`` outputs into pieces of at most ``PIECE_PX`` pixels."""
    step = max(PIECE_PX // side**2, 1)
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def _crops(pixels: Tensor, table: Tensor) -> Tensor:
    """Resize windows: pixels [P, 3] and neighbours [n, 2, 4, s] -> uint8 [n, s, s, 3]."""
    side = table.shape[3]
    rows, columns = table[:, 0, :, :, None], table[:, 1, :, None]  # [n, 4, s, 1], [n, 4, 1, s]

    def gathered(column: Tensor) -> Tensor:
        return pixels.index_select(0, (rows[:, :2] + column).view(-1)).view(-1, 2, side, side, 3)

    both = gathered(columns[:, :1]) * columns[:, 2:3, ..., None]  # int32 [n, upper and lower, s, s, 3]
    both += gathered(columns[:, 1:2]) * columns[:, 3:, ..., None]
    both >>= 4
    both *= rows[:, 2:, ..., None]
    both >>= 16
    upper, lower = both.unbind(1)
    return upper.add_(lower).add_(2).bitwise_right_shift_(2).to(torch.uint8)


def _warps(pixels: Tensor, maps: Tensor, windows: Tensor, side: int) -> Tensor:
    """Warp windows with bilinear interpolation: pixels [P, 3] and maps [n, 9] -> uint8 [n, s, s, 3]."""
    steps = torch.arange(side, dtype=torch.float32, device=pixels.device)
    a, b, c, d, e, f, g, h, i = maps.view(-1, 9, 1, 1).unbind(1)
    first, width, height = windows.view(-1, 3, 1, 1).unbind(1)
    column, row = steps, steps[:, None]
    depth = g * column + (h * row + i)  # [n, s, s]
    depth.masked_fill_(depth == 0, math.inf)  # on the horizon: coordinates 0, as OpenCV does it
    x = (a * column + (b * row + c)).div_(depth)
    y = (d * column + (e * row + f)).div_(depth)

    def neighbour(at: Tensor, size: Tensor) -> Tensor:
        """Limit coordinates to the border, in place; return the first of both neighbours."""
        torch.minimum(at.clamp_(min=-1), size, out=at)
        return torch.minimum(at.floor(), size - 1)

    left, upper = neighbour(x, width), neighbour(y, height)
    x, y = x.sub_(left)[..., None], y.sub_(upper)[..., None]
    index = (upper.int() * (width + 2)).add_(left.int()).add_(first)
    below = index + (width + 2)

    def gathered(index: Tensor) -> Tensor:
        return pixels.index_select(0, index.view(-1)).view(-1, side, side, 3).float()

    upper_row = gathered(index).lerp_(gathered(index + 1), x)
    lower_row = gathered(below).lerp_(gathered(below + 1), x)
    return upper_row.lerp_(lower_row, y).round_().to(torch.uint8)


def _recoloured(images: Tensor, gains: Tensor) -> Tensor:
    """Multiply hue, saturation and value as ``recolour_row`` in ``_pixels.c``: [n, s, s, 3] BGR -> float32 RGB."""
    bgr = images.permute(3, 0, 1, 2).float()  # [n, s, s, 3] -> [3, n, s, s]
    blue, green, red = bgr
    hue_gain, saturation_gain, value_gain = gains.view(-1, 3, 1, 1).unbind(1)
    value = bgr.amax(0)
    spread = value - bgr.amin(0)
    # The nearest integers to 255 * 4096 / value and 30 * 4096 / spread: no quotient is near a half.
    per_value = (255 * 4096 / value.clamp(min=1)).add_(0.5).floor_()
    per_spread = (30 * 4096 / spread.clamp(min=1)).add_(0.5).floor_()
    saturation = per_value.mul_(spread).div_(4096).add_(0.5).floor_()
    from_green, from_blue = blue - red + 2 * spread, red - green + 4 * spread
    hue = torch.where(value == red, green - blue, torch.where(value == green, from_green, from_blue))
    hue = hue.mul_(per_spread).div_(4096).add_(180.5).floor_().remainder_(180)
    hue = hue.mul_(hue_gain).floor_().remainder_(180)
    saturation.mul_(saturation_gain).floor_().clamp_(max=255)
    value.mul_(value_gain).floor_().clamp_(max=255)
    fall = saturation.mul_(value).mul_(1 / 7650)
    top = value.add_(0.5)
    # A channel falls from the value while the hue moves away from its own, from 30 units to 60.
    high = 30 * fall + top
    red = (top - 60 * fall).add_(hue.sub(90).abs_().clamp_(30, 60).mul_(fall))
    green = high - hue.sub(60).abs_().clamp_(30, 60).mul_(fall)
    blue = high - hue.sub(120).abs_().clamp_(30, 60).mul_(fall)
    return torch.stack([red, green, blue], dim=3)
