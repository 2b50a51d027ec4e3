"""Public data sets: where their files come from, and where they go so that ``--data NAME`` finds them.

Digests are those that the publishers or well-known libraries (torchvision, TensorFlow Datasets) state for these
archives. A part without one is not downloaded; a person who has it puts it into the set's ``downloads`` folder.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from yolofleet.datasets.bigjson import JsonFault, read_lists
from yolofleet.datasets.index import build_index
from yolofleet.datasets.sources import load_dataset
from yolofleet.datasets.writers import write_yolo
from yolofleet.errors import ConfigError, DataError, StorageError
from yolofleet.files.archive import unpack
from yolofleet.files.fetch import DownloadError, Item, Patience, by_hand, fetch, to_stderr
from yolofleet.files.lock import exclusive
from yolofleet.text import nearest, size_text

DOWNLOADS = "downloads"  # folder of a data set where archives lie until they are unpacked
DATASETS_FOLDER = Path("datasets")  # below the folder where the user works
ARCHIVES = (".zip", ".tar", ".tar.gz")


@dataclass(frozen=True)
class Part:
    """One file of a data set.

    Attributes:
        name: for ``parts`` of :func:`download_dataset`; several files may share one.
        into: folder below the data set's that it is unpacked into, or lies in.
        strip: leading folder of the archive's members that is left out.
        is_usual: fetched unless other parts are asked for.
    """

    name: str
    item: Item
    into: str = ""
    strip: str = ""
    is_usual: bool = True


@dataclass(frozen=True)
class PublicDataset:
    """
    Attributes:
        name: as ``--data`` has it.
        folder: its own, below ``datasets``.
        title, licence, origin: for people.
    """

    name: str
    folder: str
    title: str
    licence: str
    origin: str
    parts: tuple[Part, ...]

    @property
    def part_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(part.name for part in self.parts))

    def chosen(self, names: Sequence[str]) -> list[Part]:
        """The parts of these names; none: the usual ones. Raises ConfigError for an unknown name."""
        for name in names:
            if name not in self.part_names:
                raise ConfigError(
                    f"data set {self.name} has no part {name!r:.60}",
                    hint=f"parts: {', '.join(self.part_names)}",
                )
        return [part for part in self.parts if (part.name in names if names else part.is_usual)]

    def size_bytes(self, names: Sequence[str] = ()) -> int | None:
        """Of the archives; None where one is unknown."""
        sizes = [part.item.size_bytes for part in self.chosen(names)]
        return None if None in sizes else sum(size or 0 for size in sizes)


def datasets() -> tuple[PublicDataset, ...]:
    """All that can be asked for by name."""
    return _TABLE


def download_dataset(
    name: str,
    folder: Path = DATASETS_FOLDER,
    *,
    parts: Sequence[str] = (),
    keep_archives: bool = False,
    patience: Patience | None = None,
    tell: Callable[[str], None] | None = None,
) -> Path:
    """Fetch, check and unpack a data set below ``folder``; what is there already is not fetched again.

    Args:
        parts: names of parts (see ``PublicDataset.part_names``); none: what training and validation need.
        keep_archives: else each is deleted when it is unpacked.
        tell: gets what a person may want to know; default: standard error.
    Returns:
        the data set's own folder, such as ``datasets/coco``.
    Raises:
        ConfigError: no such data set or part.
        DownloadError: a part is not to be had, or has no published digest; what came is kept.
        DataError: an archive is damaged or unsafe.
        StorageError: the disk refused or is too small.
    """
    tell = tell or to_stderr
    dataset = _named(name)
    chosen = dataset.chosen(parts)
    root = folder / dataset.folder
    downloads = root / DOWNLOADS
    waiting = [part for part in chosen if not _mark(downloads, part).is_file()]
    _check_obtainable(dataset, waiting, downloads)
    tell(f"{dataset.title}: {dataset.licence}; {dataset.origin}")
    try:
        downloads.mkdir(parents=True, exist_ok=True)
        with exclusive(root / ".lock") as is_mine:
            if not is_mine:
                raise DownloadError(f"another process is at work in {root}", hint="wait until it is done")
            for part in waiting:
                _place(part, root, keep_archives, patience, tell)
            if dataset.name == "coco":
                for split in ("train2017", "val2017"):
                    write_coco_labels(root, split, tell)
                _write_coco_test_list(root)
    except OSError as problem:
        raise StorageError(
            f"{problem.filename or root} cannot be written: {problem.strerror or problem}",
            hint="check the disk, or choose another folder",
        ) from None
    tell(f"{root} is ready")
    return root


def _named(name: str) -> PublicDataset:
    for dataset in _TABLE:
        if dataset.name == name:
            return dataset
    names = [dataset.name for dataset in _TABLE]
    near = nearest(name, names)
    raise ConfigError(
        f"no data set {name!r:.60} to download", hint=f"{near}?" if near else f"one of: {', '.join(names)}"
    )


def _check_obtainable(dataset: PublicDataset, parts: Sequence[Part], downloads: Path) -> None:
    """Before anything is fetched, in whole."""
    missing = [
        part.item for part in parts if part.item.digest is None and not (downloads / part.item.name).is_file()
    ]
    if missing:
        shown = "; ".join(by_hand(item, downloads) for item in missing[:4])
        more = f"; and {len(missing) - 4} more files" if len(missing) > 4 else ""
        raise DownloadError(
            f"{len(missing)} files of {dataset.name} have no published digest, so they are not downloaded",
            source=dataset.origin,
            hint=f"{shown}{more}; then give the same command again",
        )


def _mark(downloads: Path, part: Part) -> Path:
    """An empty file that says that a part is in its place."""
    return downloads / f".{part.item.name}.done"


def _place(
    part: Part, root: Path, keep_archives: bool, patience: Patience | None, tell: Callable[[str], None]
) -> None:
    """Fetch one part and put it where it belongs."""
    downloads = root / DOWNLOADS
    path = fetch(part.item, downloads, patience=patience, tell=tell)
    if path.name.endswith(ARCHIVES):
        tell(f"unpacking {part.item.name} ({size_text(path.stat().st_size)})")
        unpack(path, root / part.into, strip=part.strip)
        if not keep_archives:
            path.unlink()
    else:
        (root / part.into).mkdir(parents=True, exist_ok=True)
        path.replace(root / part.into / path.name)
    _mark(downloads, part).touch()


def write_coco_labels(root: Path, split: str, tell: Callable[[str], None]) -> None:
    """``labels/SPLIT`` and the list ``SPLIT.txt`` from ``annotations/instances_SPLIT.json``, as ``coco.yaml`` has them.

    Nothing where the list exists, or annotations or images do not. Crowd regions are no labels; accuracy as COCO has
    it needs the JSON itself, with these regions and the areas of outlines.

    Raises:
        DataError: the annotations are broken.
        OSError: the disk refused.
    """
    listing, annotations = root / f"{split}.txt", root / "annotations" / f"instances_{split}.json"
    if listing.is_file() or not annotations.is_file() or not (root / "images" / split).is_dir():
        return
    tell(f"writing labels of {split}")
    index = build_index(load_dataset(str(annotations)), "train", strict=False)
    names = [Path(path).name for path in index.paths]
    (root / "labels").mkdir(exist_ok=True)
    beside = Path(tempfile.mkdtemp(dir=root / "labels", prefix=f".{split}-"))
    try:
        write_yolo(beside, split, names, index)
        if (root / "labels" / split).is_dir():
            shutil.rmtree(root / "labels" / split)
        (beside / "labels" / split).rename(root / "labels" / split)
        _write_list(listing, [f"./images/{split}/{name}" for name in names])
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _write_coco_test_list(root: Path) -> None:
    """``test-dev2017.txt``: the images whose detections COCO's server measures."""
    listing, about = root / "test-dev2017.txt", root / "annotations" / "image_info_test-dev2017.json"
    if listing.is_file() or not about.is_file():
        return
    try:
        images = [entry["file_name"] for _, entry in read_lists(about, ("images",)) if entry is not None]
    except (JsonFault, KeyError, TypeError) as problem:
        raise DataError(f"{about} is not COCO's list of images: {problem}") from None
    _write_list(listing, [f"./images/test2017/{name}" for name in images])


