"""Every kind of problem in every format: the reader reports it, does with it what ``KINDS`` says, and counts it."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import coco_files
import numpy as np
import pytest
from label_rows import index_of
from small_data import encoded, picture, voc_object, with_exif_jpeg, write_picture

from yolofleet.data.datasets.check import check_dataset
from yolofleet.data.datasets.labels import ASSUMED, KINDS
from yolofleet.data.datasets.sources import load_dataset
from yolofleet.support.errors import DataError

NAMES = ("cat", "dog")
WIDTH, HEIGHT = 64, 48
PAGE = Path(__file__).resolve().parents[3] / "docs" / "data.md"


@dataclass(frozen=True)
class Box:
    """A label; centre and size in fractions of the stated size, or raw numbers of a text."""

    name: str = "cat"
    at: tuple[float, float, float, float] = (0.5, 0.5, 0.25, 0.25)
    crowd: bool = False

    def corners_px(self, size_wh: tuple[int, int]) -> tuple[float, ...]:
        (x, y, w, h), (width, height) = self.at, size_wh
        return (x - w / 2) * width, (y - h / 2) * height, (x + w / 2) * width, (y + h / 2) * height


@dataclass
class Image:
    """An image of a set and its labels.

    Attributes:
        stated_wh: the size that the labels state, if the format states one.
        listed_as: other names under which lists and annotations name it again.
    """

    name: str
    boxes: Sequence[Box] = (Box(), Box("dog", (0.3, 0.4, 0.2, 0.2)))
    stated_wh: tuple[int, int] = (WIDTH, HEIGHT)
    listed_as: Sequence[str] = ()


def images() -> list[Image]:
    return [Image(f"{name}.jpg") for name in "abcdef"]


class Format:
    """Writes a data set and says where its parts are."""

    labels = "labels/train/{}.txt"  # of an image without its suffix
    image_folder = "images/train"

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, content: Sequence[Image]) -> Path:
        for number, image in enumerate(content):
            write_picture(self.root / self.image_folder / image.name, WIDTH, HEIGHT, seed=number)
        return self.describe(content)

    def describe(self, content: Sequence[Image]) -> Path:
        raise NotImplementedError

    def image_file(self, stem: str) -> Path:
        return self.root / self.image_folder / f"{stem}.jpg"

    def label_file(self, stem: str) -> Path:
        return self.root / self.labels.format(stem)

    def yaml(self, train: str) -> Path:
        path = self.root / "data.yaml"
        path.write_text(f"train: {train}\nval: {train}\nnames: {list(NAMES)}\n")
        return path


class Yolo(Format):
    def describe(self, content: Sequence[Image]) -> Path:
        for image in content:
            path = self.label_file(Path(image.name).stem)
            path.parent.mkdir(parents=True, exist_ok=True)
            numbers = ((NAMES.index(b.name) if b.name in NAMES else 9, *b.at) for b in image.boxes)
            path.write_text("".join(" ".join(map(str, row)) + "\n" for row in numbers))
        return self.yaml(self.image_folder)


class YoloList(Yolo):
    def describe(self, content: Sequence[Image]) -> Path:
        super().describe(content)
        names = [name for image in content for name in (image.name, *image.listed_as)]
        (self.root / "train.txt").write_text("".join(f"./images/train/{name}\n" for name in names))
        return self.yaml("train.txt")


class Coco(Format):
    image_folder = "images"

    def describe(self, content: Sequence[Image]) -> Path:
        listed = [(image, name) for image in content for name in (image.name, *image.listed_as)]
        pictures: list[dict[str, Any]] = []
        labels: list[dict[str, Any]] = []
        for number, (image, name) in enumerate(listed):
            pictures.append(coco_files.image(number, name, *image.stated_wh))
            for box in image.boxes:
                x1, y1, x2, y2 = box.corners_px(image.stated_wh)
                bbox, category = [x1, y1, x2 - x1, y2 - y1], 1 + NAMES.index(box.name)
                labels.append(
                    coco_files.label(len(labels) + 1, number, bbox, category, iscrowd=int(box.crowd))
                )
        return coco_files.write_coco(self.root / "train.json", pictures, labels, enumerate(NAMES, 1))


class Voc(Format):
    image_folder, labels = "JPEGImages", "Annotations/{}.xml"

    def describe(self, content: Sequence[Image]) -> Path:
        for image in content:
            objects = ""
            for box in image.boxes:
                x1, y1, x2, y2 = box.corners_px(image.stated_wh)
                difficult = f"<difficult>{int(box.crowd)}</difficult>"
                objects += voc_object(box.name, (x1 + 1, y1 + 1, x2, y2), difficult)
            width, height = image.stated_wh
            size = f"<size><width>{width}</width><height>{height}</height><depth>3</depth></size>"
            path = self.label_file(Path(image.name).stem)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"<annotation><filename>{image.name}</filename>{size}{objects}</annotation>")
        listing = self.root / "ImageSets/Main/train.txt"
        listing.parent.mkdir(parents=True, exist_ok=True)
        names = [name for image in content for name in (image.name, *image.listed_as)]
        listing.write_text("".join(f"{Path(name).stem}\n" for name in names))
        return self.yaml(".")


class Labelme(Format):
    labels = "images/train/{}.json"

    def describe(self, content: Sequence[Image]) -> Path:
        for image in content:
            shapes = []
            for box in image.boxes:
                x1, y1, x2, y2 = box.corners_px(image.stated_wh)
                shape = {"label": box.name, "shape_type": "rectangle", "points": [[x1, y1], [x2, y2]]}
                shapes.append(shape | {"difficult": box.crowd})
            width, height = image.stated_wh
            about = {"imagePath": image.name, "imageWidth": width, "imageHeight": height, "shapes": shapes}
            self.label_file(Path(image.name).stem).write_text(json.dumps(about))
        return self.yaml(self.image_folder)


# A new format also goes into the groups below (OF_PIXELS or OF_ROWS, OF_FOLDERS, ..._ONLY) and gets its damage in the rows
# "label-unreadable" and "name-assumed", or a reason in their ``but_not``. One file for all labels: also ``rewritten``,
# ``numbers_of_another_meaning`` and what skips "coco". No crowd: the test of crowds. No stated size: ``NO_SIZE``.
FORMATS: dict[str, type[Format]] = {
    "yolo": Yolo,
    "list": YoloList,
    "coco": Coco,
    "voc": Voc,
    "labelme": Labelme,
}


Damage = Callable[[Format], object]


@dataclass(frozen=True)
class Row:
    """A problem, and in which formats it cannot occur.

    Attributes:
        spoil: changes the images before they are written. damage: changes the files after that.
        counts: labels or images that it concerns.
        but_not: formats without this problem, with the reason.
        also: by format, other problems that come with it.
        totals: what ``DataIndex.totals`` counts.
    """

    spoil: Callable[[list[Image]], None] = lambda content: None
    damage: Damage = lambda made: None
    counts: int = 1
    but_not: dict[str, str] = field(default_factory=dict)
    also: dict[str, dict[str, int]] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=dict)


def first_box(**change: object) -> Callable[[list[Image]], None]:
    """Change the first label of the third image."""

    def spoil(content: list[Image]) -> None:
        content[2].boxes = [replace(content[2].boxes[0], **change), *content[2].boxes[1:]]  # type: ignore[arg-type]

    return spoil


def again(content: list[Image]) -> None:
    content[2].boxes = [*content[2].boxes, content[2].boxes[0]]


def stated(width: int, height: int) -> Callable[[list[Image]], None]:
    def spoil(content: list[Image]) -> None:
        content[2].stated_wh = (width, height)

    return spoil


def listed_twice(content: list[Image]) -> None:
    content[2].listed_as = ["./c.jpg"]


def image_of(content: bytes) -> Damage:
    """Replace the third image."""
    return lambda made: made.image_file("c").write_bytes(content)


def rewritten(old: str, changed: str) -> Damage:
    """Change the text that holds the labels of the third image."""

    def damage(made: Format) -> None:
        path = made.root / "train.json" if isinstance(made, Coco) else made.label_file("c")
        text = path.read_text()
        assert re.search(old, text), text
        path.write_text(re.sub(old, changed, text, count=1))

    return damage


def text_in(by_format: dict[type[Format], tuple[str, str]]) -> Damage:
    def damage(made: Format) -> None:
        rewritten(*next(change for form, change in by_format.items() if isinstance(made, form)))(made)

    return damage


PIXELS = picture(WIDTH, HEIGHT)
SIXTEEN_BITS = encoded(PIXELS.astype(np.uint16) << 8, ".png")
ROTATED_IMAGE = with_exif_jpeg(encoded(PIXELS), 6)
FOURTH_CHANNEL = encoded(np.dstack([PIXELS, np.full((HEIGHT, WIDTH, 1), 255, np.uint8)]), ".tif")


OF_ROWS, OF_PIXELS = ("yolo", "list"), ("coco", "voc", "labelme")
NO_IMAGE, NO_LABEL = {"images left out": 1}, {"labels left out": 1}
NO_LIST = "the images are those of the folder"
ONE_FILE = "all labels are in one file"
OWN = "an annotation, object or shape is a label of its own"
OF_FOLDERS = dict.fromkeys(("yolo", "labelme"), NO_LIST)
NO_SIZE = dict.fromkeys(OF_ROWS, "labels are fractions")
YOLO_ONLY = dict.fromkeys(OF_PIXELS, "rows of numbers are YOLO's")
COCO_ONLY = dict.fromkeys(("yolo", "list", "voc", "labelme"), "the format has no such field")
LABELME_ONLY = dict.fromkeys(("yolo", "list", "coco", "voc"), "shapes are labelme's")
# of data check alone, and of an index with masks (test_mask_labels.py)
AUDIT = {
    "image-undecodable",
    "image-damaged",
    "image-dark",
    "image-in-two-splits",
    "image-copy",
    "mask-unreadable",
}


def numbers_of_another_meaning(made: Format) -> None:
    """Write corners in COCO for sides, and fractions for the pixels of the third image's labels in other formats."""
    if isinstance(made, Coco):
        path = made.root / "train.json"
        content = json.loads(path.read_text())
        for entry in content["annotations"]:
            x, y, width, height = entry["bbox"]
            entry |= {"bbox": [x, y, x + width, y + height], "area": width * height}
        path.write_text(json.dumps(content))
        return
    path, sides = made.label_file("c"), {"x": WIDTH, "y": HEIGHT}
    text = path.read_text()
    if isinstance(made, Voc):
        # the format counts pixels from 1
        text = re.sub(r"<([xy])(min|max)>([^<]*)", lambda m: f"<{m[1]}{m[2]}>{(float(m[3]) - (m[2] == 'min')) / sides[m[1]]}", text)  # fmt: skip
    else:
        content = json.loads(text)
        for shape in content["shapes"]:
            shape["points"] = [[x / WIDTH, y / HEIGHT] for x, y in shape["points"]]
        text = json.dumps(content)
    path.write_text(text)


