"""Numbers and names that other packages gave, most of them transformers 5.24.0, and the package itself where it is installed.

Weights, images and raw predictions are functions of names and seeds, so that ``data/detr`` holds results only. With the
package installed, each comparison has two runs: with the stored result, and with that of the package. To store results
again, install the package (``make test-extra EXTRA=parity`` does) and run::

    YOLOFLEET_RECORD=1 python -m pytest -m "not slow" tests/parity/test_detr_parity.py tests/parity/test_detr_loss_parity.py \\
      tests/parity/test_detr_weights.py tests/parity/test_detr_masks_parity.py
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from reference import parity

INSTALLED = find_spec("transformers") is not None
KEPT = 250  # values of an array


def transformers() -> Any:
    """Return the package, which must be installed."""
    import transformers

    transformers.utils.logging.disable_progress_bar()  # its thread would outlive the test
    return transformers


def each_result(
    key: str, ask: Callable[[], dict[str, Any]], installed: bool = INSTALLED
) -> Iterator[dict[str, Any]]:
    """Yield the stored result of ``ask``, and its result now if the package that it asks is installed.

    Args:
        key: name of a file of ``data/detr``.
        ask: returns arrays (:func:`some` shortens them) and values for JSON by name.
    """
    path = parity(f"detr/{key.replace(' ', '-')}.npz")
    if os.environ.get("YOLOFLEET_RECORD"):
        path.parent.mkdir(exist_ok=True)
        arrays: dict[str, Any] = {name: _stored(value) for name, value in ask().items()}
        np.savez_compressed(path, **arrays)
    with np.load(path) as file:
        yield {name: json.loads(v.tobytes()) if v.dtype == np.uint8 else v for name, v in file.items()}
    if installed:
        yield ask()


def _stored(value: Any) -> np.ndarray:
    """Return an array as it is, and other values as the bytes of their JSON."""
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    return np.frombuffer(json.dumps(value, separators=(",", ":")).encode(), np.uint8)


def some(values: Any) -> np.ndarray:
    """Return about ``KEPT`` values, evenly spread, at steps that no length of an axis divides; and the norm of all."""
    array = np.asarray(values.detach() if isinstance(values, torch.Tensor) else values)
    step = -(-array.size // KEPT)
    while step > 1 and not all(step % n for n in (2, 3, 5, 7, 11)):
        step += 1
    norm = np.linalg.norm(array.astype(np.float64))
    return np.append(array.reshape(-1)[::step], norm).astype(array.dtype)


def labels_of(targets: Any, kind: torch.dtype = torch.float64) -> list[dict[str, torch.Tensor]]:
    """Return the labels as the packages read them, image by image."""
    found = []
    for boxes, names in zip(targets.boxes, targets.classes, strict=True):
        real = names >= 0
        parts = torch.from_numpy(boxes[real]).to(kind), torch.from_numpy(names[real])
        found.append(dict(zip(("boxes", "class_labels"), parts, strict=True)))
    return found
