"""Plots of a run as PNG files.

The first figure imports matplotlib, which needs no display and downloads nothing. A plot that fails must not end a run,
so call the functions through :func:`or_note`.

Legend: C classes, K classes with labels, X points of a curve, M boxes.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, cast

import cv2
import numpy as np
from numpy.typing import NDArray

from yolofleet.data.geometry.shapes import Shapes
from yolofleet.runs.report.draw import Picture, colour, picture_grid
from yolofleet.runs.report.results import METRICS, number, read_rows
from yolofleet.storage.atomic import make_folder, write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

P = ParamSpec("P")

MASK_OPACITY = 0.4  # of the colour in a mask
HUES = BLUE, ORANGE, GREEN, RED = "#2563eb", "#f97316", "#16a34a", "#dc2626"
GREY = "#9ca3af"
STYLE: dict[str, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#6b7280",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e5e7eb",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "text.parse_math": False,  # a class may be called "$5_bill"
    "savefig.dpi": 150,
}
# fonts for class names outside Latin, Greek and Cyrillic, if installed
MORE_FONTS = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "WenQuanYi Micro Hei",
    "Microsoft YaHei",
    "PingFang SC",
    "Hiragino Sans",
    "Malgun Gothic",
    "Arial Unicode MS",
)
MANY = 30  # with more classes, names do not fit under bars and beside cells


def or_note(
    note: Callable[[str], None],
    what: str | Path,
    write: Callable[P, object],
    *args: P.args,
    **kwargs: P.kwargs,
) -> bool:
    """Call ``write``, which writes ``what``; if it fails, say so through ``note``. Return whether it worked."""
    try:
        write(*args, **kwargs)
    except Exception as problem:  # fonts, disk, a broken matplotlib: none may end a run
        reason = str(getattr(problem, "what", problem))
        first_line = (reason.splitlines() or [type(problem).__name__])[0]
        note(f"cannot write {what}: {first_line}; the command continues without it")
        return False
    return True


@contextmanager
def drawing(path: Path, width_in: float, height_in: float) -> Iterator[Figure]:
    """Yield a figure and write it to ``path``; suppress warnings about letters that the fonts lack."""
    log = logging.getLogger("matplotlib")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.font_manager import get_font_names

        installed = set(get_font_names())
        fonts = ["DejaVu Sans", *(font for font in MORE_FONTS if font in installed)]
        with (
            warnings.catch_warnings(),
            matplotlib.rc_context(cast(Any, {**matplotlib.rcParamsDefault, **STYLE, "font.family": fonts})),
        ):
            warnings.simplefilter("ignore")
            figure = Figure(figsize=(width_in, height_in), layout="constrained")
            FigureCanvasAgg(figure)
            yield figure
            make_folder(path.parent)
            figure.savefig(path, pil_kwargs={"compress_level": 2})
    finally:
        log.setLevel(level)


# -- training ----------------------------------------------------------------------------------------------


CHARTS = {"mAP": "average precision", "precision": "precision and recall", "recall": "precision and recall"}


def charts_of(columns: Iterable[str]) -> dict[str, list[str]]:
    """Return the columns of figures by the title of their chart; assets/page.js has the same rule."""
    charts: dict[str, list[str]] = {}
    for column in columns:
        if column.startswith(METRICS):
            titles = (title for word, title in CHARTS.items() if word in column)
            charts.setdefault(next(titles, "figures"), []).append(column)
    return charts


def plot_results(results_csv: Path, path: Path) -> None:
    """Plot losses, metrics, learning rate, speed, times and memory over epochs, from ``results.csv``."""
    rows = read_rows(results_csv)
    if not rows:
        return

    def column(name: str) -> NDArray[np.float64]:
        return np.array([number(row.get(name)) for row in rows], np.float64)

    epoch = column("epoch")

    def lines(axes: Axes, title: str, series: Mapping[str, str]) -> None:
        axes.set_title(title)
        shown = 0
        for (label, name), hue in zip(series.items(), cycle(HUES), strict=False):
            values = column(name)
            known = np.isfinite(values)
            if known.any():
                marker = "o" if known.sum() <= 20 else ""
                axes.plot(epoch[known], values[known], color=hue, label=label, marker=marker, markersize=3)
                shown += 1
        if shown > 1:
            axes.legend()

    kinds = [name[6:-5] for name in rows[0] if name.startswith("train/") and name.endswith("_loss")]
    # title of a chart, columns by label, least top of its axis (None: it need not begin at 0)
    charts: list[tuple[str, dict[str, str], float | None]] = [
        (f"{kind} loss", {"train": f"train/{kind}_loss", "val": f"val/{kind}_loss"}, None) for kind in kinds
    ]
    for title, columns in charts_of(rows[0]).items():
        charts.append((title, {name.removeprefix(METRICS): name for name in columns}, 0))
    charts += [
        ("learning rate", {"lr": "lr"}, None),
        ("images / s", {"images / s": "images_per_s"}, 1),
        ("seconds", {"epoch": "seconds", "validation in it": "val_seconds"}, 1),
    ]
    if np.isfinite(column("device_memory_mib")).any():  # empty on a CPU
        charts.append(("device memory, MiB", {"MiB": "device_memory_mib"}, 1))
    with drawing(path, 17.5, 3.25 * -(-(len(charts) + 1) // 5)) as figure:
        grid = figure.subplots(-(-(len(charts) + 1) // 5), 5, squeeze=False).flatten()
        for axes, (title, series, least) in zip(grid, charts, strict=False):
            lines(axes, title, series)
            if least is not None:
                top = max(np.nan_to_num(column(name)).max() for name in series.values())
                axes.set_ylim(0, 1.1 * max(top, least) or 1)
        shares = [np.nan_to_num(column(f"{phase}_share")) for phase in ("data", "compute", "comm")]
        wide = (epoch, shares) if len(rows) > 1 else ([0.5, 1.5], np.repeat(shares, 2, axis=1))
        last = grid[len(charts)]
        last.stackplot(*wide, colors=(ORANGE, "#93c5fd", RED), labels=("data wait", "compute", "comm"))
        last.set_title("share of training time")
        last.set_ylim(0, 1)
        last.legend(loc="lower left", frameon=True, framealpha=0.8)
        for place, axes in enumerate(grid):
            axes.set(xlabel="epoch", xlim=(epoch[0] - 0.5, epoch[-1] + 0.5))
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.set_visible(place <= len(charts))


# -- data --------------------------------------------------------------------------------------------------


def plot_labels(
    classes: NDArray[np.integer], boxes_cxcywh_unit: NDArray[np.floating], names: Sequence[str], path: Path
) -> None:
    """Plot the number of labels of each class, their positions and their sizes.

    Args:
        classes: [M]. boxes_cxcywh_unit: [M, 4].
    """
    boxes = np.asarray(boxes_cxcywh_unit, np.float64)
    counts = np.bincount(np.asarray(classes, np.int64), minlength=len(names))
    with drawing(path, 12, 8) as figure:
        above, below = cast(Any, figure.subfigures(2, 1))
        axes = above.subplots()
        axes.bar(range(len(counts)), counts, color=[hex_colour(c) for c in range(len(counts))])
        step = math.ceil(len(counts) / 100)
        ticks = range(0, len(counts), step)
        texts = [names[i] for i in ticks]
        upright = sum(map(len, texts)) > 100
        axes.set_xticks(ticks, texts, rotation=90 if upright else 0, fontsize=7 if len(names) > MANY else 9)
        axes.set_xlim(-0.6, max(len(counts), 6) - 0.4)
        axes.grid(axis="x", visible=False)
        axes.set_title(f"{counts.sum():,} labels of {np.count_nonzero(counts)} classes")
        where, size, area = below.subplots(1, 3)
        _heat(where, boxes[:, 0], boxes[:, 1])
        where.set(title="centres", xlabel="x / width", ylabel="y / height", aspect="equal")
        where.invert_yaxis()
        _heat(size, boxes[:, 2], boxes[:, 3])
        size.set(title="sizes", xlabel="width / image width", ylabel="height / image height", aspect="equal")
        side = np.sqrt(boxes[:, 2] * boxes[:, 3])
        area.hist(side, bins=np.geomspace(0.004, 1, 41).tolist(), color=BLUE)
        area.set(title="side (root of the area)", xlabel="fraction of the image", xscale="log")
        area.set_xticks([0.01, 0.03, 0.1, 0.3, 1], ["0.01", "0.03", "0.1", "0.3", "1"])
        area.set_xticks([], minor=True)


def _heat(axes: Axes, x: NDArray[np.float64], y: NDArray[np.float64]) -> None:
    """Plot the density of points in 0..1, on a logarithmic scale."""
    from matplotlib.colors import LogNorm

    density, _, _ = np.histogram2d(x, y, bins=50, range=((0, 1), (0, 1)))
    norm = LogNorm(vmin=0.5, vmax=max(density.max(), 1))
    axes.imshow(density.T, cmap="Blues", norm=norm, origin="lower", extent=(0, 1, 0, 1))
    axes.grid(False)


def plot_pictures(pictures: Sequence[Picture], names: Sequence[str], path: Path, *, most: int = 16) -> None:
    """Write a grid of images with their boxes, as JPEG or PNG by the suffix."""
    if not pictures:
        return
    done, encoded = cv2.imencode(path.suffix, picture_grid(pictures, names, most=most))
    assert done, f"OpenCV cannot write {path.suffix}"
    write_bytes(path, encoded.tobytes())


def hex_colour(class_idx: int) -> str:
    blue, green, red = colour(class_idx)
    return f"#{red:02x}{green:02x}{blue:02x}"


def _with_masks(rgb: np.ndarray, labels: Any) -> np.ndarray:
    """Return a copy of an image uint8 [H, W, 3] RGB in which masks have the colours of their classes."""
    shown = rgb.astype(np.float32)
    for raster, class_idx in zip(labels.rasters(rgb.shape[:2]), labels.classes.tolist(), strict=True):
        share = raster[..., None] * np.float32(MASK_OPACITY / 255)
        shown += share * (np.array(colour(class_idx)[::-1], np.float32) - shown)
    result: np.ndarray = shown.round().astype(np.uint8)
    return result


def training_pictures(
    images: Any, labels: Shapes, titles: Sequence[str] = (), *, most: int = 16
) -> list[Picture]:
    """Return the images and labels of a micro-batch as pictures.

    Args:
        images: uint8 [m, 3, H, W] RGB, tensor or array.
    """
    pixels = np.asarray(images)[:most].transpose(0, 2, 3, 1)  # [m, 3, H, W] -> [m, H, W, 3]
    pictures = []
    for i, rgb in enumerate(pixels):
        height, width = rgb.shape[:2]
        mine = labels.rows(labels.image == i)
        title = titles[i] if i < len(titles) else ""
        if hasattr(mine, "rasters"):  # of masks, whose module a training on boxes does not load
            rgb = _with_masks(rgb, mine)
        pictures.append(Picture(rgb[..., ::-1], mine.corners_px(width, height), mine.classes, None, title))
    return pictures
