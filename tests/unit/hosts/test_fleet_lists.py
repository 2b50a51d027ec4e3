"""Lists of hosts that cannot be meant: what is said about them, and the way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from yolofleet.config.load import resolve_doctor, resolve_train, resolve_val
from yolofleet.fleet.hosts.fleet import load_fleet, parse_hosts
from yolofleet.fleet.launch.machines import fleet_of
from yolofleet.fleet.launch.plan import plan_run, start
from yolofleet.support.errors import ConfigError

TRAIN = {"data": "d.yaml", "model": "yolov5n"}


@pytest.mark.parametrize("name", ["hosts", "fleet"])
@pytest.mark.parametrize("value", ["", "  "])
def test_an_empty_list_of_hosts_is_not_this_machine(name: str, value: str) -> None:
    """``--hosts "$NODES"`` with NODES unset."""
    for config in (
        resolve_train({**TRAIN, name: value})[0],
        resolve_val({"data": "d", "weights": "w.safetensors", name: value}),
    ):
        with pytest.raises(ConfigError, match=f"--{name} is given, and empty"):
            fleet_of(config)


def test_the_doctor_does_not_examine_this_machine_instead() -> None:
    from yolofleet.cli.doctor import examine

    with pytest.raises(ConfigError, match="--hosts is given, and empty"):
        examine(resolve_doctor({"hosts": "", "quick": True}))


def test_an_empty_setting_of_a_stored_run_is_a_default(tmp_path: Path) -> None:
    from yolofleet.config.stored.job import dump_config, load_job

    path = tmp_path / "config.yaml"
    path.write_text(dump_config(*resolve_train(TRAIN)))
    assert fleet_of(load_job(path).config) is None
    assert fleet_of(resolve_train({}, config_file=str(path))[0]) is None


@pytest.mark.parametrize(
    ("where", "says"),
    [({"hosts": "nowhere:2"}, "needs 2 numbers >= 0"), ({"device": "cpu"}, "needs 1 number >= 0")],
)
def test_shares_are_counted_before_anything_starts(where: dict[str, str], says: str) -> None:
    config, recipe = resolve_train({**TRAIN, **where, "shares": "3,1,1"})
    with pytest.raises(ConfigError, match=says):
        start(plan_run(config, recipe))


@pytest.mark.parametrize(
    ("text", "way_out"),
    [
        ("m1:0", "m1:+0 is GPU 0 alone"),
        ("m1:0,1", "m1:0+1 are GPUs 0 and 1"),
        ("m1:65", "1 to 64"),
        ("m1:cpu:999", "m1:cpu:1 to m1:cpu:256"),
        ("m1:cpu:0", "m1:cpu:1 to m1:cpu:256"),
        ("m1:+00+0", "its GPUs 0 and 2"),
        ("m1:1,2", "its GPUs 0 and 2"),
        ("m1:2,1.5:2", "its GPUs 0 and 2"),
    ],
)
def test_devices_that_are_none_have_a_way_out(text: str, way_out: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_hosts(text, "0")
    assert way_out in caught.value.hint and caught.value.source == "--hosts"
    assert "--device" not in caught.value.what


@pytest.mark.parametrize("text", ["a:2,a:+3", "localhost:1,localhost:1", "me@a:1,a:1", "A:1,a:1"])
def test_a_machine_is_in_the_list_once(text: str) -> None:
    with pytest.raises(ConfigError, match="is named twice"):
        parse_hosts(text)


def test_addresses_are_hosts() -> None:
    assert [host.name for host in parse_hosts("10.0.0.1:2,me@10.0.0.2:2,8gpu:8").hosts] == [
        "10.0.0.1", "me@10.0.0.2", "8gpu"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "line", "says", "way_out"),
    [
        ("hosts:\n- {host: a, gpu: 8}\n", 2, "unknown key gpu", "gpus"),
        ("hosts:\n- {host: a, gpus: 2, device: cpu}\n", 2, "both choose its devices", "leave one out"),
        ("hosts:\n- {host: '-oX', gpus: 2}\n", 2, "not a host's name", "host: node-a"),
        ("hosts: a:8\n", 1, "not a list", "hosts: [a:8, b:4]"),
        ("defaults: 3\nhosts: [a:1]\n", 1, "not a mapping", "docs/several-machines.md"),
        ("port: 29500\n", 0, "names no hosts", "hosts: [a:8, b:4]"),
        ("hosts: [null]\n", 1, "hosts: null is not a host", "hosts: [a:8, b:4]"),
        ("hosts: [1.5]\n", 1, "hosts: 1.5 is not a host", "hosts: [a:8, b:4]"),
        ("defaults: {gpus: 1}\nhosts: [2024-01-01]\n", 2, "2024-01-01 is not a host", "host a"),
        ("hosts:\n- {host: null, gpus: 1}\n", 2, "host: null is not a host's name", "host: node-a"),
        ("hosts:\n- {host: a, gpus: {a: 1}}\n", 2, "gpus: a mapping of 1 names no devices", "gpus: [0]"),
        ("hosts:\n- {host: a, gpus: true}\n", 2, "gpus: true names no devices", "gpus: [0]"),
        ("hosts:\n- {host: a, gpus: [0, null]}\n", 2, "gpus: a list of 2 names no devices", "gpus: [0]"),
        ("hosts:\n- {host: a, gpus: 0}\n", 2, "gpus: 0 names no devices", "gpus: [0]"),
        ("hosts:\n- {host: a, device: 'cpu:999'}\n", 2, "device: cpu:999 is not a valid device", "cpu:256"),
        ("hosts:\n- {host: a, device: '0,0'}\n", 2, "device: 0,0 is not a valid device", "0,2"),
        ("hosts: [a:1]\nport: [29600]\n", 2, "port: a list of 1 is not a whole number", "29500"),
        ("hosts: [a:1]\nport: 80\n", 2, "port: 80 is below 1024", "at most 65000"),
        ("hosts: [a:1]\nport: true\n", 2, "port: true is not a whole number", "29500"),
        ("hosts: [a:1]\nport: 29600.5\n", 2, "port: 29600.5 is not a whole number", "29500"),
        ("hosts: [a:1]\ngrace_s: .nan\n", 2, "grace_s: nan is not a finite number", "seconds"),
        ("hosts: []\n", 0, "0 hosts", "docs/several-machines.md"),
        ("hosts:\n- {host: a, gpus: 1, env: {A-B: 1}}\n", 2, "env: A-B: 1 is not a valid", "letters"),
        ("hosts:\n- {host: a, gpus: 1, folder: [x]}\n", 2, "folder: a list of 1 is not", "the path of the working folder"),
        ("hosts: [&x a:1, *x]\n", 1, "aliases", "replace each alias by its value"),
    ],
)  # fmt: skip
def test_slips_in_a_file(tmp_path: Path, text: str, line: int, says: str, way_out: str) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says) as caught:
        load_fleet(path)
    assert caught.value.source == (f"{path}:{line}" if line else str(path))
    assert way_out in caught.value.hint
