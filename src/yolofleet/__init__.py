"""yolofleet: train YOLO-family detectors on any fleet, with one command and one result."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["Trainer", "__version__", "load_model"]


def __getattr__(name: str) -> Any:  # torch is imported only when one of these is asked for
    if name in ("Trainer", "load_model"):
        from yolofleet import api

        return getattr(api, name)
    raise AttributeError(f"module 'yolofleet' has no attribute {name!r}")
