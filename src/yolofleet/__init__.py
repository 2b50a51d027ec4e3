"""yolofleet: train YOLO-family detectors on one device or many machines, with one command and equal results."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

# OpenCV reads its limit of pixels once, while it loads. Python runs this file before any other module of the package, so
# before `import cv2`. The value is images.header.MAX_PIXELS; a value of the user stays.
os.environ.setdefault("OPENCV_IO_MAX_IMAGE_PIXELS", str(1 << 28))
# CUDA reads this once, before it counts the GPUs. Every verb, the Python interface and the child processes then number GPUs
# as nvidia-smi does. CUDA's own order begins with the fastest one.
os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")

__version__ = "0.1.0"
__all__ = ["Callback", "Model", "TrainingRecipe", "__version__", "attach", "load_model"]
_FROM = {
    **dict.fromkeys(("Model", "attach", "load_model"), "yolofleet.cli.api"),
    "Callback": "yolofleet.training.callbacks",
    "TrainingRecipe": "yolofleet.families.recipe_class",
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:  # imports torch only if one of these is used
    if name in _FROM:
        return getattr(import_module(_FROM[name]), name)
    raise AttributeError(f"module 'yolofleet' has no attribute {name!r}")
