"""`yolofleet data`: what is in a data set, what is wrong with it, and how to get one or give it another form."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from yolofleet.cli.commands import JSON, QUIET, option, verb
from yolofleet.data.datasets.built_in import built_in_names
from yolofleet.data.datasets.sources import load_dataset
from yolofleet.runs.report.screen_table import ScreenTable
from yolofleet.storage.atomic import emit_json, whole_folder, writing
from yolofleet.support.errors import ConfigError, YolofleetError
from yolofleet.support.terminal import Progress
from yolofleet.support.text import echo, is_quiet, screen_line, size_of, size_text

if TYPE_CHECKING:
    from yolofleet.data.datasets.check import DatasetCheck
    from yolofleet.data.datasets.stats import SplitFigures

NUMBERS = ("images", "labels", "background", "crowd", "problems", "small", "medium", "large", "median px")
COPIES_SHOWN = 20
SINGLE_CLS = option("--single-cls", "treat all classes as one", is_flag=True)


DATA = click.Argument(["data"])
SPLIT = click.Option(
    ["--split"],
    type=click.Choice(["all", "train", "val", "test"]),
    default="all",
    show_default=True,
    help="split to read",
)


@verb("list", help="List the data sets that --data accepts by name.")
def list_command() -> int:
    table = _table("name", "classes", "splits here", "comes from")
    table.add_row("shapes", "4", "generated", "shapes, or shapes:N for N training images")
    for name in built_in_names():
        try:
            spec = load_dataset(name)
            table.add_row(name, str(len(spec.names)), ", ".join(spec.splits), str(spec.root))
        except YolofleetError:
            table.add_row(name, "", "not here", f"yolofleet data download {name}")
    table.show()
    return 0


@verb(
    "make",
    click.Argument(["what"]),
    option("--out", "folder to create", required=True, metavar="FOLDER"),
    option("--images", "number of training images", type=click.IntRange(1), default=640),
    option("--val-images", "number of validation images", type=click.IntRange(1), default=128),
    option("--img", "side of the square images, pixels", type=click.IntRange(32, 4096), default=160),
    option("--seed", "seed of the random generator  [0]", type=click.IntRange(0), default=0),
    QUIET,
    help="Generate a data set: `data make shapes --out FOLDER`.",
)
def make_command(what: str, out: str, **sizes: int) -> int:
    if what != "shapes":
        raise ConfigError(f"{what} cannot be made", source="command line", hint="yolofleet data make shapes")
    folder = Path(out)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--out {out} is not an empty folder", source="command line", hint="--out another")
    from yolofleet.data.datasets.shapes import make_shapes

    with Progress(sys.stderr) as progress, writing(folder), whole_folder(folder) as made:
        make_shapes(made, **sizes, on_progress=partial(progress.show, "drawing", unit="images"))
    echo(folder / "data.yaml")
    return 0


@verb(
    "check",
    DATA,
    SPLIT,
    option("--limit", "problems to show for each split; 0 = all", type=click.IntRange(0), default=50),
    option("--decode", "also decode every image", is_flag=True),
    option("--duplicates", "also search for equal images", is_flag=True),
    SINGLE_CLS,
    JSON,
    QUIET,
    help="Read every label and image header of DATA and list the errors with file and line. The exit code is 3 if images or "
    "labels cannot be used, or (with --duplicates) if an image is in two splits.",
)
def check_command(
    data: str, split: str, limit: int, decode: bool, duplicates: bool, single_cls: bool, json_out: str
) -> int:
    from yolofleet.data.datasets.check import check_dataset, existing_splits

    spec = load_dataset(data)
    with Progress(sys.stderr) as progress:
        found = check_dataset(
            spec,
            existing_splits(spec, split),
            decode=decode,
            duplicates=duplicates,
            single_cls=single_cls,
            problems_kept=sys.maxsize if limit == 0 or json_out else limit,
            on_progress=progress.show,
        )
    if json_out:
        emit_json(found.to_json(), json_out, indent=2)
    if json_out != "-":
        _show_check(found, limit)
    problem = found.verdict(data)
    if problem is None:
        return 0
    echo(problem.render(), to=sys.stderr)
    return problem.exit_code


def _show_check(found: DatasetCheck, limit: int) -> None:
    """Print the problems, the notes, and a table with the totals of each split and the kinds of problems."""
    from yolofleet.data.datasets.labels import KINDS

    said = set[str]()  # splits may share files
    for index in found.indexes:
        problems = found.problems[index.split]
        shown = problems[: limit or len(problems)]
        for problem in shown:
            if str(problem) not in said:
                echo(str(problem))
        said.update(map(str, shown))
        reports = index.problem_count + len(problems) - len(index.problems)
        if reports > len(shown):
            echo(f"... and {reports - len(shown)} more in {index.split} (--limit 0 shows all)")
    for group in found.copies[: limit or len(found.copies)]:
        some = ", ".join(f"{screen_line(path)} ({split})" for split, path in group[:COPIES_SHOWN])
        echo(f"the same image {len(group)} times: {some}")
    if limit and len(found.copies) > limit:
        more = len(found.copies) - limit
        echo(f"... and {more} more images that are there several times (--limit 0 shows all)")
    for error in found.errors.values():
        echo(error.render())
    if is_quiet():
        return
    for note in found.notes:
        echo(note)
    if not found.indexes:
        return
    table = _table("", "done about it", *(index.split for index in found.indexes))
    totals = [found.totals(index) for index in found.indexes]
    for name in totals[0]:
        table.add_row(name, "", *(str(total[name]) for total in totals))
    for kind in KINDS:
        counts = [found.kinds[index.split][kind] for index in found.indexes]
        if any(counts):
            table.add_row(kind, KINDS[kind].action, *map(str, counts))
    table.show()
    if not found.errors and not any(found.problems.values()) and not found.copies and not found.leaks:
        echo("no problem found")


@verb(
    "stats",
    DATA,
    SPLIT,
    option("--img", "image size in training, pixels", type=click.IntRange(32, 8192), default=640),
    SINGLE_CLS,
    JSON,
    QUIET,
    help="Count the images, labels and box sizes of each class of DATA, and give advice for training.",
)
def stats_command(data: str, split: str, img: int, single_cls: bool, json_out: str) -> int:
    from yolofleet.data.datasets.check import existing_splits, lenient_index
    from yolofleet.data.datasets.stats import advice, figures, training_sizes
    from yolofleet.families.networks.anchors import preset_advice

    spec = load_dataset(data)
    results: dict[str, Any] = {}
    for name in existing_splits(spec, split):
        with Progress(sys.stderr) as progress:
            index = lenient_index(spec, name, on_progress=progress.show, single_cls=single_cls)
        found = figures(index, img)
        advised = [*advice(found), *preset_advice(training_sizes(index, img), img)]
        results[name] = {**asdict(found), "advice": advised}
        if json_out != "-":
            _show_figures(found, advised)
    emit_json({"data": spec.origin, "splits": results}, json_out, indent=2)
    return 0


def _show_figures(found: SplitFigures, advised: Sequence[str]) -> None:
    table = _table("class", "labels", "images", "small", "medium", "large", "median px")
    table.title = f"{found.split}: {found.images} images, {found.labels} labels"
    for row in found.classes:
        median = "{:.0f} x {:.0f}".format(*row.median_wh_px)
        numbers = (row.labels, row.images, row.small, row.medium, row.large)
        table.add_row(row.name, *map(str, numbers), median)
    if len(found.classes) > 1:
        numbers = (
            found.labels,
            found.images - found.images_without_labels,
            found.small,
            found.medium,
            found.large,
        )
        table.add_row("all", *map(str, numbers), "")
    table.show()
    (least_w, median_w, most_w), (least_h, median_h, most_h) = found.image_wh_px
    mean, median_count, many, most = found.labels_per_image
    low, middle, high = found.aspect
    frequent = ", ".join(f"{w} x {h} ({n})" for w, h, n in found.image_sizes[:3])
    for line in (
        f"sizes at --img {found.img_px}; small: below 32 x 32 px, large: 96 x 96 px or more",
        f"images       {median_w} x {median_h} px, from {least_w} x {least_h} to {most_w} x {most_h}; most: {frequent}",
        f"no labels    {found.images_without_labels} images"
        + (f"; {found.crowd} crowd regions are not counted" if found.crowd else ""),
        f"per image    {mean:g} labels; half have up to {median_count:g}, 95 % up to {many:g}, at most {most}",
        f"width/height {middle:g}; 90 % from {low:g} to {high:g}",
        *(f"- {line}" for line in advised),
        "",
    ):
        echo(line)


@verb(
    "convert",
    DATA,
    option("--to", "format to write", type=click.Choice(["yolo", "coco", "voc"]), required=True),
    option("--out", "folder to create; it must not exist", required=True, metavar="FOLDER"),
    option("--splits", "convert only these splits  [all]", multiple=True, metavar="A,B"),
    option("--names", "convert only these classes, in this order", multiple=True, metavar="A,B"),
    option(
        "--images",
        "hard links (copies if the disk does not support links), copies, symbolic links, or labels only",
        type=click.Choice(["link", "copy", "symlink", "none"]),
        default="link",
    ),
    option("--masks", "polygons instead of boxes, with --to yolo", is_flag=True),
    QUIET,
    help="Convert DATA to a new folder in YOLO, COCO or Pascal VOC format. yolofleet reads the result back and compares it "
    "with DATA before it creates FOLDER.",
)
def convert_command(
    data: str, to: Any, out: str, splits: tuple[str, ...], names: tuple[str, ...], images: Any, masks: bool
) -> int:
    from yolofleet.data.datasets.convert import convert as run

    spec = load_dataset(data)
    with Progress(sys.stderr) as progress:
        done = run(
            spec,
            Path(out),
            to,
            splits=_listed(splits),
            names=_listed(names),
            images=images,
            masks=masks,
            on_progress=progress.show,
        )
    if not is_quiet():
        for note in (*spec.notes, *done.notes):
            echo(note)
        table = _table("split", "images", "labels")
        for name, counts in done.splits.items():
            table.add_row(name, *map(str, counts))
        table.show()
    how = {"none": "no images", "symlink": "symbolic links", "copy": "copies", "link": "hard links"}[images]
    some = f", {done.copied} copies where links are not possible" if images == "link" and done.copied else ""
    echo(f"{done.folder / 'data.yaml'} ({how}{some})")
    return 0


@verb(
    "shard",
    DATA,
    option("--out", "folder or address (s3://, gs://, az://) to write", required=True, metavar="FOLDER"),
    option("--size", "of a tar file, about", default="256MiB", metavar="SIZE"),
    QUIET,
    help="Write the files of DATA into a few tar files and an index, which --data reads from a folder, a bucket or a web server.",
)
def shard_command(data: str, out: str, size: str) -> int:
    from yolofleet.data.datasets.pack import shard as run

    try:
        size_bytes = size_of(size)
    except ValueError as problem:
        raise ConfigError(f"--size {problem}", source="command line") from None
    with Progress(sys.stderr) as progress:
        files, shards = run(data, out, size_bytes, lambda done, total: progress.show("files", done, total))
    echo(f"{out}: {files} files in {shards} shards")
    return 0


@verb(
    "unshard",
    DATA,
    option("--out", "folder to create; it must not exist", required=True, metavar="FOLDER"),
    QUIET,
    help="Write the files of the shards DATA, or of any folder of a store, into a new folder of this machine.",
)
def unshard_command(data: str, out: str) -> int:
    from yolofleet.data.datasets.pack import unshard as run

    with Progress(sys.stderr) as progress:
        files = run(data, out, lambda done, total: progress.show("files", done, total))
    echo(f"{out}: {files} files")
    return 0


@verb(
    "index",
    DATA,
    QUIET,
    help="Write files.jsonl into the folder of DATA: the list of its files, which --data https://... needs for files without "
    "shards.",
)
def index_command(data: str) -> int:
    from yolofleet.data.datasets.pack import write_list

    with Progress(sys.stderr) as progress:
        path, files = write_list(data, lambda done, total: progress.show("files", done, total))
    echo(f"{path}: {files} files")
    return 0


def _listed(values: Sequence[str]) -> list[str]:
    """Split values at commas: ``a,b`` equals ``a`` ``b``."""
    return [item.strip() for value in values for item in value.split(",") if item.strip()]


@verb(
    "download",
    click.Argument(["name"], default=""),
    option("--out", "parent folder of the data set", default="datasets", metavar="FOLDER"),
    option("--parts", "download only these parts", multiple=True, metavar="A,B"),
    option("--keep-archives", "keep the archives after unpacking", is_flag=True),
    QUIET,
    help="Download and verify the public data set NAME. Without NAME, list the data sets.",
)
def download_command(name: str, out: str, parts: tuple[str, ...], keep_archives: bool) -> int:
    from yolofleet.data.datasets.catalogue import datasets
    from yolofleet.data.datasets.download import download_dataset

    if not name:
        table = _table("name", "size", "parts", "licence", "from")
        for known in datasets():
            size = known.size_bytes()
            shown = "" if size is None else size_text(size)
            table.add_row(known.name, shown, ", ".join(known.part_names), known.licence, known.origin)
        table.show()
        return 0
    echo(download_dataset(name, Path(out), parts=_listed(parts), keep_archives=keep_archives))
    return 0


def _table(*columns: str) -> ScreenTable:
    return ScreenTable(*columns, numbers=NUMBERS)