ROTATED = "<robndbox><cx>32</cx><cy>24</cy><w>12</w><h>16</h><angle>1.5707963</angle></robndbox>"
POSE = "0 0.5 0.5 0.2 0.1 0.45 0.5 2 0.55 0.5 1 0.5 0.48 0\\n"
# of a rotated box, the only polygon
CORNERS = text_in({Yolo: ("0 [^\\n]*\\n", "0 0.4 0.5 0.5 0.4 0.6 0.5 0.5 0.6\\n")})
PART = '{"label": "cat", "group_id": 1, "shape_type": "polygon", "points": [[1, 1], [9, 1], [9, 9]]}'
PAINTED = (
    f'"attributes": {{"occluded": false}}, "segmentation": {{"size": [48, 64], "counts": [0, {48 * 64}]}}'
)
BOXED, MAYBE = {"corners-boxed": 1}, {"polygons-or-poses": 1}
ROWS: dict[str, Row] = {
    "image-missing": Row(
        damage=lambda made: made.image_file("c").unlink(), but_not=OF_FOLDERS, totals=NO_IMAGE
    ),
    "image-unreadable": Row(damage=image_of(b"no image"), totals=NO_IMAGE),
    "image-unread": Row(
        damage=lambda made: made.image_file("c").with_name("other.gif").write_bytes(b"GIF89a"),
        but_not=dict.fromkeys(("list", "coco", "voc"), "lists name their images"),
        totals=NO_IMAGE,
    ),
    "image-16-bit": Row(damage=image_of(SIXTEEN_BITS)),
    "image-with-alpha": Row(damage=image_of(FOURTH_CHANNEL)),
    "image-rotated": Row(
        damage=image_of(ROTATED_IMAGE),
        but_not=dict.fromkeys(OF_PIXELS, "labels state a size: size-unsure says more"),
    ),
    "image-twice": Row(listed_twice, but_not=OF_FOLDERS, also={"coco": {"label-twice": 2}}),
    "labels-unreadable": Row(
        damage=lambda made: made.label_file("c").write_bytes(b"\xff" * (65 << 20)),
        but_not={"coco": ONE_FILE},
        totals=NO_IMAGE,
    ),
    "label-unreadable": Row(
        damage=text_in(
            {
                Yolo: ("0.25", "0,25"),
                Coco: ("16.0", '"16px"'),
                Voc: ("<xmin>[^<]*", "<xmin>one"),
                Labelme: (r'"points": \[\[[^\]]*\]', '"points": [["x"]'),
            }
        ),
        totals=NO_LABEL,
    ),
    "label-of-pose": Row(damage=text_in({Yolo: ("0 [^\\n]*\\n", POSE)}), but_not=YOLO_ONLY),
    "polygons-or-poses": Row(damage=CORNERS, but_not=YOLO_ONLY, also={"yolo": BOXED, "list": BOXED}),
    "corners-boxed": Row(damage=CORNERS, but_not=YOLO_ONLY, also={"yolo": MAYBE, "list": MAYBE}),
    "label-stray": Row(
        damage=text_in({Coco: ('"image_id": 2', '"image_id": 77')}), but_not=COCO_ONLY, totals=NO_LABEL
    ),
    "labels-without-image": Row(
        damage=lambda made: made.label_file("new").write_text('{"shapes": [], "imagePath": "z.jpg"}'),
        but_not={"coco": ONE_FILE, "labelme": "its file names an image: image-missing"},
        totals={"label files without an image": 1},
    ),
    "label-twice": Row(again, but_not=dict.fromkeys(OF_PIXELS, OWN), totals={"counted once": 1}),
    "label-repeated": Row(again, but_not=dict.fromkeys(OF_ROWS, "such a row is a mistake: label-twice")),
    "wrong-class": Row(
        first_box(name="bird"), but_not={"coco": "a category that is not listed is refused"}, totals=NO_LABEL
    ),
    "box-not-finite": Row(
        first_box(at=(float("nan"), 0.5, 0.2, 0.2)),
        but_not={"voc": "nan is no number there: label-unreadable"},
        totals=NO_LABEL,
    ),
    "box-in-pixels": Row(
        first_box(at=(30.0, 20.0, 10.0, 10.0)),
        but_not=dict.fromkeys(OF_PIXELS, "its numbers are pixels"),
        totals=NO_LABEL,
    ),
    "box-empty": Row(first_box(at=(0.5, 0.5, 0.0, 0.2)), totals=NO_LABEL),
    "box-outside": Row(first_box(at=(1.5, 0.5, 0.2, 0.2)), totals=NO_LABEL),
    "box-sticks-out": Row(first_box(at=(0.95, 0.5, 0.2, 0.2)), totals={"labels clipped": 1}),
    "size-differs": Row(
        stated(2 * WIDTH, 2 * HEIGHT), but_not=NO_SIZE, totals={"images whose boxes were scaled": 1}
    ),
    "size-unsure": Row(stated(HEIGHT, WIDTH), but_not=NO_SIZE),
    "box-derived": Row(
        damage=text_in(
            {
                Coco: (r'"bbox": \[[^\]]*\]', '"segmentation": [[1, 1, 9, 1, 9, 9]]'),
                Voc: ("<bndbox>.*?</bndbox>", ROTATED),
            }
        ),
        but_not={name: why for name, why in COCO_ONLY.items() if name != "voc"},
    ),
    "numbers-assumed": Row(
        damage=numbers_of_another_meaning,
        counts=2,
        also={"coco": {"numbers-assumed": 12}},
        but_not=dict.fromkeys(OF_ROWS, "such a set is refused"),
    ),
    "id-as-number": Row(damage=text_in({Coco: ('"image_id": 2', '"image_id": "2"')}), but_not=COCO_ONLY),
    "id-twice": Row(
        damage=text_in({Coco: ('"id": 2, "image_id"', '"id": 1, "image_id"')}), but_not=COCO_ONLY
    ),
    "area-unreadable": Row(
        damage=text_in({Coco: ('"id": 2, "image_id"', '"id": 2, "area": "?", "image_id"')}), but_not=COCO_ONLY
    ),
    "crowd-of-cvat": Row(
        damage=text_in({Coco: ('"iscrowd": 0', f'"iscrowd": 1, {PAINTED}')}),
        but_not=COCO_ONLY,
        totals={"labels": 11, "crowd regions": 1},
    ),
    "shape-without-box": Row(
        damage=text_in(
            {Labelme: (r'\{"label"', '{"label": "cat", "shape_type": "point", "points": [[1, 1]]}, {"label"')}
        ),
        but_not=LABELME_ONLY,
    ),
    "label-joined": Row(
        damage=text_in({Labelme: (r'"shapes": \[.*\]', f'"shapes": [{PART}, {PART}]')}), but_not=LABELME_ONLY
    ),
    "name-assumed": Row(
        damage=lambda made: {
            YoloList: lambda: rename_in(made.root / "train.txt"),
            Coco: lambda: rename_in(made.root / "train.json"),
            Voc: lambda: rename_in(made.root / "ImageSets/Main/train.txt"),
            Labelme: lambda: elsewhere(made),
        }[type(made)](),
        but_not={"yolo": NO_LIST},
    ),
}


