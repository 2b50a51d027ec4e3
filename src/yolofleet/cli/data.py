"""`yolofleet data`: check, count, preview, convert, download and generate data sets."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from yolofleet.cli.commands import JSON, QUIET, Command
from yolofleet.errors import ConfigError, DataError, YolofleetError
from yolofleet.text import echo, is_quiet

if TYPE_CHECKING:
    from yolofleet.datasets.index import DataIndex
    from yolofleet.datasets.labels import Problem
    from yolofleet.datasets.spec import DatasetSpec
    from yolofleet.datasets.stats import SplitFigures
    from yolofleet.report.console import ScreenTable

NUMBERS = ("images", "labels", "background", "crowd", "problems", "small", "medium", "large", "median px")
ANCHOR_LABELS = 100_000  # a sample is enough to say how anchors fit
ANCHOR_RATIO = 4.0  # largest side ratio of a match, YOLOv5's anchor_t
COPIES_SHOWN = 20


def show_built_in() -> int:
    """Print the built-in data sets and whether their images are on this machine."""
    from yolofleet.datasets.sources import load_dataset

    table = _table("name", "classes", "splits here", "comes from")
    table.add_row("shapes", "4", "generated", "shapes, or shapes:N for N training images")
    folder = Path(__file__).resolve().parent.parent / "config" / "datasets"
    for file in sorted(folder.glob("*.yaml")):
        try:
            spec = load_dataset(file.stem)
            table.add_row(file.stem, str(len(spec.names)), ", ".join(spec.splits), str(spec.root))
        except YolofleetError:
            table.add_row(file.stem, "", "not here", f"yolofleet data download {file.stem}")
    table.show()
    return 0


def make(what: str, out: str, **sizes: int) -> int:
    if what != "shapes":
        raise ConfigError(f"{what} cannot be made", source="command line", hint="yolofleet data make shapes")
    folder = Path(out)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--out {out} is not an empty folder", source="command line", hint="--out another")
    from yolofleet.datasets.shapes import make_shapes
    from yolofleet.files.atomic import storage_error, whole_folder

    try:
        with whole_folder(folder) as made:
            make_shapes(made, **sizes)
    except OSError as problem:
        raise storage_error(problem, folder) from None
    echo(folder / "data.yaml")
    return 0


# check


def check(data: str, split: str, limit: int, decode: bool, duplicates: bool, json_out: str) -> int:
    """Check a data set. Return 3 if images or labels are lost, or an image is in two splits."""
    spec = _load(data)
    kept = sys.maxsize if limit == 0 or json_out else limit
    indexes: list[DataIndex] = []
    errors: dict[str, DataError] = {}
    problems: dict[str, list[Problem]] = {}
    kinds: dict[str, Counter[str]] = {}
    for name in _splits(spec, split):
        try:
            index = _index(spec, name, problems_kept=kept)
        except DataError as error:
            errors[name] = error
            continue
        indexes.append(index)
        problems[name], kinds[name] = list(index.problems), Counter(index.problem_kinds)
        if decode:
            found = [problem.below(spec.root) for problem in _decoded(index)]
            problems[name] += found
            kinds[name].update(problem.kind for problem in found)
    copies = _copies(spec, indexes) if duplicates else []
    for group in copies:
        kind = "image-in-two-splits" if len({name for name, _ in group}) > 1 else "image-copy"
        for name in {name for name, _ in group}:
            kinds[name][kind] += 1

    notes = [*spec.notes, *_notes(indexes, kinds)]
    if json_out:
        _write_json(_check_as_json(spec, indexes, errors, problems, kinds, copies, notes), json_out)
    if json_out != "-":
        _show_check(indexes, errors, problems, kinds, copies, notes, limit)
    from yolofleet.datasets.labels import KINDS, LOSSES, REFUSED

    lost = {kind for counts in kinds.values() for kind in counts if KINDS[kind] in LOSSES}
    if errors or lost or any("image-in-two-splits" in counts for counts in kinds.values()):
        what = "loses images or labels" if errors or lost else "has the same images in several splits"
        told = DataError(
            f"{data} {what}; the problems are listed above",
            hint="correct these files; train refuses this data set"
            if errors or any(KINDS[kind] == REFUSED for kind in lost)
            else "correct these files; a training leaves out what is dropped"
            if lost
            else "keep each image in one split only: accuracy on training images says nothing",
        )
        echo(told.render(), to=sys.stderr)
        return DataError.exit_code
    return 0


def _decoded(index: DataIndex) -> list[Problem]:
    from yolofleet.datasets.audit import decode_all

    with _progress(f"decoding {index.split}") as told:
        return decode_all(index, on_progress=told)


def _copies(spec: DatasetSpec, indexes: Sequence[DataIndex]) -> list[list[tuple[str, str]]]:
    """Return groups of equal images; skip a split with the same files as an earlier one."""
    from yolofleet.datasets.audit import same_images

    distinct = [
        index
        for at, index in enumerate(indexes)
        if not any(spec.splits[index.split] == spec.splits[other.split] for other in indexes[:at])
    ]
    with _progress("comparing images") as told:
        return same_images(distinct, on_progress=told)


def _notes(indexes: Sequence[DataIndex], kinds: dict[str, Counter[str]]) -> list[str]:
    """Return notes: image sizes, classes without labels, and class numbers that seem to start at 1."""
    notes = []
    for index in indexes:
        (width, height), (most_width, most_height) = index.sizes_wh.min(0), index.sizes_wh.max(0)
        sizes = f"{index.split}: images from {width} x {height} to {most_width} x {most_height} px"
        empty = [name for name, count in zip(index.names, index.class_counts(), strict=True) if not count]
        few = f"; {len(empty)} of {len(index.names)} classes have no label: " if empty else ""
        more = ", ..." if len(empty) > 8 else ""
        notes.append(sizes + few + ", ".join(empty[:8]) + more)
    if (
        indexes
        and not sum(index.class_counts()[0] for index in indexes)
        and any(k["wrong-class"] for k in kinds.values())
    ):
        notes.append(
            "no label is of class 0, and some are of a class that names does not have: are they numbered from 1?"
        )
    return notes


def _show_check(
    indexes: Sequence[DataIndex],
    errors: dict[str, DataError],
    problems: dict[str, list[Problem]],
    kinds: dict[str, Counter[str]],
    copies: list[list[tuple[str, str]]],
    notes: Sequence[str],
    limit: int,
) -> None:
    from yolofleet.datasets.labels import KINDS

    table = _table("split", "images", "labels", "background", "problems")
    for index in indexes:
        found = problems[index.split]
        shown = found[: limit or len(found)]
        for problem in shown:
            echo(str(problem))
        reports = index.problem_count + len(found) - len(index.problems)
        if reports > len(shown):
            echo(f"... and {reports - len(shown)} more in {index.split} (--limit 0 shows all)")
        total = sum(kinds[index.split].values())
        counts = (len(index), int(index.class_counts().sum()), index.background, total)
        table.add_row(index.split, *map(str, counts))
    for group in copies[: limit or len(copies)]:
        some = ", ".join(f"{path} ({split})" for split, path in group[:COPIES_SHOWN])
        echo(f"the same image {len(group)} times: {some}")
    if limit and len(copies) > limit:
        echo(f"... and {len(copies) - limit} more images that are there several times (--limit 0 shows all)")
    for name, error in errors.items():
        echo(error.render())
        table.add_row(name, "", "", "", error.what.splitlines()[0])
    if is_quiet():
        return
    for note in notes:
        echo(note)
    table.show()
    if any(kinds.values()):
        summary = _table("kind of problem", "done about it", *kinds)
        for kind in KINDS:
            if any(counts[kind] for counts in kinds.values()):
                summary.add_row(kind, KINDS[kind], *(str(counts[kind]) for counts in kinds.values()))
        summary.show()


def _check_as_json(
    spec: DatasetSpec,
    indexes: Sequence[DataIndex],
    errors: dict[str, DataError],
    problems: dict[str, list[Problem]],
    kinds: dict[str, Counter[str]],
    copies: list[list[tuple[str, str]]],
    notes: Sequence[str],
) -> dict[str, Any]:
    splits = {
        index.split: {
            "images": len(index),
            "labels": int(index.class_counts().sum()),
            "background": index.background,
            "crowd": int(index.crowd.sum()),
            "labels_of_class": dict(zip(index.names, index.class_counts().tolist(), strict=True)),
            "kinds": dict(kinds[index.split]),
            "problems": [{**asdict(p), "action": p.action} for p in problems[index.split]],
        }
        for index in indexes
    }
    return {
        "data": spec.origin,
        "names": list(spec.names),
        "splits": splits,
        "unusable": {
            name: {"what": e.what, "source": e.source, "hint": e.hint} for name, e in errors.items()
        },
        "same_images": [[{"split": split, "path": path} for split, path in group] for group in copies],
        "notes": list(notes),
    }


# stats


def stats(data: str, split: str, img: int, json_out: str) -> int:
    from yolofleet.datasets.stats import advice, figures

    spec = _load(data)
    results: dict[str, Any] = {}
    for name in _splits(spec, split):
        index = _index(spec, name)
        found = figures(index, img)
        told = [*advice(found), *_anchor_advice(index, img)]
        results[name] = {**asdict(found), "advice": told}
        if json_out != "-":
            _show_figures(found, told)
    if json_out:
        _write_json({"data": spec.origin, "splits": results}, json_out)
    return 0


def _anchor_advice(index: DataIndex, img: int) -> list[str]:
    import numpy as np

    from yolofleet.datasets.stats import learned, scales
    from yolofleet.models.anchors import GOOD_ENOUGH, anchor_fit
    from yolofleet.models.rows import P5_ANCHORS

    owner, _, sizes_px = learned(index)
    if not len(owner):
        return []
    sizes_px = sizes_px * scales(index, img)[owner, None]
    sample = sizes_px[:: max(1, len(sizes_px) // ANCHOR_LABELS)]
    recall, per_label = anchor_fit(sample, np.array(P5_ANCHORS, float).reshape(-1, 2), ANCHOR_RATIO)
    text = (
        f"YOLOv5's anchors can match {recall:.1%} of the labels at --img {img}, {per_label:.1f} anchors each"
    )
    return [
        text if recall >= GOOD_ENOUGH else f"{text}: too few; another --img, or other anchors in a --cfg file"
    ]


def _show_figures(found: SplitFigures, told: Sequence[str]) -> None:
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
        *(f"- {line}" for line in told),
        "",
    ):
        echo(line)


# preview


def preview(data: str, out: str, count: int, epoch: int, **given: Any) -> int:
    from yolofleet.config.load import resolve_train
    from yolofleet.rank.training_data import write_preview

    file = Path(out)
    if file.suffix.lower() not in (".png", ".jpg", ".jpeg"):
        raise ConfigError(
            f"--out {out} is not a .png or .jpg file", source="command line", hint="--out preview.jpg"
        )
    chosen = {name: value for name, value in given.items() if value is not None}
    # a model decides nothing here but its family's default recipe
    config, recipe = resolve_train({**chosen, "data": data, "model": "yolov5n"})
    if not is_quiet():
        for note in (*config.notes, *recipe.notes):
            echo(note)
    if config.value.sampler == "weights" and not is_quiet():
        echo("--sampler weights: each image once, as before the first validation")
    write_preview(config.value, recipe.value, _index(_load(data), "train"), file, count=count, epoch=epoch)
    echo(file)
    return 0


# convert, download


def convert(
    data: str, to: Any, out: str, splits: tuple[str, ...], names: tuple[str, ...], images: Any
) -> int:
    from yolofleet.datasets.convert import convert as run

    spec = _load(data)
    with _told() as told:
        done = run(
            spec, Path(out), to, splits=_listed(splits), names=_listed(names), images=images, on_progress=told
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


def _listed(values: Sequence[str]) -> list[str]:
    """Split values at commas: ``a,b`` equals ``a`` ``b``."""
    return [item.strip() for value in values for item in value.split(",") if item.strip()]


def download(name: str, out: str, parts: tuple[str, ...], keep_archives: bool) -> int:
    from yolofleet.datasets.catalogue import datasets
    from yolofleet.datasets.download import download_dataset
    from yolofleet.text import echo, size_text

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


# what the verbs share


def _load(data: str) -> DatasetSpec:
    from yolofleet.datasets.sources import load_dataset

    return load_dataset(data)


def _splits(spec: DatasetSpec, asked: str) -> list[str]:
    if asked != "all":
        return [asked]
    return [name for name in ("train", "val", "test") if name in spec.splits or name in spec.missing]


def _index(spec: DatasetSpec, split: str, problems_kept: int = 0) -> DataIndex:
    from yolofleet.datasets.index import build_index
    from yolofleet.datasets.labels import MAX_PROBLEMS_KEPT

    problems_kept = max(problems_kept, MAX_PROBLEMS_KEPT)  # training reuses the stored index
    with _progress(f"reading {split}") as told:
        return build_index(spec, split, strict=False, problems_kept=problems_kept, on_progress=told)


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show progress: a bar on a terminal, occasional lines elsewhere."""
    with _told() as told:
        yield lambda done, total: told(what, done, total)


