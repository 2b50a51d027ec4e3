"""COCO files that tests write."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


def image(number: Any, name: str, width: Any = 64, height: Any = 48) -> dict[str, Any]:
    return {"id": number, "file_name": name, "width": width, "height": height}


def label(number: Any, of: Any, bbox: Any, category: Any = 1, **more: Any) -> dict[str, Any]:
    """An annotation of the image ``of``."""
    return {"id": number, "image_id": of, "category_id": category, "bbox": bbox, "iscrowd": 0, **more}


def write_coco(
    path: Path, images: Sequence[Any], labels: Sequence[Any], categories: Iterable[Any] = ((1, "fox"),)
) -> Path:
    """Write a file of these entries; categories are pairs of a number and a name, or entries."""
    path.parent.mkdir(parents=True, exist_ok=True)
    named = [c if isinstance(c, dict) else {"id": c[0], "name": c[1]} for c in categories]
    content = {"images": images, "annotations": labels, "categories": named}
    path.write_text(json.dumps(content), encoding="utf-8")
    return path
