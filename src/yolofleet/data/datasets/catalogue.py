"""The table of public data sets: files, sizes, digests and licences.

Digests are those that the publishers or well-known libraries (torchvision, TensorFlow Datasets) state for these files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from yolofleet.storage.fetch import Item
from yolofleet.support.errors import ConfigError


@dataclass(frozen=True)
class Part:
    """One file of a data set.

    Attributes:
        name: of the part, for ``download_dataset``; several files may share a name.
        into: folder below the data set's own that receives the file or the content of the archive.
        strip: leading folder of the archive's members that is removed.
        is_usual: downloaded unless parts are named.
    """

    name: str
    item: Item
    into: str = ""
    strip: str = ""
    is_usual: bool = True


@dataclass(frozen=True)
class PublicDataset:
    """One data set of the table.

    Attributes:
        name: as typed after ``--data``.
        folder: its folder below ``datasets``.
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
        """Return the parts with these names, or the usual ones for (). Raise ConfigError for an unknown name."""
        for name in names:
            if name not in self.part_names:
                raise ConfigError(
                    f"data set {self.name} has no part {name!r:.60}",
                    hint=f"parts: {', '.join(self.part_names)}",
                )
        return [part for part in self.parts if (part.name in names if names else part.is_usual)]

    def size_bytes(self, names: Sequence[str] = ()) -> int | None:
        """Return the size of the files to download; None if one is unknown."""
        sizes = [part.item.size_bytes for part in self.chosen(names)]
        return None if None in sizes else sum(size or 0 for size in sizes)


def datasets() -> tuple[PublicDataset, ...]:
    """Return all data sets of the table."""
    return _TABLE


_COCO = "annotations CC BY 4.0, images under Flickr's terms of use"
_COCO_PAGE = "https://cocodataset.org/#termsofuse"
_COCO128_PAGE = "https://github.com/ultralytics/assets/releases/tag/v0.0.0"
_VOC = "images under Flickr's terms of use"
_VOC_PAGE = "http://host.robots.ox.ac.uk/pascal/VOC/"
_OBJECTS365 = "annotations CC BY 4.0, images for research"
_OBJECTS365_PAGE = "https://www.objects365.org"


def _item(
    path: str, hosts: Sequence[str], size_bytes: int | None, sha256: str, licence: str, page: str
) -> Item:
    name = path.split("/")[-1]
    return Item(
        name, tuple(f"{host}/{path}" for host in hosts), size_bytes, f"sha256:{sha256}", licence, page
    )


def _coco(path: str, size_bytes: int | None, sha256: str) -> Item:
    # COCO's host has no certificate for its own name, so S3's address comes first.
    hosts = ("https://s3.amazonaws.com/images.cocodataset.org", "http://images.cocodataset.org")
    return _item(path, hosts, size_bytes, sha256, _COCO, _COCO_PAGE)


def _voc(path: str, size_bytes: int, sha256: str) -> Part:
    hosts = ("https://thor.robots.ox.ac.uk/pascal/VOC", "http://host.robots.ox.ac.uk/pascal/VOC")
    part = "2007-test" if "test" in path else path[3:7]
    return Part(part, _item(path, hosts, size_bytes, sha256, _VOC, _VOC_PAGE), strip="VOCdevkit")


def _objects365(path: str, size_bytes: int | None = None, digest: str | None = None, name: str = "") -> Item:
    base = "https://dorc.ks3-cn-beijing.ksyun.com/data-set/2020Objects365%E6%95%B0%E6%8D%AE%E9%9B%86"
    name = name or path.split("/")[-1]
    return Item(name, (f"{base}/{path}",), size_bytes, digest, _OBJECTS365, _OBJECTS365_PAGE)


# fmt: off
_COCO128_PARTS = (
    Part("all", Item(
        "coco128.zip",
        ("https://github.com/ultralytics/assets/releases/download/v0.0.0/coco128.zip",
         "https://github.com/ultralytics/yolov5/releases/download/v1.0/coco128.zip"),
        6_983_030, "sha256:61e5e3028863d8ffc3b81d6a514603954889f0edd5e4b44c4ce60b2da99aeb8e", _COCO, _COCO128_PAGE,
    ), strip="coco128"),
)
_COCO_PARTS = (
    Part("annotations", _coco("annotations/annotations_trainval2017.zip", 252_907_541,
         "113a836d90195ee1f884e704da6304dfaaecff1f023f49b6ca93c4aaae470268")),
    Part("val", _coco("zips/val2017.zip", 815_585_330,
         "4f7e2ccb2866ec5041993c9cf2a952bbed69647b115d0f74da7ce8f4bef82f05"), into="images"),
    Part("train", _coco("zips/train2017.zip", 19_336_861_798,
         "69a8bb58ea5f8f99d24875f21416de2e9ded3178e903f1f7603e283b9e06d929"), into="images"),
    Part("test", _coco("zips/test2017.zip", 6_646_970_404,
         "c7908c3c9f94ba2f3340ebbeec58c25db6be8774f18d68c2f15d0e369d95baba"), into="images", is_usual=False),
    Part("test", _coco("annotations/image_info_test2017.zip", None,
         "e52f412dd7195ac8f98d782b44c6dd30ea10241e9f42521f67610fbe055a74f8"), is_usual=False),
)
_VOC_PARTS = (
    _voc("voc2007/VOCtrainval_06-Nov-2007.tar", 460_032_000,
         "7d8cd951101b0957ddfd7a530bdc8a94f06121cfc1e511bb5937e973020c7508"),
    _voc("voc2007/VOCtest_06-Nov-2007.tar", 451_020_800,
         "6836888e2e01dca84577a849d339fa4f73e1e4f135d312430c4856b5609b4892"),
    _voc("voc2012/VOCtrainval_11-May-2012.tar", 1_999_639_040,
         "e14f763270cf193d0b5f74b169f44157a4b0c6efa708f4dd0ff78ee691763bcb"),
)
_VAL_PATCHES = (*((1, i) for i in range(16)), *((2, i) for i in range(16, 44)))
_OBJECTS365_PARTS = (
    Part("val", _objects365("val/zhiyuan_objv2_val.json", 269_422_006,
         "sha256:b5b6a043f3b36c1865240a3e23fc4cbbf627052d72b6a4428a993bf2549d4424"), into="annotations"),
    *(Part("val", _objects365(f"val/images/v{v}/patch{i}.tar.gz", name=f"val-patch{i}.tar.gz"), "val")
      for v, i in _VAL_PATCHES),
    Part("train", _objects365("train/zhiyuan_objv2_train.tar.gz", 1_336_483_164), into="annotations"),
    *(Part("train", _objects365(f"train/patch{i}.tar.gz", name=f"train-patch{i}.tar.gz"), "train") for i in range(51)),
)
_TABLE = (
    PublicDataset("coco128", "coco128", "COCO128, the first 128 images of COCO train2017", _COCO, _COCO128_PAGE, _COCO128_PARTS),
    PublicDataset("coco", "coco", "COCO 2017", _COCO, _COCO_PAGE, _COCO_PARTS),
    PublicDataset("voc", "VOCdevkit", "Pascal VOC 2007 and 2012", _VOC, _VOC_PAGE, _VOC_PARTS),
    PublicDataset("objects365", "objects365", "Objects365 v2 (2020)", _OBJECTS365, _OBJECTS365_PAGE, _OBJECTS365_PARTS),
)
# fmt: on