@contextmanager
def _told() -> Iterator[Callable[[str, int, int], None]]:
    """Show progress of work with several stages."""
    from yolofleet.terminal import Progress

    with Progress(sys.stderr) as progress:
        yield progress.show


def _write_json(value: Any, json_out: str) -> None:
    from yolofleet.files.atomic import emit_json

    emit_json(value, json_out, indent=2)


def _table(*columns: str) -> ScreenTable:
    from yolofleet.report.console import ScreenTable

    return ScreenTable(*columns, numbers=NUMBERS)


DATA = click.Argument(["data"])
SPLIT = click.Option(
    ["--split"],
    type=click.Choice(["all", "train", "val", "test"]),
    default="all",
    show_default=True,
    help="split to read",
)
list_command = Command("list", callback=show_built_in, help="List the data sets that --data accepts by name.")
make_command = Command(
    "make",
    params=[
        click.Argument(["what"]),
        click.Option(["--out"], required=True, metavar="FOLDER", help="folder to create"),
        click.Option(
            ["--images"], type=click.IntRange(1), default=640, help="number of training images  [640]"
        ),
        click.Option(
            ["--val-images"], type=click.IntRange(1), default=128, help="number of validation images  [128]"
        ),
        click.Option(
            ["--img"],
            type=click.IntRange(32, 4096),
            default=160,
            help="side of the square images, pixels  [160]",
        ),
        click.Option(["--seed"], type=click.IntRange(0), default=0, help="seed of the random generator  [0]"),
        QUIET,
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
            ["--limit"],
            type=click.IntRange(0),
            default=50,
            help="problems to show for each split; 0 = all  [50]",
        ),
        click.Option(["--decode"], is_flag=True, help="also decode every image"),
        click.Option(["--duplicates"], is_flag=True, help="also search for equal images"),
        JSON,
        QUIET,
    ],
    callback=check,
    help="Read every label and image header of DATA and list the errors with file and line. The exit code is 3 if images or "
    "labels cannot be used, or (with --duplicates) if an image is in two splits.",
)
stats_command = Command(
    "stats",
    params=[
        DATA,
        SPLIT,
        click.Option(
            ["--img"],
            type=click.IntRange(32, 8192),
            default=640,
            help="image size in training, pixels  [640]",
        ),
        JSON,
        QUIET,
    ],
    callback=stats,
    help="Count the images, labels and box sizes of each class of DATA, and give advice for training.",
)
preview_command = Command(
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
convert_command = Command(
    "convert",
    params=[
        DATA,
        click.Option(
            ["--to"], type=click.Choice(["yolo", "coco", "voc"]), required=True, help="format to write"
        ),
        click.Option(["--out"], required=True, metavar="FOLDER", help="folder to create; it must not exist"),
        click.Option(["--splits"], multiple=True, metavar="A,B", help="convert only these splits  [all]"),
        click.Option(
            ["--names"],
            multiple=True,
            metavar="A,B",
            help="convert only these classes, in this order; CrowdHuman has person, visible, head",
        ),
        click.Option(
            ["--images"],
            type=click.Choice(["link", "copy", "symlink", "none"]),
            default="link",
            help="hard links (copies if the disk does not support links), copies, symbolic links, or labels only  [link]",
        ),
        QUIET,
    ],
    callback=convert,
    help="Convert DATA to a new folder in YOLO, COCO or Pascal VOC format. yolofleet reads the result back and compares it "
    "with DATA before it creates FOLDER.",
)
download_command = Command(
    "download",
    params=[
        click.Argument(["name"], default=""),
        click.Option(
            ["--out"], default="datasets", metavar="FOLDER", help="parent folder of the data set  [datasets]"
        ),
        click.Option(["--parts"], multiple=True, metavar="A,B", help="download only these parts"),
        click.Option(["--keep-archives"], is_flag=True, help="keep the archives after unpacking"),
        QUIET,
    ],
    callback=download,
    help="Download and verify the public data set NAME. Without NAME, list the data sets.",
)
