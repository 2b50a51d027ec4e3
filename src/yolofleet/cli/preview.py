"""`yolofleet data preview`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from yolofleet.cli.commands import QUIET, Command
from yolofleet.cli.data import DATA
from yolofleet.errors import ConfigError
from yolofleet.terminal import Progress
from yolofleet.text import echo, is_quiet


def preview(data: str, out: str, count: int, epoch: int, **options: Any) -> int:
    from yolofleet.config.load import resolve_train
    from yolofleet.datasets.check import lenient_index
    from yolofleet.datasets.sources import load_dataset
    from yolofleet.rank.inputs import write_preview

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
        index = lenient_index(load_dataset(data), "train", on_progress=progress.show)
    write_preview(config.value, recipe.value, index, file, count=count, epoch=epoch)
    echo(file)
    return 0


command = Command(
    "preview",
    params=[
        DATA,
        click.Option(["--recipe"], help="recipe name or file  [scratch-low]"),
        click.Option(["--set"], multiple=True, metavar="KEY=VALUE", help="change one value of the recipe"),
        click.Option(
            ["--out"], default="preview.jpg", metavar="FILE", help=".jpg or .png to write  [preview.jpg]"
        ),
        click.Option(["--count"], type=click.IntRange(1, 400), default=16, help="number of images  [16]"),
        click.Option(["--epoch"], type=click.IntRange(1), default=1, help="epoch to show, from 1  [1]"),
        click.Option(["--epochs"], type=click.IntRange(1), help="epochs of the run, for close_mosaic  [100]"),
        click.Option(["--seed"], type=click.IntRange(0), help="seed of the run  [0]"),
        click.Option(["--img"], type=click.IntRange(32, 8192), help="image size in training, pixels  [640]"),
        click.Option(["--batch"], type=click.IntRange(1), help="images per batch  [16]"),
        click.Option(["--micro-batch"], type=click.IntRange(1), help="images of one shape with --rect"),
        click.Option(
            ["--sampler"],
            type=click.Choice(["none", "weights", "balanced", "repeat-factor"]),
            help="how often an epoch shows each image  [none]",
        ),
        click.Option(["--fraction"], type=float, help="share of the training images to use  [1]"),
        click.Option(["--rect"], is_flag=True, help="rectangular images"),
        QUIET,
    ],
    callback=preview,
    help="Write a sheet of augmented training images of DATA with their boxes, as a training gets them.",
)
