"""`yolofleet data preview`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from yolofleet.cli.commands import QUIET, option, verb
from yolofleet.cli.data import DATA
from yolofleet.support.errors import ConfigError
from yolofleet.support.terminal import Progress
from yolofleet.support.text import echo, is_quiet


@verb(
    "preview",
    DATA,
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
    help="Write a sheet of augmented training images of DATA with their boxes, as a training gets them.",
)
def command(data: str, out: str, count: int, epoch: int, **options: Any) -> int:
    from yolofleet.config.load import resolve_train
    from yolofleet.data.datasets.check import lenient_index
    from yolofleet.data.datasets.sources import load_dataset
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
            load_dataset(data), "train", on_progress=progress.show, single_cls=config.value.single_cls
        )
    write_preview(config.value, recipe.value, index, file, count=count, epoch=epoch)
    echo(file)
    return 0
