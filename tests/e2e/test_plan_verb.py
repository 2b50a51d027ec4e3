"""`yolofleet plan probe` and `plan`, on processes of this machine."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from commands import called, small_shapes, working_in
from small_files import TINY

from yolofleet.fleet.plan.probe import read_probe

SMALL = ["--model", str(TINY), "--img", "64", "--batch", "8", "--nominal-batch", "8", "--micro-batch", "4", "--threads", "1"]  # fmt: skip


@pytest.mark.slow
def test_a_probe_and_a_plan_from_it(tmp_path: Path) -> None:
    data = small_shapes(tmp_path, images=40)
    # passes of 8 and of 4 images: the ranks have unequal work
    unequal = ["--batch", "12", "--nominal-batch", "12", "--micro-batches-per-pass", "2"]
    more = ["--device", "cpu:2", "--steps", "2", "--out", "p.json"]
    with working_in(tmp_path):
        probed = called("plan", "probe", "--data", data, *SMALL, *unequal, *more)
        assert probed.code == 0, probed.err
        probe = read_probe(tmp_path / "p.json")
        assert probe.devices == 2 and probe.on_cpu and probe.model == TINY.stem and probe.img == 64
        assert [one.bytes for one in probe.sums_inside] == [64 << 10, 1 << 20, 4 << 20]
        assert not probe.sums_between
        assert probe.sums_inside[0].ranks == 2 and probe.cached_s <= probe.load_s and probe.start_s > 0
        assert not [
            path for path in tmp_path.rglob("*") if "yolofleet-probe" in path.name or path.name == "runs"
        ]

        planned = called(
            "plan", "--probe", "p.json", "--data", data, *SMALL[:-2], "--epochs", "3", "--json", "-"
        )
        assert planned.code == 0, planned.err
        row = json.loads(planned.out)["fleets"][0]
        assert row["devices"] == 2 and row["slow"]["images_per_s"] < row["fast"]["images_per_s"]


@pytest.mark.slow
def test_a_rank_without_work_is_measured_with_the_others(tmp_path: Path) -> None:
    data = small_shapes(tmp_path, images=40)
    work = ["--batch", "4", "--nominal-batch", "4", "--device", "cpu:2", "--steps", "1", "--out", "p.json"]
    with working_in(tmp_path):
        probed = called("plan", "probe", "--data", data, *SMALL, *work)
        assert probed.code == 0, probed.err
        assert math.isfinite(read_probe(tmp_path / "p.json").load_s)


def test_a_number_of_images_needs_no_data_set(tmp_path: Path) -> None:
    words = ["plan", "fleets", "--machine", "8xH100", "--model", "yolov5s", "--images", "118287"]
    with working_in(tmp_path):
        done, whole = called(*words), called(*words, "--val-images", "5000")
        missing = called(*words[:-2], "--val-images", "5000")
    assert "118,287 images" in done.out and done.out != whole.out, done.err
    assert missing.code == 2 and "--data is missing" in missing.err
