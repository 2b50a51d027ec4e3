"""`yolofleet data split`, `merge` and `preview`: make data sets of others without copying an image, and show one."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from yolofleet.cli.commands import QUIET, option, verb
from yolofleet.data.datasets.sources import load_dataset
from yolofleet.runs.report.screen_table import ScreenTable
from yolofleet.support.errors import ConfigError
from yolofleet.support.terminal import Progress
from yolofleet.support.text import echo, is_quiet

if TYPE_CHECKING:
    from yolofleet.data.datasets.combine import Combined
    from yolofleet.data.datasets.index import DataIndex

SHARE = click.FloatRange(0, 1, max_open=True)
OUT = option("--out", "folder to create; it must not exist", required=True, metavar="FOLDER")


@verb(
    "split",
    click.Argument(["data"]),
    OUT,
    option("--val", "share of the validation images", default=0.2, type=SHARE, metavar="X"),
    option(
        "--test",
        "share of the test images; 0: no test split, or that of DATA",
        default=0.0,
        type=SHARE,
        metavar="X",
    ),
    option("--seed", "decides between images that are equally good  [0]", type=click.IntRange(0), default=0),
    option(
        "--group",
        "images to keep in one split: auto (frames of one video, by their names, if that seems right), name, none, or a regular "
        "expression for paths",
        default="auto",
        metavar="REGEX",
    ),
    option(
        "--groups",
        "the same by a column of a CSV file whose first column names the images",
        metavar="FILE:COLUMN",
    ),
    QUIET,
    help="Divide the images of DATA into train, val and test by class, without copying one. FOLDER gets a data.yaml and lists.",
)
def split_command(
    data: str, out: str, val: float, test: float, seed: int, group: str, groups: str | None
) -> int:
    from yolofleet.data.datasets.combine import split_dataset

    if groups and group != "auto":
        raise ConfigError(
            "--group and --groups are mutually exclusive", source="command line", hint="one of them"
        )
    shares = _shares(val, test)
    with Progress(sys.stderr) as progress:
        done = split_dataset(
            load_dataset(data),
            Path(out),
            shares,
            seed=seed,
            group=group,
            table=groups or "",
            on_progress=progress.show,
        )
    _show(done)
    return 0


@verb(
    "merge",
    click.Argument(["data"], nargs=-1, required=True, metavar="DATA DATA ..."),
    OUT,
    QUIET,
    help="Join data sets of any formats to one by the names of their classes, without copying an image.",
)
def merge_command(data: tuple[str, ...], out: str) -> int:
    from yolofleet.data.datasets.combine import merge_datasets

    if len(data) < 2:
        raise ConfigError("only one data set is named", source="command line", hint="name two or more")
    with Progress(sys.stderr) as progress:
        done = merge_datasets([load_dataset(one) for one in data], Path(out), on_progress=progress.show)
    _show(done)
    return 0


def _shares(val: float, test: float) -> dict[str, int]:
    """Return the share of each split, train first, in ``divide.UNIT``. Raises ConfigError."""
    from yolofleet.data.datasets.divide import UNIT

    shares = {"val": round(val * UNIT), "test": round(test * UNIT)}
    train = UNIT - sum(shares.values())
    if not shares["val"] or train <= 0:
        what = f"--val {val:g} and --test {test:g} leave no images for {'train' if shares['val'] else 'val'}"
        raise ConfigError(what, source="command line", hint="--val 0.2 --test 0.1")
    return {"train": train, **{split: share for split, share in shares.items() if share}}


def _show(done: Combined) -> None:
    """Print the notes, the images and boxes of each class and split, and the path of the result."""
    if not is_quiet():
        for note in done.notes:
            echo(f"note: {note}")
        _table(done.indexes).show()
    echo(done.folder / "data.yaml")


def _table(indexes: Mapping[str, DataIndex]) -> ScreenTable:
    figures = [f"{split} {what}" for split in indexes for what in ("images", "boxes")]
    table = ScreenTable("class", *figures, numbers=figures)
    rows: dict[str, list[int]] = {}
    for index in indexes.values():
        is_box = ~index.crowd
        owner = np.repeat(np.arange(len(index)), np.diff(index.offsets))[is_box]
        of_class = np.unique(np.column_stack([owner, index.classes[is_box]]), axis=0)[:, 1]
        images = np.bincount(of_class, minlength=len(index.names))
        for number, name in enumerate(index.names):
            rows.setdefault(f"{number} {name}", []).extend(
                [int(images[number]), int(index.class_counts()[number])]
            )
        rows.setdefault("no label", []).extend([index.background, 0])
        rows.setdefault("all", []).extend([len(index), int(is_box.sum())])
    for name in sorted(rows, key=lambda name: (name == "all", name == "no label")):
        table.add_row(name, *map(str, rows[name]))
    return table


@verb(
    "preview",
    click.Argument(["data"]),
    option("--recipe", "recipe name or file  [scratch-low]"),
    option("--set", "change one value of the recipe", multiple=True, metavar="KEY=VALUE"),
    option("--out", ".jpg or .png to write", default="preview.jpg", metavar="FILE"),
    option("--count", "number of images", type=click.IntRange(1, 400), default=16),
    option("--epoch", "epoch to show, from 1", type=click.IntRange(1), default=1),
    option("--epochs", "epochs of the run, for close_mosaic  [100]", type=click.IntRange(1)),
    option("--seed", "seed of the run  [0]", type=click.IntRange(0)),
    option("--img", "image size in training, pixels  [640]", type=click.IntRange(32, 8192)),
    option("--batch", "images per batch  [16]", type=click.IntRange(1)),
    option("--micro-batch", "images of one shape with --rect", type=click.IntRange(1)),
    option(
        "--sampler",
        "how often an epoch shows each image  [none]",
        type=click.Choice(["none", "weights", "balanced", "repeat-factor"]),
    ),
    option("--fraction", "share of the training images to use  [1]", type=float),
    option("--rect", "rectangular images", is_flag=True),
    option("--single-cls", "treat all classes as one", is_flag=True),
    QUIET,
    help="Write a sheet of augmented training images of DATA with their boxes and masks, as a training gets them.",
)
def preview_command(data: str, out: str, count: int, epoch: int, **options: Any) -> int:
    from yolofleet.config.load import resolve_train
    from yolofleet.data.datasets.check import lenient_index
    from yolofleet.training.rank.inputs import write_preview

    file = Path(out)
    if file.suffix.lower() not in (".png", ".jpg", ".jpeg"):
        raise ConfigError(
            f"--out {out} is not a .png or .jpg file", source="command line", hint="--out preview.jpg"
        )
    chosen = {name: value for name, value in options.items() if value is not None}
    # a model decides nothing here but its family's default recipe
    config, recipe = resolve_train({**chosen, "data": data, "model": "yolov5n"})
    if not is_quiet():
        for note in (*config.notes, *recipe.notes):
            echo(note)
    if config.value.sampler == "weights" and not is_quiet():
        echo("--sampler weights: each image once, as before the first validation")
    with Progress(sys.stderr) as progress:
        index = lenient_index(
            load_dataset(data),
            "train",
            on_progress=progress.show,
            single_cls=config.value.single_cls,
            masks=None,
        )
    write_preview(config.value, recipe.value, index, file, count=count, epoch=epoch)
    echo(file)
    return 0
