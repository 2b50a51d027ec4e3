"""Where numbers of the original implementations lie, and what to do when they do not.

Small ones are in ``tests/parity/data``; large ones (weights, images) in a folder beside the checkout or in
``$YOLOFLEET_REFERENCE``. A test that needs an absent one skips and says so.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
PARITY = HERE / "parity" / "data"


def reference(relative: str) -> Path:
    """``fixtures/...``, ``weights/...`` or ``data/...`` of the reference folder; skips when absent."""
    root = Path(os.environ.get("YOLOFLEET_REFERENCE", HERE.parent.parent / "shared"))
    path = root / relative
    if not path.exists():
        pytest.skip(f"reference file {relative} is not here (set YOLOFLEET_REFERENCE)")
    return path


def parity(relative: str) -> Path:
    """A small numeric file of ``tests/parity/data``, which is always there."""
    return PARITY / relative
