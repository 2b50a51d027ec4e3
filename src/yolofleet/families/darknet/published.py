"""The published weights of Darknet. Only files with a publicly known digest are downloaded. No torch here."""

from __future__ import annotations

from yolofleet.storage.fetch import Item

LICENCE = "public domain (YOLO licence)"
HOSTS = ("https://data.pjreddie.com/files", "https://pjreddie.com/media/files")
FILES = {
    "yolov3": (248_007_048, "523e4e69e1d015393a1b0a441cef1d9c7659e3eb2d7e15f793f060a21b32f297"),
    "yolov3-spp": (252_209_544, "87a1e8c85c763316f34e428f2295e1db9ed4abcec59dd9544f8052f50de327b4"),
    "yolov3-tiny": (35_434_956, "dccea06f59b781ec1234ddf8d1e94b9519a97f4245748a7d4db75d5b7080a42c"),
}


def items() -> dict[str, Item]:
    """Return the files by the names of their built-in models."""
    return {
        f"darknet-{name}": Item(
            f"{name}.weights",
            tuple(f"{host}/{name}.weights" for host in HOSTS),
            size,
            f"sha256:{sha256}",
            LICENCE,
            "https://pjreddie.com/darknet/yolo/",
        )
        for name, (size, sha256) in FILES.items()
    }
