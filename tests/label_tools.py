"""Small data sets as labelling tools write them: the shape of their files, with content of our own.

All images are 64 x 48 pixels. ``a.jpg`` has a cat at x 16 to 32, y 12 to 24 and a dog at x 40 to 56, y 12 to 36. ``b.jpg``
has no object. The shapes come from the tools' documentation, from files in bug reports, and from the exporters of Label
Studio's SDK, darwin-py, FiftyOne, Supervisely's SDK (Apache-2.0) and Datumaro (MIT).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from small_data import write_picture

CAT, DOG = (16, 12, 16, 12), (40, 12, 16, 24)  # x, y, width, height in pixels
ROWS = [[0, 0.375, 0.375, 0.25, 0.25], [1, 0.75, 0.5, 0.25, 0.5]]
FROM_ZERO = [  # XML whose pixels count from 0: the box gains a pixel at the left and at the top
    [0, 0.36719, 0.36458, 0.26562, 0.27083],
    [1, 0.74219, 0.48958, 0.26562, 0.52083],
]
TEXT = "0 0.375000 0.375000 0.250000 0.250000\n1 0.750000 0.500000 0.250000 0.500000\n"
READ = {"a.jpg": ROWS, "b.jpg": []}


@dataclass(frozen=True)
class Export:
    """An export that yolofleet reads.

    Attributes:
        data: what follows the folder in ``--data``.
        splits: the labels of each image of each split.
        names: of the classes.
        kinds: number of problems of each kind, in each split.
    """

    write: Callable[[Path], object]
    data: str = ""
    splits: dict[str, dict[str, list[list[float]]]] = field(
        default_factory=lambda: {"train": READ, "val": READ}
    )
    names: tuple[str, ...] = ("cat", "dog")
    kinds: dict[str, int] = field(default_factory=dict)


# An entry stands on one line, as in the files of the tools.
# fmt: off


def text(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8", newline="")


def dump(path: Path, content: object) -> None:
    text(path, json.dumps(content))


def pictures(folder: Path, names: Sequence[str] = ("a.jpg", "b.jpg")) -> None:
    for number, name in enumerate(names):
        write_picture(folder / name, seed=number)


def yolo(images: Path, labels: Path, *, first: str = "a", empty: str | None = "b") -> None:
    """Images and YOLO labels; ``empty`` is the image with an empty file."""
    pictures(images, [f"{first}.jpg", f"{empty or 'b'}.jpg"])
    text(labels / f"{first}.txt", TEXT)
    if empty:
        text(labels / f"{empty}.txt", "")


def coco(*, folder: str = "", ids: Sequence[int] = (1, 2), first: int = 1, **more: Any) -> dict[str, Any]:
    """The lists of a COCO file: ``folder`` stands before the names, ``ids`` are the categories, ``first`` is the first id."""
    images = [{"id": first + at, "width": 64, "height": 48, "file_name": f"{folder}{name}"} for at, name in enumerate(("a.jpg", "b.jpg"))]
    annotations = [
        {"id": first + at, "image_id": first, "category_id": category, "segmentation": [], "area": box[2] * box[3], "bbox": list(box), "iscrowd": 0}
        for at, (category, box) in enumerate(zip(ids, (CAT, DOG), strict=True))
    ]
    categories = [{"id": number, "name": name} for number, name in zip(ids, ("cat", "dog"), strict=True)]
    return {"images": images, "annotations": annotations, "categories": categories} | more


def xml(name: str, *, first: int = 1, objects: bool = True, folder: str = "", more: str = "", path: str = "") -> str:
    """A VOC annotation whose pixels count from ``first``, both ends included if that is 1."""
    found = ""
    for label, (x, y, width, height) in (("cat", CAT), ("dog", DOG)) if objects else ():
        corners = {"xmin": x + first, "ymin": y + first, "xmax": x + width, "ymax": y + height}
        bndbox = "".join(f"<{tag}>{value}</{tag}>" for tag, value in corners.items())
        found += f"<object><name>{label}</name><pose>Unspecified</pose><truncated>0</truncated>{more}<bndbox>{bndbox}</bndbox></object>\n"
    where = f"<folder>{folder}</folder><filename>{name}</filename>" + (f"<path>{path}</path>" if path else "")
    size = "<size><width>64</width><height>48</height><depth>3</depth></size><segmented>0</segmented>"
    return f"<annotation>\n{where}<source><database>Unknown</database></source>{size}\n{found}</annotation>\n"


# -- CVAT


def cvat_ultralytics(root: Path) -> None:
    yolo(root / "images" / "train", root / "labels" / "train")
    text(root / "data.yaml", "names:\n  0: cat\n  1: dog\npath: .\ntrain: train.txt\n")
    text(root / "train.txt", "data/images/train/a.jpg\ndata/images/train/b.jpg\n")


def cvat_yolo(root: Path) -> None:
    yolo(root / "obj_train_data", root / "obj_train_data")
    text(root / "obj.data", "classes = 2\ntrain = data/train.txt\nnames = data/obj.names\nbackup = backup/\n")
    text(root / "obj.names", "cat\ndog\n")
    text(root / "train.txt", "data/obj_train_data/a.jpg\ndata/obj_train_data/b.jpg\n")


def cvat_coco(root: Path) -> None:
    content = coco(licenses=[{"name": "", "id": 0, "url": ""}], info={"contributor": "", "year": ""})
    for annotation in content["annotations"]:
        annotation["attributes"] = {"occluded": False, "rotation": 0.0}
    dump(root / "annotations" / "instances_default.json", content)
    pictures(root / "images" / "default")


def cvat_voc(root: Path) -> None:
    pictures(root / "JPEGImages")
    more = "<difficult>0</difficult><occluded>0</occluded>"
    for name in ("a", "b"):
        text(root / "Annotations" / f"{name}.xml", xml(f"{name}.jpg", more=more, objects=name == "a"))
    text(root / "ImageSets" / "Main" / "default.txt", "a\nb\n")
    text(root / "labelmap.txt", "# label:color_rgb:parts:actions\nbackground:0,0,0::\ncat:1,2,3::\ndog:4,5,6::\n")


def cvat_images(root: Path) -> None:
    boxes = "".join(
        f'<box label="{label}" source="manual" occluded="0" xtl="{x}.00" ytl="{y}.00" xbr="{x + w}.00" ybr="{y + h}.00" z_order="0"></box>'
        for label, (x, y, w, h) in (("cat", CAT), ("dog", DOG))
    )
    image = f'<image id="0" name="a.jpg" width="64" height="48">{boxes}</image>'
    text(root / "annotations.xml", f'<?xml version="1.0" encoding="utf-8"?>\n<annotations><version>1.1</version>\n<meta></meta>\n{image}\n</annotations>\n')
    pictures(root / "images")


# -- Label Studio


def label_studio_yolo(root: Path) -> None:
    yolo(root / "images", root / "labels")
    text(root / "classes.txt", "cat\ndog\n")
    categories = [{"id": 0, "name": "cat"}, {"id": 1, "name": "dog"}]
    info = {"year": 2024, "version": "1.0", "contributor": "Label Studio"}
    dump(root / "notes.json", {"categories": categories, "info": info})


def label_studio_described(root: Path) -> None:
    label_studio_yolo(root)
    text(root / "data.yaml", "train: images\nval: images\nnames: [cat, dog]\n")


def label_studio_coco(root: Path) -> None:
    pictures(root / "images")
    info = {"year": 2024, "version": "1.0", "description": "", "contributor": "Label Studio", "url": ""}
    content = coco(folder="images\\", ids=(0, 1), first=0, info=info)
    content["images"][1]["file_name"] = "..\\..\\label-studio\\label-studio\\media\\upload\\4\\b.jpg"
    for annotation in content["annotations"]:
        annotation["ignore"] = 0
    dump(root / "result.json", content)


def label_studio_voc(root: Path) -> None:
    pictures(root / "images")  # an image without labels has no XML
    text(root / "Annotations" / "a.xml", xml("a.jpg", first=0, folder="images", more="<difficult>0</difficult>"))


def label_studio_json(root: Path) -> None:
    value = {"x": 25.0, "y": 25.0, "width": 25.0, "height": 25.0, "rotation": 0, "rectanglelabels": ["cat"]}
    about = {"original_width": 64, "original_height": 48, "image_rotation": 0, "from_name": "label", "to_name": "image"}
    result = {**about, "value": value, "id": "x1", "type": "rectanglelabels"}
    task = {"id": 1, "annotations": [{"id": 1, "result": [result]}], "data": {"image": "/data/upload/1/a.jpg"}}
    dump(root / "project-1.json", [task])
    pictures(root)


# -- Roboflow

SPLIT = {"train": "train", "val": "valid", "test": "test"}
ONE = {split: {f"{split}_jpg.rf.1a2b.jpg": ROWS, f"{split}2_jpg.rf.3c4d.jpg": []} for split in SPLIT}


def of_splits(root: Path, write: Callable[[Path, str, str], object]) -> None:
    """Call ``write(folder, name of the first image, name of the second)`` for each split."""
    text(root / "README.roboflow.txt", "exported via roboflow.com\n")
    for split, folder in SPLIT.items():
        write(root / folder, *(name.removesuffix(".jpg") for name in ONE[split]))


def roboflow_yolo(root: Path) -> None:
    of_splits(root, lambda folder, a, b: yolo(folder / "images", folder / "labels", first=a, empty=b))
    about = "\nroboflow:\n  workspace: me\n  project: pets\n  version: 1\n  license: CC BY 4.0\n"
    splits = "train: ../train/images\nval: ../valid/images\ntest: ../test/images\n"
    text(root / "data.yaml", f"{splits}\nnc: 2\nnames: ['cat', 'dog']\n{about}")


def roboflow_coco(root: Path) -> None:
    def write(folder: Path, a: str, b: str) -> None:
        content = coco(first=0, info={"year": "2024", "description": "Exported from roboflow.com"})
        groups = (("pets", "none"), ("cat", "pets"), ("dog", "pets"))
        content["categories"] = [{"id": n, "name": name, "supercategory": parent} for n, (name, parent) in enumerate(groups)]
        for image, name in zip(content["images"], (a, b), strict=True):
            image |= {"file_name": f"{name}.jpg", "license": 1, "extra": {"name": "a.jpg"}}
        dump(folder / "_annotations.coco.json", content)
        pictures(folder, [f"{a}.jpg", f"{b}.jpg"])

    of_splits(root, write)


def roboflow_voc(root: Path) -> None:
    def write(folder: Path, a: str, b: str) -> None:
        pictures(folder, [f"{a}.jpg", f"{b}.jpg"])
        for name in (a, b):
            text(folder / f"{name}.xml", xml(f"{name}.jpg", objects=name == a, path=f"{name}.jpg", more="<difficult>0</difficult><occluded>0</occluded>"))

    of_splits(root, write)


def create_ml() -> list[dict[str, Any]]:
    annotations = [
        {"label": label, "coordinates": {"x": x + w / 2, "y": y + h / 2, "width": w, "height": h}}
        for label, (x, y, w, h) in (("cat", CAT), ("dog", DOG))
    ]
    return [{"image": "a.jpg", "annotations": annotations}, {"image": "b.jpg", "annotations": []}]


def roboflow_create_ml(root: Path) -> None:
    for folder in ("train", "valid"):
        dump(root / folder / "_annotations.createml.json", create_ml())
        pictures(root / folder)


def roboflow_csv(root: Path) -> None:
    rows = "filename,width,height,class,xmin,ymin,xmax,ymax\na.jpg,64,48,cat,16,12,32,24\na.jpg,64,48,dog,40,12,56,36\n"
    for folder in ("train", "valid"):
        text(root / folder / "_annotations.csv", rows)
        pictures(root / folder)


# -- VIA

REGIONS = [
    {"shape_attributes": {"name": "rect", "x": x, "y": y, "width": w, "height": h}, "region_attributes": {"type": label}}
    for label, (x, y, w, h) in (("cat", CAT), ("dog", DOG))
]


def via_coco(root: Path) -> None:
    content = coco(first=0, info={"description": "VIA"}, licenses=[])
    content["images"][1] |= {"width": -1, "height": -1}
    for annotation, (x, y, w, h) in zip(content["annotations"], (CAT, DOG), strict=True):
        annotation |= {"image_id": "0", "segmentation": [x, y, x + w, y, x + w, y + h, x, y + h]}
    dump(root / "via_export_coco.json", content)
    pictures(root)


def via_project(root: Path) -> None:
    image = {"filename": "a.jpg", "size": 1000, "regions": REGIONS, "file_attributes": {}}
    dump(root / "via_project.json", {"_via_settings": {"core": {}}, "_via_img_metadata": {"a.jpg1000": image}, "_via_attributes": {}})
    pictures(root)


def via_csv(root: Path) -> None:
    lines = ["filename,file_size,file_attributes,region_count,region_id,region_shape_attributes,region_attributes"]
    for number, region in enumerate(REGIONS):
        shape, label = (json.dumps(region[key]).replace('"', '""') for key in ("shape_attributes", "region_attributes"))
        lines.append(f'a.jpg,1000,"{{}}",2,{number},"{shape}","{label}"')
    text(root / "via_export_csv.csv", "\n".join(lines) + "\n")
    pictures(root)


# -- labelme and X-AnyLabeling


def labelme(root: Path) -> None:
    pictures(root)
    shapes: list[dict[str, Any]] = [
        {"label": label, "points": [[x + w, y + h], [x, y]], "group_id": None, "description": "", "shape_type": "rectangle", "flags": {}, "mask": None}
        for label, (x, y, w, h) in (("cat", CAT), ("dog", DOG))
    ]
    dump(root / "a.json", {"version": "5.5.0", "flags": {}, "shapes": shapes, "imagePath": "a.jpg", "imageData": "/9j/", "imageHeight": 48, "imageWidth": 64})


def labelme_elsewhere(root: Path) -> None:
    """The label files in a folder of their own, written on Windows."""
    pictures(root / "photos")
    labelme(root / "json")
    for picture in (root / "json").glob("*.jpg"):
        picture.unlink()
    content = json.loads((root / "json" / "a.json").read_text())
    dump(root / "json" / "a.json", content | {"imagePath": "..\\photos\\a.jpg"})


def x_anylabeling(root: Path) -> None:
    pictures(root)
    x, y, w, h = CAT
    corners = [[x, y], [x + w, y], [x + w, y + h], [x, y + h]]
    cat: dict[str, Any] = {"label": "cat", "score": None, "points": corners, "group_id": None, "description": "", "difficult": False}
    cat |= {"shape_type": "rectangle", "flags": {}, "attributes": {}, "kie_linking": []}
    dog = cat | {"label": "dog", "points": [[40, 24], [48, 12], [56, 24], [48, 36]], "shape_type": "rotation", "direction": 0.785}
    nose = cat | {"label": "nose", "points": [[20, 14]], "shape_type": "point"}
    for name, shapes in (("a", [cat, dog, nose]), ("b", [])):
        about: dict[str, Any] = {"version": "2.4.4", "flags": {}, "imagePath": f"{name}.jpg", "imageData": None, "imageHeight": 48, "imageWidth": 64}
        dump(root / f"{name}.json", {**about, "shapes": shapes})


# -- LabelImg


def labelimg_voc(root: Path) -> None:
    pictures(root)
    text(root / "a.xml", xml("a.jpg", folder="photos", path="C:\\Users\\me\\photos\\a.jpg", more="<difficult>0</difficult>"))


def labelimg_yolo(root: Path) -> None:
    yolo(root, root, empty=None)
    text(root / "classes.txt", "cat\ndog\n")


def labelimg_described(root: Path) -> None:
    labelimg_yolo(root / "photos")
    text(root / "data.yaml", "train: photos\nval: photos\nnames: [cat, dog]\n")


def labelimg_create_ml(root: Path) -> None:
    dump(root / "photos.json", create_ml())
    pictures(root)


# -- Supervisely


def supervisely(root: Path) -> None:
    classes: list[dict[str, Any]] = [{"title": name, "shape": "rectangle", "color": "#FF0000", "geometry_config": {}} for name in ("cat", "dog")]
    dump(root / "meta.json", {"classes": classes, "tags": [], "projectType": "images"})
    objects: list[dict[str, Any]] = []
    for number, (label, (x, y, w, h)) in enumerate((("cat", CAT), ("dog", DOG))):
        points = {"exterior": [[x, y], [x + w - 1, y + h - 1]], "interior": []}
        objects.append({"id": number, "classId": number, "classTitle": label, "geometryType": "rectangle", "tags": [], "points": points})
    for name, found in (("a", objects), ("b", [])):
        dump(root / "ds1" / "ann" / f"{name}.jpg.json", {"description": "", "tags": [], "size": {"height": 48, "width": 64}, "objects": found})
    pictures(root / "ds1" / "img")


def supervisely_yolo(root: Path) -> None:
    for split in ("train", "val"):
        yolo(root / "images" / split, root / "labels" / split)
    splits = f"train: ../{root.name}/images/train\nval: ../{root.name}/images/val\n"
    text(root / "data_config.yaml", f"names: [cat, dog]\ncolors: [[255, 0, 0], [0, 255, 0]]\nnc: 2\n{splits}")


def supervisely_coco(root: Path) -> None:
    content = coco()
    for image in content["images"]:
        image |= {"license": "None", "url": "None", "date_captured": "2024-01-01", "sly_id": None}
    dump(root / "ds1" / "annotations" / "instances.json", content)
    pictures(root / "ds1" / "images")


def supervisely_voc(root: Path) -> None:
    voc = root / "VOCdevkit" / "VOC"
    pictures(voc / "JPEGImages")
    for name in ("a", "b"):
        text(voc / "Annotations" / f"{name}.xml", xml(f"{name}.jpg", folder="VOC", objects=name == "a", more="<difficult>0</difficult>"))
    for split, names in (("train", "a 1\n"), ("val", "b -1\n")):
        text(voc / "ImageSets" / "Main" / f"cat_{split}.txt", names)
        text(voc / "ImageSets" / "Segmentation" / f"{split}.txt", names.split()[0] + "\n")
        text(voc / "ImageSets" / "Main" / f"{split}.txt", names)


# -- V7


def darwin(root: Path) -> None:
    slot = {"type": "image", "slot_name": "0", "width": 64, "height": 48, "source_files": [{"file_name": "a.jpg", "url": "https://darwin.v7labs.com/x"}]}
    annotations = [
        {"bounding_box": {"x": x, "y": y, "w": w, "h": h}, "id": f"{label}-1", "name": label, "properties": [], "slot_names": ["0"]}
        for label, (x, y, w, h) in (("cat", CAT), ("dog", DOG))
    ]
    schema = "https://darwin-public.s3.eu-west-1.amazonaws.com/darwin_json/2.0/schema.json"
    item = {"name": "a.jpg", "path": "/", "slots": [slot]}
    dump(root / "annotations" / "a.json", {"version": "2.0", "schema_ref": schema, "item": item, "annotations": annotations})
    pictures(root / "images")


def darwin_coco(root: Path) -> None:
    content = coco(ids=(2656977832, 3108230045), info={"description": "Exported from Darwin"}, tag_categories=[])
    for image, number in zip(content["images"], (3904355907, 4177839377), strict=True):
        image |= {"license": 0, "coco_url": "n/a", "id": number, "tag_ids": []}
    for annotation in content["annotations"]:
        annotation |= {"image_id": 3904355907, "extra": {}}
    dump(root / "output.json", content)
    pictures(root / "images")


# -- Labelbox


def labelbox(root: Path) -> None:
    about: dict[str, Any] = {"feature_id": "c1", "annotation_kind": "ImageBoundingBox", "classifications": []}
    objects = [
        {**about, "name": label, "value": label, "bounding_box": {"top": y, "left": x, "height": h, "width": w}}
        for label, (x, y, w, h) in (("cat", CAT), ("dog", DOG))
    ]
    row = {
        "data_row": {"id": "d1", "external_id": "a.jpg", "row_data": "https://storage.labelbox.com/a.jpg"},
        "media_attributes": {"height": 48, "width": 64},
        "projects": {"p1": {"name": "pets", "labels": [{"annotations": {"objects": objects, "classifications": []}}]}},
    }
    text(root / "export.ndjson", json.dumps(row) + "\n")
    pictures(root)


def labelbox_coco(root: Path) -> None:
    """As converters of Labelbox's rows write it: flags and numbers as texts."""
    content = coco()
    for annotation in content["annotations"]:
        annotation |= {"iscrowd": "0", "ignore": "0", "bbox": [str(float(side)) for side in annotation["bbox"]]}
    dump(root / "coco.json", content)
    pictures(root / "images")


