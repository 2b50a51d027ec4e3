"""Published tables, predicted: YOLOv5l on 1, 2, 4 and 8 A100, and PP-YOLOE on several machines of 8 V100."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[3] / "docs"
TABLES = runpy.run_path(str(DOCS / "plan_tables.py"))


def test_yolov5l_on_several_a100_follows_from_one():
    """One constant is fitted on the first row; the others are within 8 %."""
    first, *others = TABLES["yolov5l_rows"]()
    assert abs(first.error) < 0.01
    for row in others:
        assert abs(row.error) < 0.08, row


def test_validation_by_one_rank_stays_constant_and_is_shared_here():
    for row in TABLES["validation_rows"]():
        assert abs(row.error) < 0.08, row
    shared = [TABLES["yolov5l"](devices, val_devices=devices)[1] for devices in (1, 2, 4, 8)]
    for devices, seconds in zip((1, 2, 4, 8), shared, strict=True):
        assert seconds - 5 == pytest.approx((shared[0] - 5) / devices, rel=0.01)  # but for the end, 5 s


def test_ppyoloe_on_several_machines_follows_from_one_with_one_input_term():
    rows = TABLES["paddle_rows"]()
    assert len(rows) == 5
    for row in rows:
        assert abs(row.error) < 0.20, row


def test_the_page_has_the_tables_of_the_library():
    text = (DOCS / "plan.md").read_text(encoding="utf-8")
    assert TABLES["written"](text) == text, "run: python docs/plan_tables.py"