def rename_in(listing: Path) -> None:
    """Let a list or annotations name the third image as a program on another machine does."""
    text = listing.read_text()
    new = re.sub(r'(?m)(^|")(?:\./)?(images/train/)?c(\.jpg)?("|$)', r"\1D:\\data\\\2c.jpg\4", text)
    assert new != text
    listing.write_text(new.replace("\\", "\\\\") if listing.suffix == ".json" else new)


def elsewhere(made: Format) -> None:
    """Move the label file of the third image to another folder, where it states another path."""
    file = made.label_file("c")
    target = file.parent / "json" / "of c.json"
    target.parent.mkdir()
    target.write_text(file.read_text().replace('"c.jpg"', '"..\\\\photos\\\\c.jpg"'))
    file.unlink()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", ROWS)
def test_a_problem_is_found_in_every_format(tmp_path: Path, form: str, name: str) -> None:
    row, made, content = ROWS[name], FORMATS[form](tmp_path / "set"), images()
    if form in row.but_not:
        pytest.skip(row.but_not[form])
    row.spoil(content)
    data = made.write(content)
    row.damage(made)
    index = index_of(data, strict=False)
    assert {name: row.counts, **row.also.get(form, {})} == dict(index.problem_kinds)
    assert (index.problem_count > 0) == (KINDS[name].action != ASSUMED)
    assert bool(index.problems) != bool(index.assumed)
    assert {total: index.totals()[total] for total in row.totals} == row.totals