# -- FiftyOne


def fiftyone_coco(root: Path) -> None:
    dump(root / "labels.json", coco(ids=(0, 1), info={"url": "https://voxel51.com/fiftyone"}, licenses=[]))
    pictures(root / "data")


def fiftyone_yolo(root: Path) -> None:
    for split in ("train", "val"):
        yolo(root / "images" / split, root / "labels" / split, empty=None)
    text(root / "dataset.yaml", "names:\n  0: cat\n  1: dog\npath: /home/somebody/export\ntrain: ./images/train/\nval: ./images/val/\n")


def fiftyone_voc(root: Path) -> None:
    pictures(root / "data")
    for name in ("a", "b"):
        text(root / "labels" / f"{name}.xml", xml(f"{name}.jpg", first=0, objects=name == "a", path=f"/home/somebody/export/data/{name}.jpg"))


# -- Datumaro


def datumaro(root: Path) -> None:
    annotations = [
        {"id": number, "type": "bbox", "attributes": {"occluded": False}, "group": 0, "label_id": number, "z_order": 0, "bbox": list(box)}
        for number, box in enumerate((CAT, DOG))
    ]
    items = [{"id": "a", "annotations": annotations, "attr": {"frame": 0}, "image": {"size": [48, 64], "path": "a.jpg"}}]
    labels: list[dict[str, Any]] = [{"name": name, "parent": "", "attributes": []} for name in ("cat", "dog")]
    categories = {"label": {"labels": labels, "attributes": []}}
    about = {"dm_format_version": "1.0", "media_type": 2, "infos": {}}
    dump(root / "annotations" / "default.json", {**about, "categories": categories, "items": items})
    pictures(root / "images" / "default")


