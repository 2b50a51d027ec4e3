"""Probe files: refused where they are nonsense, scaled to other workloads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from yolofleet.fleet.plan.forecast import probe_path, probes_folder
from yolofleet.fleet.plan.inputs import Link, Workload
from yolofleet.fleet.plan.library import network_of
from yolofleet.fleet.plan.probe import MEASURED, link_of, machine_of, probe_of, read_probe
from yolofleet.support.errors import ConfigError

VALUES: dict[str, Any] = {
    "version": 1, "host": "a", "device": "cpu", "on_cpu": True, "devices": 2, "cores": 2.0, "memory_bytes": 8e9,
    "device_bytes": 0.0, "model": "yolov5n", "img": 320, "precision": "fp32",
    "passes": [{"images": 4, "seconds": 0.3}, {"images": 8, "seconds": 0.5}, {"images": 16, "seconds": 0.9}],
    "update_s": 0.02, "spread": 0.03, "load_s": 0.008, "cached_s": 0.002, "image_bytes": 1e5, "read_bytes_s": 1e9,
    "sums_between": [{"ranks": 2, "bytes": 1 << 20, "seconds": 0.0125}, {"ranks": 2, "bytes": 1 << 22, "seconds": 0.0440}],
    "val_image_s": 0.02, "val_end_s": 0.1, "save_s": 0.02, "start_s": 7.0,
}  # fmt: skip
WORK = Workload(
    network=network_of("yolov5n"),
    img=320,
    images=640,
    val_images=64,
    image_bytes=1e5,
    epochs=3,
    step_images=64,
    micro_batch=8,
)


def test_a_probe_comes_back_from_its_file(tmp_path: Path) -> None:
    probe = probe_of(VALUES)
    probe.write(tmp_path / "a.json")
    assert read_probe(tmp_path / "a.json") == probe


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "version: expected 1"),
        ({"passes": []}, "passes"),
        ({"img": "320"}, "img"),
        ({"load_s": -1.0}, "load_s"),
        ({"load_s": float("inf")}, "load_s"),
        ({"devices": 0}, "devices"),
        ({"memory": 1}, "memory"),
        ({"sums_inside": [{"ranks": 1, "bytes": 1, "seconds": 1.0}]}, "sums_inside"),
    ],
)
def test_nonsense_is_refused_with_its_place(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps({**VALUES, **change}))
    with pytest.raises(ConfigError, match=words) as caught:
        read_probe(path)
    assert "plan probe" in caught.value.hint


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"version": 1}', "\x00"])
def test_a_broken_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(ConfigError):
        read_probe(path)
    with pytest.raises(ConfigError, match="does not exist"):
        read_probe(tmp_path / "none.json")


def test_passes_give_a_line() -> None:
    assert probe_of(VALUES).pass_line() == pytest.approx((0.1, 0.05))


def test_sums_give_a_link() -> None:
    """Between two ranks a sum takes 2 latencies and each byte once: 2 x 1 ms + bytes / 1e8."""
    link = link_of(probe_of(VALUES).sums_between, on_cpu=True)
    assert link.bytes_s == pytest.approx(1e8, rel=0.01) and link.latency_s == pytest.approx(1e-3, rel=0.05)
    assert isinstance(link, Link) and not link.tree


def test_another_network_and_size_scale_the_figures_and_the_doubt() -> None:
    probe, network = probe_of(VALUES), network_of("yolov5n")
    same = machine_of(probe, WORK, network)
    assert same.image_s == pytest.approx(0.05) and same.doubt == MEASURED
    larger = machine_of(probe, replace(WORK, network=network_of("yolov5s"), img=640), network)
    assert larger.image_s == pytest.approx(0.05 * 4 * network_of("yolov5s").gflops / network.gflops)
    assert larger.cached_s == pytest.approx(0.008)  # augmentation follows the pixels
    assert larger.load_s == pytest.approx(0.006 + 0.008)  # decoding follows the files
    assert larger.doubt.compute > MEASURED.compute


def test_one_process_has_the_cores_of_two() -> None:
    assert machine_of(probe_of(VALUES), WORK, network_of("yolov5n"), 1).image_s == pytest.approx(0.025)


def test_measured_memory_decides_what_fits() -> None:
    # 1 GB and 0.25 GB an image: 60 images need 16 GB
    passes = [{**row, "device_bytes": int(1e9 + row["images"] * 0.25e9)} for row in VALUES["passes"]]
    probe = probe_of({**VALUES, "passes": passes, "on_cpu": False, "device_bytes": 16e9})
    network = network_of("yolov5n")
    fits = {n: machine_of(probe, replace(WORK, micro_batch=n), network) for n in (59, 61)}
    assert fits[59].fits and not fits[61].fits
    assert fits[61].needed_bytes == pytest.approx(16.25e9)
    # a little less than four times, because of the state
    double = machine_of(probe, replace(WORK, img=640), network)
    assert 3 < double.needed_bytes / machine_of(probe, WORK, network).needed_bytes < 4


def test_the_name_of_a_host_leads_to_no_other_folder() -> None:
    assert probe_path("user@node-1.lan").name == "node-1.lan.json"
    for name in ("../../etc/x", "/etc/x", "a\\..\\b"):
        assert probe_path(name).parent == probes_folder()