@pytest.mark.parametrize("form", OF_PIXELS)
def test_numbers_of_another_meaning_give_the_boxes_that_were_meant(tmp_path: Path, form: str) -> None:
    made = FORMATS[form](tmp_path / "set")
    data = made.write(images())
    before = index_of(data, strict=False).boxes_cxcywh_unit
    numbers_of_another_meaning(made)
    index = index_of(data, strict=False)
    assert np.abs(index.boxes_cxcywh_unit - before).max() < 1e-6
    assert "taken as" in index.assumed[0]


@pytest.mark.parametrize("form", OF_PIXELS)
@pytest.mark.parametrize("at", [(9.0, 7.0, 0.1, 0.1), (0.5, 0.5, 3.0, 0.5)])
def test_no_format_of_pixels_asks_for_fractions(
    tmp_path: Path, form: str, at: tuple[float, float, float, float]
) -> None:
    made, content = FORMATS[form](tmp_path / "set"), images()
    first_box(at=at)(content)
    index = index_of(made.write(content), strict=False)
    assert index.problem_kinds == {"box-outside": 1}
    assert "lies outside the image, or is more than twice as large" in str(index.problems[0])


def test_repeated_annotations_are_one_note_with_a_count(tmp_path: Path) -> None:
    made, content = Coco(tmp_path / "set"), images()
    for image in content:
        image.boxes = [*image.boxes, *image.boxes]
    index = index_of(made.write(content), strict=False)
    assert len(index.assumed) == 1 and "(labels like this: 12)" in index.assumed[0]
    assert len(index.classes) == 24

    data = made.root / "both.yaml"
    data.write_text(f"train: train.json\nval: train.json\nnames: [{', '.join(NAMES)}]\n")
    found = check_dataset(
        load_dataset(str(data)), ["train", "val"],
        decode=False, duplicates=False, problems_kept=9, on_progress=lambda *_: None,
    )  # fmt: skip
    assert [note for note in found.notes if "labels like this" in note] == [
        f"train and val: {index.assumed[0]}"
    ]