def datumaro_coco(root: Path) -> None:
    for split in ("train", "val"):
        dump(root / "annotations" / f"instances_{split}.json", coco(licenses=[], info={}))
        pictures(root / "images" / split)


def datumaro_ultralytics(root: Path) -> None:
    for split in ("train", "val"):
        yolo(root / "images" / split, root / "labels" / split)
        text(root / f"{split}.txt", f"images/{split}/a.jpg\nimages/{split}/b.jpg\n")
    text(root / "data.yaml", "names:\n- cat\n- dog\nnc: 2\ntrain: train.txt\nval: val.txt\n")


# -- PaddleDetection and PaddleLabel


def paddle_voc(root: Path) -> None:
    pictures(root / "JPEGImages")
    for name in ("a", "b"):
        text(root / "Annotations" / f"{name}.xml", xml(f"{name}.jpg", folder="JPEGImages", objects=name == "a", more="<difficult>Unspecified</difficult>"))
    text(root / "train.txt", "./JPEGImages/a.jpg ./Annotations/a.xml\n")
    text(root / "val.txt", "./JPEGImages/b.jpg ./Annotations/b.xml\n")
    text(root / "label_list.txt", "cat\ndog\n")
    text(root / "data.yaml", "train: train.txt\nval: val.txt\nnames: [cat, dog]\n")


