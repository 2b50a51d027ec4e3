"""Published machines: found by their names, replaced by a price file, refused where it is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from yolofleet.fleet.plan.inputs import Workload
from yolofleet.fleet.plan.library import Library, network_of
from yolofleet.support.errors import ConfigError

WORK = Workload(
    network=network_of("yolov5l"), img=640, images=100, val_images=10, image_bytes=1.6e5, epochs=1, step_images=64,
    micro_batch=16, precision="fp16",
)  # fmt: skip


def test_every_machine_has_a_device_and_a_source():
    library = Library.read()
    for machine in library.machines.values():
        assert machine.device in library.devices and machine.source in library.sources
    assert {"A100", "V100", "H100", "L4", "T4"} <= library.devices.keys()


def test_a_part_of_a_machine_has_its_part_of_cores_memory_and_price():
    library = Library.read()
    whole, part = library.machine("8xA100", WORK), library.machine("2xA100", WORK)
    assert whole.cores == 4 * part.cores and whole.price_hour == pytest.approx(4 * part.price_hour)
    assert library.find("p4d.24xlarge")[1] == library.find("8xA100")[1]
    assert library.find("A100")[0] == "a2-highgpu-1g"


@pytest.mark.parametrize(
    "name",
    ["8xA900", "0xA100", "", "x", "8x8xA100", "16xA100", "A100; rm", "2xp4d.24xlarge", "9" * 5000 + "xA100"],
)
def test_unknown_machines_get_one_message(name):
    with pytest.raises(ConfigError) as caught:
        Library.read().machine(name, WORK)
    assert caught.value.hint


def test_a_device_without_a_number_format_is_refused():
    from dataclasses import replace

    with pytest.raises(ConfigError, match="V100 cannot compute in bf16"):
        Library.read().machine("8xV100", replace(WORK, precision="bf16"))


def test_a_price_file_replaces_prices_and_adds_machines(tmp_path: Path):
    path = tmp_path / "prices.yaml"
    path.write_text(
        "machines:\n"
        "  p4d.24xlarge: {price_hour: 20}\n"
        "  desk: {device: A100, devices: 2, vcpus: 16, memory_gib: 64, network_gbit: 1, price_hour: 0.5, source: here}\n"
    )
    library = Library.read(path)
    assert library.machine("8xA100", WORK).price_hour == 20
    assert library.machine("desk", WORK).between.bytes_s == pytest.approx(0.7e9 / 8)
    assert Library.read().machine("8xA100", WORK).price_hour == 32.77


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("machines: {p4d.24xlarge: {price_hour: cheap}}", "p4d.24xlarge: price_hour"),
        ("machines: {p4d.24xlarge: {price_hour: -1}}", "price_hour"),
        ("machines: {p4d.24xlarge: {prise: 1}}", "prise"),
        ("machines: {new: {device: A100}}", "new: devices"),
        ("machines: {p4d.24xlarge: 3}", "should be a valid dictionary"),
        ("prices: {p4d.24xlarge: 3}", "not a section"),
        ("machines: 3", "not a section"),
        ("machines: {p4d.24xlarge: {device: A900}}", "unknown device"),
        ("- 1", "key: value"),
    ],
)
def test_a_wrong_price_file_gets_one_message(tmp_path: Path, text: str, words: str):
    path = tmp_path / "prices.yaml"
    path.write_text(text + "\n")
    with pytest.raises(ConfigError, match=words) as caught:
        Library.read(path)
    assert str(path) in (caught.value.source or caught.value.what)