def _write_list(path: Path, lines: Sequence[str]) -> None:
    fresh = path.with_name(f".{path.name}.tmp")
    fresh.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")
    fresh.replace(path)


# -- the table -----------------------------------------------------------------------------------------------

_COCO = "annotations CC BY 4.0, images under Flickr's terms of use"
_COCO_PAGE = "https://cocodataset.org/#termsofuse"
_VOC = "images under Flickr's terms of use"
_VOC_PAGE = "http://host.robots.ox.ac.uk/pascal/VOC/"
_OBJECTS365 = "annotations CC BY 4.0, images for research"
_OBJECTS365_PAGE = "https://www.objects365.org"
_CROWDHUMAN = "for non-commercial research and education only"
_CROWDHUMAN_PAGE = "https://www.crowdhuman.org/download.html"


def _coco(path: str, size_bytes: int | None, sha256: str) -> Item:
    bucket = "images.cocodataset.org"  # its own host has no certificate of its name
    return Item(
        path.split("/")[-1],
        (f"https://s3.amazonaws.com/{bucket}/{path}", f"http://{bucket}/{path}"),
        size_bytes,
        f"sha256:{sha256}",
        _COCO,
        _COCO_PAGE,
    )


def _voc(path: str, size_bytes: int, sha256: str) -> Item:
    hosts = ("https://thor.robots.ox.ac.uk/pascal/VOC", "http://host.robots.ox.ac.uk/pascal/VOC")
    return Item(
        path.split("/")[-1],
        tuple(f"{host}/{path}" for host in hosts),
        size_bytes,
        f"sha256:{sha256}",
        _VOC,
        _VOC_PAGE,
    )