def paddle_coco(root: Path) -> None:
    for split in ("train", "val"):
        dump(root / f"{split}.json", coco())
    pictures(root / "image")
    text(root / "data.yaml", "path: image\ntrain: ../train.json\nval: ../val.json\n")


TRAIN = {"train": READ}
OF_ZERO = {split: {"a.jpg": FROM_ZERO, "b.jpg": []} for split in ("train", "val")}
READ_EXPORTS = {
    "cvat-ultralytics": Export(cvat_ultralytics, splits=TRAIN),
    "cvat-yolo": Export(cvat_yolo, splits=TRAIN),
    "cvat-coco": Export(cvat_coco, "/annotations/instances_default.json"),
    "cvat-voc": Export(cvat_voc),
    "ls-yolo": Export(label_studio_yolo),
    "ls-yolo-described": Export(label_studio_described),
    "ls-coco": Export(label_studio_coco, "/result.json"),
    "ls-voc": Export(label_studio_voc, splits=OF_ZERO),
    "rf-yolo": Export(roboflow_yolo, splits=ONE),
    "rf-coco": Export(roboflow_coco, splits=ONE),
    "rf-voc": Export(roboflow_voc, splits=ONE),
    "via-coco": Export(via_coco, "/via_export_coco.json"),
    "labelme": Export(labelme),
    "labelme-json": Export(labelme_elsewhere, kinds={"name-assumed": 1}),
    "x-anylabeling": Export(x_anylabeling, kinds={"shape-without-box": 1}),
    "labelimg-voc": Export(labelimg_voc),
    "labelimg-yolo": Export(labelimg_yolo),
    "labelimg-described": Export(labelimg_described),
    "sly-yolo": Export(supervisely_yolo),
    "sly-coco": Export(supervisely_coco, "/ds1/annotations/instances.json"),
    "sly-voc": Export(supervisely_voc, "/VOCdevkit/VOC", splits={"train": {"a.jpg": ROWS}, "val": {"b.jpg": []}}),
    "v7-coco": Export(darwin_coco, "/output.json"),
    "labelbox-coco": Export(labelbox_coco, "/coco.json"),
    "fiftyone-coco": Export(fiftyone_coco, "/labels.json"),
    "fiftyone-yolo": Export(fiftyone_yolo),
    "fiftyone-voc": Export(fiftyone_voc, splits=OF_ZERO),
    "datumaro-coco": Export(datumaro_coco),
    "datumaro-ultralytics": Export(datumaro_ultralytics),
    "paddle-voc": Export(paddle_voc, splits={"train": {"a.jpg": ROWS}, "val": {"b.jpg": []}}),
    "paddle-coco": Export(paddle_coco),
}
# name -> writer, what follows the folder in --data, word that names the format
UNREAD_EXPORTS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "cvat-images": (cvat_images, "/annotations.xml", "CVAT for images"),
    "ls-json": (label_studio_json, "/project-1.json", "Label Studio"),
    "rf-createml": (roboflow_create_ml, "/train/_annotations.createml.json", "CreateML"),
    "rf-csv": (roboflow_csv, "/train/_annotations.csv", "CSV"),
    "via-project": (via_project, "/via_project.json", "VIA"),
    "via-csv": (via_csv, "/via_export_csv.csv", "VIA"),
    "labelimg-createml": (labelimg_create_ml, "/photos.json", "CreateML"),
    "sly": (supervisely, "/ds1/ann/a.jpg.json", "Supervisely"),
    "v7": (darwin, "/annotations/a.json", "Darwin"),
    "labelbox": (labelbox, "/export.ndjson", "Labelbox"),
    "datumaro": (datumaro, "/annotations/default.json", "Datumaro"),
}
