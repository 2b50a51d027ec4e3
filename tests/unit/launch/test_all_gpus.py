"""``--device all``, ranges and ``cuda``: on this machine, on hosts, in files and in Python."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from commands import Outcome, called

from yolofleet import Model
from yolofleet.config.load import resolve_train
from yolofleet.fleet.hosts.fleet import load_fleet, parse_hosts
from yolofleet.support import devices
from yolofleet.support.errors import ConfigError

DRY = ("train", "--data", "shapes", "--model", "yolov5n", "--dry-run")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts the GPUs of a Linux driver")


def text_of(found: Outcome) -> str:
    return found.out + found.err


@pytest.fixture
def four_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program nvidia-smi that lists four GPUs."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(
        '#!/bin/sh\n[ "$1" = -L ] || exit 1\nfor i in 0 1 2 3; do echo "GPU $i: NVIDIA H100 (UUID: GPU-$i)"; done\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("typed", "plain"),
    [("0-3", "0,1,2,3"), ("1,4-5", "1,4,5"), ("cuda", "0"), ("cuda:1", "1"), ("cuda:0,cuda:2", "0,2"), ("CPU:2", "cpu:2"),
     ([0, 1], "0,1"), (0, "0"), ("", "auto"), ("ALL", "all")],
)  # fmt: skip
def test_other_forms_of_a_device(typed: object, plain: str) -> None:
    config, _ = resolve_train({"data": "shapes", "model": "yolov5n", "device": typed})
    assert config.value.device == plain


def test_all_is_every_gpu_of_this_machine(four_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = called(*DRY, "--device", "all")
    assert "--device all is --device 0,1,2,3" in text_of(found) and "4 processes" in text_of(found)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert "--device all is --device 0,1\n" in text_of(called(*DRY, "--device", "all"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = called(*DRY, "--device", "all")
    assert found.code == 2 and "has 4 GPUs, and CUDA_VISIBLE_DEVICES= hides all" in text_of(found)


def test_all_without_a_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    if devices.device_count():
        pytest.skip("this machine has GPUs")
    assert called(*DRY, "--device", "all").code == 2
    with pytest.raises(ConfigError, match="no GPU"):
        Model("yolov5n").train(data="shapes", device="all")
    found = called(*DRY, "--hosts", "localhost:all")
    assert found.code == 2 and "localhost:all: it has no GPU" in text_of(found)


def test_all_gpus_of_a_host_are_counted_there(four_gpus: None, tmp_path: Path) -> None:
    found = called(*DRY, "--hosts", "localhost:all")
    assert "localhost:all is localhost:4" in text_of(found) and "ranks 0 to 3" in text_of(found)
    (tmp_path / "fleet.yaml").write_text("hosts:\n- {host: localhost, gpus: all}\n")
    assert "ranks 0 to 3" in text_of(called(*DRY, "--fleet", tmp_path / "fleet.yaml"))


def test_ranges_of_hosts(tmp_path: Path) -> None:
    assert [host.device for host in parse_hosts("a:0-2,b:4-5,c:all").hosts] == ["0,1,2", "4,5", "all"]
    with pytest.raises(ConfigError, match="write 1-3"):
        parse_hosts("a:3-1")
    file = tmp_path / "fleet.yaml"
    file.write_text("hosts:\n- {host: a, device: 0-1}\n- {host: b, device: all}\n")
    assert [host.device for host in load_fleet(file).hosts] == ["0,1", "all"]


def test_a_job_of_a_scheduler_takes_all_gpus_that_it_asks_for() -> None:
    words = ("render", "slurm", "--data", "shapes", "--model", "yolov5n", "--device", "all", "--slurm")
    assert called(*words, "nodes=2,gpus=4").code == 0
    assert "the job asks for none" in text_of(called(*words, "nodes=2"))


def test_auto_names_the_gpus_that_it_leaves_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "device_count", lambda: 4)
    assert devices.unused_note("auto", 1) == (
        "this run uses GPU 0 and leaves GPUs 1, 2, 3 unused; --device all uses all 4"
    )
    assert devices.unused_note("0", 1) == devices.unused_note("auto", 4) == ""


def test_auto_says_that_torch_cannot_use_the_gpus_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(devices, "device_count", lambda: 0)
    monkeypatch.setattr(devices, "NVIDIA_GPUS", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert devices.unused_note("auto", 1) == ""
    for gpu in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / gpu).mkdir()
    note = devices.unused_note("auto", 2)
    assert note.startswith("this run uses the CPU, because torch ")
    assert "cannot use the 2 NVIDIA GPUs of this machine; yolofleet doctor says why" in note
    assert devices.unused_note("cpu", 1) == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the user has hidden them
    assert devices.unused_note("auto", 1) == ""
