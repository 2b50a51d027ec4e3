"""`yolofleet data`: what is in a data set and what is wrong with it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from yolofleet.cli.commands import Command
from yolofleet.errors import ConfigError, DataError, StorageError, YolofleetError

if TYPE_CHECKING:
    from rich.table import Table

    from yolofleet.data.index import DataIndex
    from yolofleet.data.sources import DatasetSpec

LOSSES = ("dropped", "image left out")  # what was done about a problem that costs labels or images
SMALL_PX2, MEDIUM_PX2 = 32**2, 96**2  # COCO's borders of object area


def show_built_in() -> int:
    """Names that --data knows, and whether their images are here."""
    from yolofleet.data.sources import load_dataset

    table = _table("name", "classes", "splits here", "comes from")
    table.add_row("shapes", "4", "generated", "shapes, or shapes:N for N training images")
    folder = Path(__file__).resolve().parent.parent / "config" / "datasets"
    for file in sorted(folder.glob("*.yaml")):
        try:
            spec = load_dataset(file.stem)
            table.add_row(file.stem, str(len(spec.names)), ", ".join(spec.splits), str(spec.root))
        except YolofleetError:
            first_line = file.read_text(encoding="utf-8").splitlines()[0]
            table.add_row(file.stem, "", "not here", first_line.lstrip("# "))
    _print(table)
    return 0


def make(what: str, out: str, **sizes: int) -> int:
    if what != "shapes":
        raise ConfigError(f"{what} cannot be made", source="command line", hint="yolofleet data make shapes")
    folder = Path(out)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--out {out} is not an empty folder", source="command line", hint="--out another")
    from yolofleet.data.shapes import make_shapes

    try:
        click.echo(make_shapes(folder, **sizes))
    except OSError as problem:
        raise StorageError(f"{folder} cannot be written: {problem.strerror}") from None
    return 0


def check(data: str, split: str, limit: int) -> int:
    """Exit code 3 when images or labels are lost."""
    spec = _load(data)
    table = _table("split", "images", "labels", "background", "problems")
    problems: list[str] = []
    is_bad = False
    for name in _splits(spec, split):
        try:
            index = _index(spec, name)
        except DataError as error:
            is_bad = True
            table.add_row(name, "", "", "", error.what.splitlines()[0])
            problems.append(error.render())
            continue
        counts = (len(index), int(index.class_counts().sum()), index.unlabelled, index.problem_count)
        table.add_row(name, *map(str, counts))
        problems += [str(problem) for problem in index.problems[:limit]]
        if index.problem_count > limit:
            problems.append(f"... and {index.problem_count - limit} more in {name}")
        is_bad |= any(problem.action in LOSSES for problem in index.problems)
    for note in (*spec.notes, *problems):
        click.echo(note)
    _print(table)
    if is_bad:
        lost = DataError(
            f"{data} loses images or labels, as said above",
            hint="correct these files; a training that is started all the same leaves out what is dropped",
        )
        print(lost.render(), file=sys.stderr)
    return DataError.exit_code if is_bad else 0


def stats(data: str, split: str) -> int:
    spec = _load(data)
    for name in _splits(spec, split):
        _print(_class_table(_index(spec, name)))
    return 0


def _class_table(index: DataIndex) -> Table:
    import numpy as np

    owner = np.repeat(np.arange(len(index)), np.diff(index.offsets))  # int64 [M], image of each label
    sizes = index.sizes_wh[owner] * index.boxes_cxcywh_unit[:, 2:]  # float [M, 2] pixels
    table = _table("class", "labels", "images", "small", "medium", "large", "median px")
    width, height = np.median(index.sizes_wh, axis=0)
    counts = np.diff(index.offsets)
    table.title = f"{index.split}: {len(index)} images, median {width:.0f} x {height:.0f} px"
    table.caption = (
        f"{index.classes.size} labels, at most {counts.max(initial=0)} in an image; {int((counts == 0).sum())} images "
        "have none; small: below 32 x 32 px, large: 96 x 96 px or more, in the image's own pixels"
    )
    for number, name in enumerate(index.names):
        mine = (index.classes == number) & ~index.crowd
        area = index.area_px[mine]
        small, large = int((area < SMALL_PX2).sum()), int((area >= MEDIUM_PX2).sum())
        w, h = np.median(sizes[mine], axis=0) if mine.any() else (0, 0)
        row = (int(mine.sum()), len(np.unique(owner[mine])), small, len(area) - small - large, large)
        table.add_row(name, *map(str, row), f"{w:.0f} x {h:.0f}")
    return table


def _load(data: str) -> DatasetSpec:
    from yolofleet.data.sources import load_dataset

    return load_dataset(data)


def _splits(spec: DatasetSpec, asked: str) -> list[str]:
    if asked != "all":
        return [asked]
    return [name for name in ("train", "val", "test") if name in spec.splits or name in spec.missing]


def _index(spec: DatasetSpec, split: str) -> DataIndex:
    from yolofleet.data.index import build_index

    if not sys.stderr.isatty():
        return build_index(spec, split, strict=False)
    from rich.progress import Progress

    with Progress(transient=True) as bar:
        task = bar.add_task(split, total=None)
        return build_index(
            spec,
            split,
            strict=False,
            on_progress=lambda done, total: bar.update(task, completed=done, total=total),
        )


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, caption_justify="left")
    for column in columns:
        right = column in ("images", "labels", "background", "small", "medium", "large", "median px")
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    return table


def _print(table: Table) -> None:
    from rich.console import Console

    Console(markup=False).print(table)


DATA = click.Argument(["data"])
SPLIT = click.Option(["--split"], type=click.Choice(["all", "train", "val", "test"]), default="all")

list_command = Command("list", callback=show_built_in, help="List the data sets that --data knows by name.")
make_command = Command(
    "make",
    params=[
        click.Argument(["what"]),
        click.Option(["--out"], required=True, metavar="FOLDER", help="where to write it"),
        click.Option(["--images"], type=click.IntRange(1), default=640, help="training images  [640]"),
        click.Option(["--val-images"], type=click.IntRange(1), default=128, help="validation images  [128]"),
        click.Option(
            ["--img"], type=click.IntRange(32, 4096), default=160, help="side of an image, pixels  [160]"
        ),
        click.Option(["--seed"], type=click.IntRange(0), default=0, help="another set of the same kind  [0]"),
    ],
    callback=make,
    help="Generate a data set: `data make shapes --out FOLDER`.",
)
check_command = Command(
    "check",
    params=[
        DATA,
        SPLIT,
        click.Option(
            ["--limit"], type=click.IntRange(0), default=50, help="problems shown of each split  [50]"
        ),
    ],
    callback=check,
    help="Read every label and image header of DATA and say what is wrong, with file and line; exit code 3 if "
    "images or labels are lost.",
)
stats_command = Command(
    "stats",
    params=[DATA, SPLIT],
    callback=stats,
    help="Count images, labels and sizes of each class of DATA.",
)
