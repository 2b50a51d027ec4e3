"""yolofleet: train YOLO-family detectors on any fleet, with one command and one result."""

from __future__ import annotations

import os
from typing import Any

# OpenCV reads its limit of pixels once, while it is loaded. Every import of a module of this package passes here first,
# so `import cv2` comes later. The value is images.header.MAX_PIXELS; one that is set already stays.
os.environ.setdefault("OPENCV_IO_MAX_IMAGE_PIXELS", str(1 << 28))

__version__ = "0.1.0"
__all__ = ["Trainer", "__version__", "load_model"]


def __getattr__(name: str) -> Any:  # torch is imported only when one of these is asked for
    if name in ("Trainer", "load_model"):
        from yolofleet import api

        return getattr(api, name)
    raise AttributeError(f"module 'yolofleet' has no attribute {name!r}")
