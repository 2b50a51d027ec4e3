"""The published weights of YOLOv5 and YOLOv3. Only files with a publicly known digest are downloaded. No torch here."""

from __future__ import annotations

from yolofleet.families.yolov5.presets import SIZES
from yolofleet.storage.fetch import Item

LICENCE = "AGPL-3.0 (GPL-3.0 when they were released): conditions on what is built with them"
YOLOV5 = {  # size in bytes and SHA-256, release v7.0
    "n": (4_062_133, "4f180cf23ba0717ada0badd6c685026d73d48f184d00fc159c2641284b2ac0a3"),
    "s": (14_808_437, "8b3b748c1e592ddd8868022e8732fde20025197328490623cc16c6f24d0782ee"),
    "m": (42_806_829, "61d933360ba5a7733a36764996c800287d973889d875227f5beedd2473a97a56"),
    "l": (93_622_629, "2f603b7354c25454d1270663a14d8ddc1eea98e5eebc1d84ce0c6e3150fa155f"),
    "x": (174_114_333, "9f27a794fa0308e2606f90565164571d6f0a0ba18a3ce2e5e5d323b71c157859"),
    "n6": (7_190_229, "496c05a2b991da15acc6c4408c63da287f2513a46c6756618776d4dd71170781"),
    "s6": (25_978_837, "95bda9019ada63f37338308d0c81a66047a6fbaba061abaff271ba9334cf2a6f"),
    "m6": (72_308_357, "7afe7fa0f29a8351467200a2a5a33c7996d1155ed6636c7edd8ca70b14951c64"),
    "l6": (154_521_589, "b357b77f646b0190912985937c44e2923441369d5fda69ba86da2aa919212618"),
    "x6": (282_720_357, "257c991b216d625427dc4d9c7c76d6c6d93cf3732797538da34bdc02f97bfef0"),
}


def items() -> dict[str, Item]:
    """Return the files by the names of their built-in models."""
    found = {
        f"yolov5{size}": _release("yolov5", "v7.0", f"yolov5{size}", *facts) for size, facts in YOLOV5.items()
    }
    for size in SIZES:
        found[f"yolov5{size}-seg"] = _release("yolov5", "v7.0", f"yolov5{size}-seg")
    for name in ("yolov3", "yolov3-spp", "yolov3-tiny"):
        found[name] = _release("yolov3", "v9.6.0", name)
    return found


def _release(
    repository: str, tag: str, name: str, size: int | None = None, sha256: str | None = None
) -> Item:
    page, file = f"https://github.com/ultralytics/{repository}/releases", f"{name}.pt"
    digest = f"sha256:{sha256}" if sha256 else None
    return Item(file, (f"{page}/download/{tag}/{file}",), size, digest, LICENCE, f"{page}/tag/{tag}")