@pytest.mark.parametrize("form", FORMATS)
def test_a_clean_set_has_no_problem(tmp_path: Path, form: str) -> None:
    made = FORMATS[form](tmp_path / "set")
    index = index_of(made.write(images()), strict=False)
    assert not index.problem_kinds and not index.assumed and not index.problems
    assert (len(index), len(index.classes)) == (6, 12)


@pytest.mark.parametrize("form", OF_PIXELS)
def test_a_training_on_crowd_regions_alone_is_refused(tmp_path: Path, form: str) -> None:
    made, content = FORMATS[form](tmp_path / "set"), images()
    for image in content:
        image.boxes = [replace(box, crowd=True) for box in image.boxes]
    with pytest.raises(DataError, match="none of the 6 train images has a label but 12 crowd regions"):
        index_of(made.write(content), strict=False)


def test_every_kind_has_a_row_here_and_in_the_documents() -> None:
    assert set(KINDS) - AUDIT == set(ROWS)
    table = set(re.findall(r"`([a-z]+(?:-[a-z0-9]+)+)`", PAGE.read_text(encoding="utf-8")))
    assert set(KINDS) <= table, set(KINDS) - table


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("on_disk", ["NFC", "NFD"])
@pytest.mark.parametrize("part", ["image", "labels"])
def test_names_are_matched_in_every_form_of_unicode(
    tmp_path: Path, form: str, on_disk: Literal["NFC", "NFD"], part: str
) -> None:
    stated = unicodedata.normalize("NFD" if on_disk == "NFC" else "NFC", "Küche é")
    made, content = FORMATS[form](tmp_path / "set"), images()
    content[2].name = f"{stated}.jpg"
    data = made.write(content)
    if part == "labels" and form == "coco":
        pytest.skip(ONE_FILE)
    file = made.root / made.image_folder / f"{stated}.jpg" if part == "image" else made.label_file(stated)
    file.rename(file.with_name(unicodedata.normalize(on_disk, file.name)))
    index = index_of(data, strict=False)
    assert len(index) == 6 and len(index.classes) == 12 and not index.problem_count
