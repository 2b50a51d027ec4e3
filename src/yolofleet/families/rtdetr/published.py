"""The published weights of both families. Only files with a publicly known digest are downloaded. No torch here."""

from __future__ import annotations

from yolofleet.storage.fetch import Item

RTDETR, DFINE = "https://github.com/lyuwenyu", "https://github.com/Peterande"
RTDETR_FILES = {
    "r18": "v0.2/rtdetrv2_r18vd_120e_coco_rerun_48.1.pth",
    "r34": "v0.1/rtdetrv2_r34vd_120e_coco_ema.pth",
    "r50m": "v0.1/rtdetrv2_r50vd_m_7x_coco_ema.pth",
    "r50": "v0.1/rtdetrv2_r50vd_6x_coco_ema.pth",
    "r101": "v0.1/rtdetrv2_r101vd_6x_coco_from_paddle.pth",
}
DFINE_FILES = {size: f"dfinev1.0/dfine_{size}_coco.pth" for size in "nsmlx"}
DFINE_FILES |= {f"{size}-obj2coco": f"dfinev1.0/dfine_{size}_obj2coco.pth" for size in "smx"}
DFINE_FILES |= {"l-obj2coco": "dfinev1.0/dfine_l_obj2coco_e25.pth"}
KNOWN = {  # size in bytes and SHA-256; several projects pin them
    "r18": (81_198_974, "sha256:2ace52184b620204004509b72752ac7bfe64aadaf7fc1d076b18df8ab5a5c77e"),
    "n": (15_489_558, "sha256:41973938d2784d38a9836990d805b8392855ebf611aba55f0f7add90e110744c"),
    "s": (41_841_422, "sha256:48a6c8cc43eb57186843f752e2e8461ddd3326e0d3c575e71e6e960844683e89"),
}


def items() -> dict[str, Item]:
    """Return the files of RT-DETRv2 by the names of their built-in models."""
    return {f"rtdetrv2-{name}": _item(name, file, RTDETR, "RT-DETR") for name, file in RTDETR_FILES.items()}


def dfine_items() -> dict[str, Item]:
    """Return the files of D-FINE; ``-obj2coco`` were trained on Objects365 before COCO."""
    return {f"dfine-{name}": _item(name, file, DFINE, "D-FINE") for name, file in DFINE_FILES.items()}


def _item(name: str, file: str, owner: str, project: str) -> Item:
    url, (size, digest) = f"{owner}/storage/releases/download/{file}", KNOWN.get(name, (None, None))
    return Item(file.partition("/")[2], (url,), size, digest, "Apache-2.0", f"{owner}/{project}")
