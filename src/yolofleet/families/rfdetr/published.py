"""The published weights of RF-DETR. Only files with a publicly known digest are downloaded. No torch here."""

from __future__ import annotations

from yolofleet.storage.fetch import Item

PLACE, ORIGIN = "https://storage.googleapis.com/rfdetr", "https://github.com/roboflow/rf-detr"
FILES = {  # name of the file, its address, and the MD5 that the authors' package rfdetr 1.11.2 compares
    "rfdetr-n": ("nano.pth", "nano_coco/checkpoint_best_regular.pth", "fb6504cce7fbdc783f7a46991f07639f"),
    "rfdetr-s": ("small.pth", "small_coco/checkpoint_best_regular.pth", "fb37061c1af7bace359c91b723a8d5c1"),
    "rfdetr-m": ("medium.pth", "medium_coco/checkpoint_best_regular.pth", "7223f764a87b863f02eb8d52bf0ce2ee"),
    "rfdetr-l": ("large-2026.pth", "rf-detr-large-2026.pth", "5cb72153541cbcb9aa6efa26222acc75"),
    "rfdetr-n-seg": ("seg-nano.pt", "rf-detr-seg-n-ft.pth", "9995497791d0ff1664a1d9ddee9cfd20"),
    "rfdetr-s-seg": ("seg-small.pt", "rf-detr-seg-s-ft.pth", "0a2a3006381d0c42853907e700eadd08"),
    "rfdetr-m-seg": ("seg-medium.pt", "rf-detr-seg-m-ft.pth", "a49af1562c3719227ad43d0ca53b4c7a"),
    "rfdetr-l-seg": ("seg-large.pt", "rf-detr-seg-l-ft.pth", "275f7b094909544ed2841c94a677d07e"),
}


def items() -> dict[str, Item]:
    """Return the files by the names of their built-in models."""
    return {
        name: Item(f"rf-detr-{file}", (f"{PLACE}/{path}",), None, f"md5:{digest}", "Apache-2.0", ORIGIN)
        for name, (file, path, digest) in FILES.items()
    }