def _objects365(path: str, size_bytes: int | None = None, digest: str | None = None, name: str = "") -> Item:
    base = "https://dorc.ks3-cn-beijing.ksyun.com/data-set/2020Objects365%E6%95%B0%E6%8D%AE%E9%9B%86"
    return Item(
        name or path.split("/")[-1], (f"{base}/{path}",), size_bytes, digest, _OBJECTS365, _OBJECTS365_PAGE
    )


def _crowdhuman(name: str) -> Item:
    url = f"https://huggingface.co/datasets/sshao0516/CrowdHuman/resolve/main/{name}"
    return Item(name, (url,), None, None, _CROWDHUMAN, _CROWDHUMAN_PAGE)


_VAL_PATCHES = (*((1, i) for i in range(16)), *((2, i) for i in range(16, 44)))

_TABLE = (
    PublicDataset(
        "coco128",
        "coco128",
        "COCO128, the first 128 images of COCO train2017",
        _COCO,
        "https://github.com/ultralytics/assets/releases/tag/v0.0.0",
        (
            Part(
                "all",
                Item(
                    "coco128.zip",
                    (
                        "https://github.com/ultralytics/assets/releases/download/v0.0.0/coco128.zip",
                        "https://github.com/ultralytics/yolov5/releases/download/v1.0/coco128.zip",
                    ),
                    6_983_030,
                    "sha256:61e5e3028863d8ffc3b81d6a514603954889f0edd5e4b44c4ce60b2da99aeb8e",
                    _COCO,
                    "https://github.com/ultralytics/assets/releases/tag/v0.0.0",
                ),
                strip="coco128",
            ),
        ),
    ),
    PublicDataset(
        "coco",
        "coco",
        "COCO 2017",
        _COCO,
        _COCO_PAGE,
        (
            Part(
                "annotations",
                _coco(
                    "annotations/annotations_trainval2017.zip",
                    252_907_541,
                    "113a836d90195ee1f884e704da6304dfaaecff1f023f49b6ca93c4aaae470268",
                ),
            ),
            Part(
                "val",
                _coco(
                    "zips/val2017.zip",
                    815_585_330,
                    "4f7e2ccb2866ec5041993c9cf2a952bbed69647b115d0f74da7ce8f4bef82f05",
                ),
                into="images",
            ),
            Part(
                "train",
                _coco(
                    "zips/train2017.zip",
                    19_336_861_798,
                    "69a8bb58ea5f8f99d24875f21416de2e9ded3178e903f1f7603e283b9e06d929",
                ),
                into="images",
            ),
            Part(
                "test",
                _coco(
                    "zips/test2017.zip",
                    6_646_970_404,
                    "c7908c3c9f94ba2f3340ebbeec58c25db6be8774f18d68c2f15d0e369d95baba",
                ),
                into="images",
                is_usual=False,
            ),
            Part(
                "test",
                _coco(
                    "annotations/image_info_test2017.zip",
                    None,
                    "e52f412dd7195ac8f98d782b44c6dd30ea10241e9f42521f67610fbe055a74f8",
                ),
                is_usual=False,
            ),
        ),
    ),
    PublicDataset(
        "voc",
        "VOCdevkit",
        "Pascal VOC 2007 and 2012",
        _VOC,
        _VOC_PAGE,
        (
            Part(
                "2007",
                _voc(
                    "voc2007/VOCtrainval_06-Nov-2007.tar",
                    460_032_000,
                    "7d8cd951101b0957ddfd7a530bdc8a94f06121cfc1e511bb5937e973020c7508",
                ),
                strip="VOCdevkit",
            ),
            Part(
                "2007-test",
                _voc(
                    "voc2007/VOCtest_06-Nov-2007.tar",
                    451_020_800,
                    "6836888e2e01dca84577a849d339fa4f73e1e4f135d312430c4856b5609b4892",
                ),
                strip="VOCdevkit",
            ),
            Part(
                "2012",
                _voc(
                    "voc2012/VOCtrainval_11-May-2012.tar",
                    1_999_639_040,
                    "e14f763270cf193d0b5f74b169f44157a4b0c6efa708f4dd0ff78ee691763bcb",
                ),
                strip="VOCdevkit",
            ),
        ),
    ),
    PublicDataset(
        "objects365",
        "objects365",
        "Objects365 v2 (2020)",
        _OBJECTS365,
        _OBJECTS365_PAGE,
        (
            Part(
                "val",
                _objects365(
                    "val/zhiyuan_objv2_val.json",
                    269_422_006,
                    "sha256:b5b6a043f3b36c1865240a3e23fc4cbbf627052d72b6a4428a993bf2549d4424",
                ),
                into="annotations",
            ),
            *(
                Part(
                    "val", _objects365(f"val/images/v{v}/patch{i}.tar.gz", name=f"val-patch{i}.tar.gz"), "val"
                )
                for v, i in _VAL_PATCHES
            ),
            Part("train", _objects365("train/zhiyuan_objv2_train.tar.gz", 1_336_483_164), into="annotations"),
            *(
                Part("train", _objects365(f"train/patch{i}.tar.gz", name=f"train-patch{i}.tar.gz"), "train")
                for i in range(51)
            ),
        ),
    ),
    PublicDataset(
        "crowdhuman",
        "crowdhuman",
        "CrowdHuman",
        _CROWDHUMAN,
        _CROWDHUMAN_PAGE,
        (
            *(Part("val", _crowdhuman(name)) for name in ("annotation_val.odgt", "CrowdHuman_val.zip")),
            *(
                Part("train", _crowdhuman(name))
                for name in (
                    "annotation_train.odgt",
                    *(f"CrowdHuman_train0{i}.zip" for i in (1, 2, 3)),
                )
            ),
        ),
    ),
)
