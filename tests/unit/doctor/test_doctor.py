"""What the doctor makes of what it saw: one sick organ at a time."""

from __future__ import annotations

import ast
import copy
import io
import json
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

import yolofleet
from yolofleet.cli import doctor as cli_doctor
from yolofleet.cli import main
from yolofleet.config.load import resolve_doctor
from yolofleet.config.schema import MOST_LOADERS, TrainConfig
from yolofleet.fleet.doctor.findings import (
    LEVELS,
    Finding,
    as_json,
    exit_code,
    finding,
    kinds,
    print_findings,
)
from yolofleet.fleet.doctor.gpus import _has_kernels, visible_gpus
from yolofleet.fleet.doctor.host_facts import ConnectionTest, HostFacts, Interface
from yolofleet.fleet.doctor.local import QUICK, judge_host, preflight
from yolofleet.fleet.doctor.log_rules import RULES
from yolofleet.fleet.doctor.network import gloo_choice, matches, nccl_choice, usable, wrong_kind
from yolofleet.fleet.hosts.agent_process import agent_environment
from yolofleet.fleet.hosts.fleet import Fleet
from yolofleet.fleet.hosts.ssh import REASONS
from yolofleet.fleet.launch.plan import NO_SUCH_GPU
from yolofleet.fleet.resources import ResourceEstimate, estimate_of, resources_of
from yolofleet.support.errors import ConfigError
from yolofleet.support.place import TORCHRUN

GIB, MIB = 1 << 30, 1 << 20


def card(name: str, *addresses: str, up: bool = True, kind: str = "", mtu: int = 1500) -> dict[str, Any]:
    return {
        "name": name,
        "addresses": list(addresses),
        "up": up,
        "mtu": mtu,
        "kind": kind,
        "speed_mbit": None,
    }


def interface(*arguments: Any, **named: Any) -> Interface:
    return Interface.model_validate(card(*arguments, **named))


def models(*cards: dict[str, Any]) -> list[Interface]:
    return [Interface.model_validate(one) for one in cards]


LO, ETH0 = card("lo", "127.0.0.1/8", "::1/128"), card("eth0", "10.0.0.1/24", "fe80::1/64")
DOCKER0 = card("docker0", "172.17.0.1/16", kind="bridge")
GPU = {
    "index": 0, "name": "T4", "driver": "550.54", "memory_mib": 15360, "used_mib": 3, "busy_percent": 0,
    "uncorrected_errors": 0,
}  # fmt: skip
DEVICE = {"name": "T4", "capability": "7.5", "memory": 15 * GIB, "problem": ""}
TORCH = {
    "version": "2.13.0+cu128", "cuda": "12.8", "hip": None, "gloo": True, "nccl": "2.27.3",
    "arch_list": ["sm_70", "sm_75", "sm_80"], "devices": [DEVICE], "problem": "",
}  # fmt: skip
HEALTHY: dict[str, Any] = {
    "host": "a",
    "platform": "linux",
    "network_id": "",
    "software": {
        "python": "3.11.7", "system": "Linux 6.1", "yolofleet": "0.1.0", "package_sha256": "0" * 64,
        "nccl": None, "torch": "2.13.0+cu128", "numpy": "2.4", "cv2": "5.0",
    },
    "libraries": {"problems": {}, "torch": TORCH},
    "gpus": {"state": "ok", "said": "", "cards": 1, "driver": "550.54", "gpus": [GPU]},
    "memory": {"total": 64 * GIB, "swap": 0, "available": 60 * GIB, "machine_available": 60 * GIB},
    "shm": {"size": 32 * GIB, "free": 32 * GIB, "largest": []},
    "cores": {"visible": 16, "usable": 16, "quota": None},
    "limits": {"open_files": 4096, "open_files_hard": 65536, "locked_memory": None},
    "variables": {},
    "cards": [LO, ETH0],
    "names": {"addresses": ["10.0.0.1"], "problem": ""},
    "port": {"port": 29500, "busy": False, "pid": None, "command": None, "user": None},
    "ephemeral_ports": [32768, 60999],
    "firewall": {"kind": "", "readable": True, "rules": [], "chains": []},
    "infiniband": [],
    "clock": {"time_s": 0.0, "synchronised": True},
    "disks": [{"folder": "runs", "below": "/", "size": 999 * GIB, "free": 99 * GIB, "write_bytes_per_s": 1e9, "problem": None}],
}  # fmt: skip
DISK = HEALTHY["disks"][0]
# validates 32 images of 640 px at a time
RUN = resources_of(TrainConfig(batch=32, micro_batch=16, device="0,1"))
NEED = ResourceEstimate(RUN, ranks=2, workers=4, on_gpu=True)


def sick(**changes: Any) -> dict[str, Any]:
    """A healthy machine but for these facts: ``shm__free=...`` is ``facts["shm"]["free"]``."""
    facts = copy.deepcopy(HEALTHY)
    for path, value in changes.items():
        *folders, name = path.split("__")
        inner = facts
        for folder in folders:
            inner = inner[folder]
        inner[name] = value
    return facts


def findings(facts: dict[str, Any], need: ResourceEstimate = NEED) -> dict[str, Finding]:
    """By code; those that are not in order."""
    model = HostFacts.model_validate(facts)
    found = judge_host(model, need, "a")
    assert {finding.where for finding in found} == {"a"}
    return {finding.code: finding for finding in found if finding.level != "ok"}


def test_a_healthy_machine_has_nothing_but_order() -> None:
    assert findings(sick()) == {}
    healthy = HostFacts.model_validate(HEALTHY)
    in_order = judge_host(healthy, NEED)
    assert {"versions", "gpus", "cores", "memory", "shm", "disk", "cards", "port"} <= {
        f.code for f in in_order
    }


@pytest.mark.parametrize(
    ("code", "level", "changes", "words"),
    [
        ("shm-small", "fault", {"shm__free": 60 * MIB, "shm__size": 64 * MIB}, "--shm-size=5g"),
        ("memory-short", "warn", {"memory__available": 2 * GIB}, "docker run --memory"),
        ("memory-short", "warn", {"memory__available": 7 * GIB, "memory__machine_available": 7 * GIB}, "--workers"),
        ("cores-quota", "warn", {"cores__quota": 4.0}, "--threads 2"),
        ("cores-crowded", "warn", {"cores__usable": 2}, "--workers 1"),
        ("open-files", "warn", {"limits__open_files": 256}, "ulimit -n 65536"),
        ("open-files", "warn", {"limits__open_files": 256, "limits__open_files_hard": 512}, "limits.conf"),
        ("clock-unkept", "note", {"clock__synchronised": False}, "set-ntp"),
        ("library-broken", "fault", {"libraries": {"problems": {"cv2": "ImportError: libGL.so.1: no"}, "torch": TORCH}}, "opencv-python-headless"),
        ("library-broken", "fault", {"libraries": {"problems": {"yaml": "No module named 'yaml'"}, "torch": TORCH}}, "pip install PyYAML"),
        ("libraries-unanswered", "fault", {"libraries": {"problem": "Illegal instruction (signal 4)", "late": False}}, "import torch"),
        ("libraries-unanswered", "note", {"libraries": {"problem": "no answer within 12 s", "late": True}}, "import torch"),
        ("torch-version", "warn", {"libraries__torch__version": "2.4.1"}, "torch>=2.6"),
        ("infiniband-down", "warn", {"infiniband": [{"adapter": "mlx5_0", "port": "1", "state": "DOWN", "rate": "", "layer": ""}]}, "ibstat"),
        ("locked-memory", "warn", {"infiniband": [{"adapter": "mlx5_0", "port": "1", "state": "ACTIVE", "rate": "", "layer": ""}], "limits__locked_memory": 8 * MIB}, "memlock"),
        ("shm-read-only", "fault", {"shm__read_only": True}, "remount,rw"),
        ("disk-low", "warn", {"disks": [{**DISK, "free": 3 * GIB}]}, ""),
        ("disk-low", "fault", {"disks": [{**DISK, "free": 100 * MIB}]}, ""),
        ("disk-refuses", "fault", {"disks": [{**DISK, "problem": "Read-only file system"}]}, "Read-only"),
        ("disk-slow", "warn", {"disks": [{**DISK, "write_bytes_per_s": 5e6}]}, "5 MB/s"),
        ("host-name-loopback", "note", {"names__addresses": ["127.0.1.1"]}, "127.0.1.1 a: 10.0.0.1 a"),  # as on Debian
        ("host-name-unknown", "warn", {"names": {"addresses": [], "problem": "not known"}}, "echo '10.0.0.1 a'"),
        ("host-name-elsewhere", "warn", {"names__addresses": ["10.9.9.9"]}, "10.0.0.1 a"),
        ("driver-silent", "fault", {"gpus__state": "silent", "gpus__said": "Driver/library version mismatch", "libraries__torch__devices": []}, "reboot"),
        ("gpu-none", "fault", {"gpus__gpus": [], "gpus__state": "none", "libraries__torch__devices": []}, "a:cpu in --hosts"),
        ("torch-without-cuda", "fault", {"libraries__torch": {**TORCH, "cuda": None, "devices": []}}, "pip uninstall torch"),
        ("cuda-unusable", "fault", {"libraries__torch__problem": "driver too old", "libraries__torch__devices": []}, "update the driver"),
        ("gpus-hidden", "warn", {"variables": {"CUDA_VISIBLE_DEVICES": ""}, "libraries__torch__devices": []}, "unset CUDA_VISIBLE_DEVICES"),
        ("gpu-broken", "fault", {"libraries__torch__devices": [{**DEVICE, "problem": "CUDA error: ECC"}]}, "xid"),
        ("gpu-kernels", "fault", {"libraries__torch__devices": [{**DEVICE, "capability": "9.0"}]}, "get-started"),
        ("gpu-errors", "warn", {"gpus__gpus": [{**GPU, "uncorrected_errors": 2}]}, "ECC"),
        ("gpu-taken", "warn", {"gpus__gpus": [{**GPU, "used_mib": 9000}]}, "--query-compute-apps"),
        ("gpus-unequal", "note", {"gpus__gpus": [GPU, {**GPU, "name": "A100"}]}, "--shares auto"),
        ("firewall", "note", {"firewall__kind": "ufw"}, "ufw allow from 10.0.0.0/24"),
        ("firewall-unseen", "note", {"firewall__readable": False}, "doctor --hosts"),
        ("firewall-unseen", "note", {"firewall__readable": False}, "that takes root, and the program nft or iptables"),
    ],
)  # fmt: skip
def test_one_sick_organ_is_named_with_what_to_type(code, level, changes, words) -> None:
    found = findings(sick(**changes))
    assert set(found) == {code}
    assert found[code].level == level
    assert words in " ".join((found[code].seen, found[code].why, found[code].fix))


def test_a_small_shm_matters_by_what_the_loader_processes_need() -> None:
    small = sick(shm__free=64 * MIB, shm__size=64 * MIB)
    without = ResourceEstimate(RUN, 2, 0, on_gpu=True)
    assert findings(small, without)["shm-default"].level == "warn"  # NCCL wants some
    # 2 ranks x 4 loader processes x (4 ahead + 1) x (16 + 32) images x 3 x 640 x 640 bytes
    assert NEED.shm_bytes == 2 * 4 * 5 * 48 * 3 * 640 * 640
    assert "2.2 GiB" in findings(small)["shm-small"].seen
    taken = findings(sick(shm__free=64 * MIB))["shm-small"]  # of 32 GiB: 31.9 are somebody else's
    assert "remount,size=37G" in taken.fix, "else the line would make it smaller"
    while_validating = sick(shm__free=1 * GIB)  # enough for the 0.73 GiB of training
    assert findings(while_validating)["shm-small"].level == "warn"


# -- GPUs ----------------------------------------------------------------------------------------------------


def test_a_gpu_that_somebody_else_uses_matters_where_it_is_asked_for() -> None:
    taken = sick(
        gpus__gpus=[GPU, {**GPU, "index": 1, "used_mib": 9000}],
        libraries__torch__devices=[DEVICE, DEVICE],
        gpu_count=2,
    )
    assert not findings(taken, asking_for(0)) and set(findings(taken, asking_for(0, 1))) == {"gpu-taken"}
    taken["variables"] = {"CUDA_VISIBLE_DEVICES": "1,0"}
    assert set(findings(taken, asking_for(0))) == {"gpu-taken"}, "the first one may be any"


def test_gpus_are_no_matter_of_a_run_on_the_cpu() -> None:
    on_cpu = estimate_of(resources_of(TrainConfig(device="cpu", img=64, batch=4)), cores=8, gpus=1)
    for changes in (
        {"gpus__state": "silent", "gpus__gpus": [], "libraries__torch__devices": []},
        {"libraries__torch": {**TORCH, "cuda": None, "devices": []}},
        {"gpus__gpus": [], "gpus__state": "none", "libraries__torch": {**TORCH, "cuda": None, "devices": []}},
        {"gpus__gpus": [{**GPU, "used_mib": 9000}]},
    ):
        assert {f.level for f in findings(sick(**changes), on_cpu).values()} == {"note"}


def asking_for(*gpu_ids: int) -> ResourceEstimate:
    return ResourceEstimate(RUN, len(gpu_ids), 4, on_gpu=True, gpu_ids=gpu_ids)


def quick(count: int | None, setting: str | None = None, version: str = "2.13.0") -> dict[str, Any]:
    """What the quick examination sees of a machine with so many GPUs."""
    facts = sick(gpu_count=count, software__torch=version)
    facts["variables"] = {} if setting is None else {"CUDA_VISIBLE_DEVICES": setting}
    for name in ("gpus", "libraries", "firewall", "clock", "infiniband"):
        del facts[name]
    return facts


@pytest.mark.parametrize(
    ("count", "setting", "usable"),
    [
        (4, None, 4),
        (4, "", 0),
        (4, "1", 1),
        (4, "0, 2,3", 3),
        (4, "0,7,1", 1),  # up to the one that is not there
        (4, "0,-1,1", 1),
        (4, "0,0", 0),
        (4, "2gpu,none", 1),
        (4, "GPU-5a,GPU-7b", 2),
        (4, "MIG-5a", 1),
        (None, "MIG-5a,MIG-7b", None),
        (4, "MIG-5a,MIG-7b", 1),
        (0, "0,1", 0),
        (None, "0", None),
    ],
)
def test_gpus_that_are_visible_are_those_that_torch_counts(count, setting, usable) -> None:
    assert visible_gpus(count, setting) == usable


@pytest.mark.parametrize(
    ("facts", "ids", "code", "words"),
    [
        (quick(8), range(8), None, ""),
        (quick(4), range(8), "gpu-missing", "there are 4 GPUs, and GPUs 0 to 7 are asked for"),
        (quick(1), [1], "gpu-missing", "there is 1 GPU, and GPU 1 is asked for"),
        (quick(8, "0,1"), [0, 2], "gpu-missing", "2 GPUs (CUDA_VISIBLE_DEVICES=0,1), and GPUs 0 and 2"),
        (quick(8, ""), [0], "gpus-hidden", "CUDA_VISIBLE_DEVICES=''"),
        (quick(0), [0, 1], "gpu-none", "no NVIDIA GPU"),
        (quick(0, None, "2.13.0+cu128"), [0], "gpu-none", "no NVIDIA GPU"),
        (quick(0, None, "2.6.0a0+ecddbaf.nv25.01"), [0], "gpu-none", "no NVIDIA GPU"),
        (quick(0, None, "2.13.0+cpu"), [0], "gpu-none", "no NVIDIA GPU"),
        (quick(8, None, "2.13.0+cpu"), [0], "torch-without-cuda", "2.13.0+cpu is built for CPUs"),
        (quick(8, "GPU-1,GPU-2"), [0, 1], None, ""),
        (quick(1, "MIG-1,MIG-2"), [0], None, ""),
        (quick(1, "MIG-1,MIG-2"), [0, 1], "gpu-missing", "CUDA shows a process one MIG instance, and GPUs 0 and 1"),
        (sick(gpu_count=1), [0, 1], "gpu-missing", "there is 1 GPU"),  # torch was loaded, and counted
    ],
)  # fmt: skip
def test_gpus_that_are_asked_for_are_there_before_anything_is_started(facts, ids, code, words) -> None:
    found = findings(facts, asking_for(*ids))
    assert set(found) == ({code} if code else set())
    assert all(finding.level == "fault" and words in finding.seen for finding in found.values())


XPU = {**TORCH, "version": "2.13.0+xpu", "cuda": None, "devices": []}


@pytest.mark.parametrize(
    "facts",
    [
        quick(None),
        quick(0, None, "2.13.0+xpu"),
        quick(0, None, "2.13.0+rocm6.4"),
        quick(1, None, "2.13.0+rocm6.4"),
        quick(0, None, "2.11.0a0+git1234567"),
        {**quick(0, None, "2.13.0+xpu"), "libraries": {"problems": {}, "torch": XPU}},
    ],
)
def test_gpus_that_only_torch_can_count_refuse_no_run(facts) -> None:
    found = findings(facts, asking_for(0, 1))
    assert {(f.code, f.level) for f in found.values()} == {("gpus-uncounted", "note")}


@pytest.mark.parametrize(
    ("ids", "count", "here", "of_a_host"),
    [
        (range(8), 4, "--device 0,1,2,3", "a:4 in --hosts;"),
        ([0, 2, 4], 4, "--device 0,2", "a:0+2 in --hosts;"),
        ([1, 9], 4, "--device 1", "a:+1 in --hosts;"),
        ([9], 2, "--device 0,1", "a:2 in --hosts;"),
        ([0], 0, "--device cpu;", "a:cpu in --hosts;"),
    ],
)
def test_what_to_ask_for_instead_is_said_in_the_form_in_which_it_was_asked(
    ids, count, here, of_a_host
) -> None:
    facts = HostFacts.model_validate(quick(count))
    [alone] = [f for f in judge_host(facts, asking_for(*ids)) if f.level == "fault"]
    [one_of_several] = [f for f in judge_host(facts, asking_for(*ids), "a") if f.level == "fault"]
    assert alone.fix.startswith(here) and one_of_several.fix.startswith(of_a_host)


@pytest.mark.parametrize(
    ("capability", "architectures", "works"),
    [
        ("7.5", ["sm_70", "sm_75"], True),
        ("8.6", ["sm_80", "sm_90"], True),  # binaries of 8.0 run on 8.6
        ("7.0", ["sm_75", "sm_80"], False),
        ("9.0", ["sm_80"], False),
        ("9.0", ["sm_80", "compute_80"], True),  # compiled when loaded
        ("12.0", ["sm_90", "sm_120"], True),
        ("9.0", ["sm_90a"], True),
        ("9.4", ["gfx942"], True),  # not CUDA's
    ],
)
def test_which_cards_a_build_of_torch_has_kernels_for(capability, architectures, works) -> None:
    assert _has_kernels(capability, architectures) is works


# -- variables, cards, names, ports --------------------------------------------------------------------------


def test_stray_variables_are_a_fault_when_a_run_would_believe_them() -> None:
    some = findings(sick(variables={"RANK": "3"}))["stray-variables"]
    assert (some.level, some.fix) == ("warn", "unset RANK")
    place = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    whole = findings(sick(variables=place))["stray-variables"]
    assert whole.level == "fault" and "rank 3 of 8" in whole.why
    del place["LOCAL_RANK"]  # as in the pods of a PyTorchJob
    assert findings(sick(variables=place))["stray-variables"].level == "fault"


@pytest.mark.parametrize(
    ("name", "value", "wrong"),
    [
        ("NCCL_SOCKET_IFNAME", "eth", False),  # a prefix
        ("NCCL_SOCKET_IFNAME", "=eth", True),
        ("NCCL_SOCKET_IFNAME", "^docker", False),
        ("NCCL_SOCKET_IFNAME", "ib0,eth0", False),  # it takes those that are there
        ("GLOO_SOCKET_IFNAME", "ib0,eth0", True),  # it wants all
        ("NCCL_SOCKET_IFNAME", "ib0", True),
        ("GLOO_SOCKET_IFNAME", "eth", True),  # whole names alone
        ("GLOO_SOCKET_IFNAME", "eth0", False),
    ],
)
def test_variables_that_name_a_card_that_is_not_there(name, value, wrong) -> None:
    found = findings(sick(variables={name: value}))
    assert ("card-setting" in found) is wrong
    assert found["communication-variables"].seen == f"{name}={value}"


@pytest.mark.parametrize(
    "name",
    ["lo", "docker0", "br-0123456789ab", "veth1a2b", "virbr0", "vmnet8", "tailscale0", "tun0", "wg0", "wlp3s0", "cni0"],
)  # fmt: skip
def test_cards_on_which_machines_should_not_meet(name) -> None:
    assert wrong_kind(interface(name))


@pytest.mark.parametrize("name", ["eth0", "enp3s0f1", "eno1", "ib0", "bond0", "br0", "ens5", "hsn0", "team0"])
def test_cards_on_which_machines_meet(name) -> None:
    assert not wrong_kind(interface(name))
    assert usable([interface(name, "10.0.0.1/24")])
    assert not usable([interface(name, "10.0.0.1/24", up=False)])


def test_a_wireless_card_will_do_where_there_is_no_other() -> None:
    wireless, vpn = card("wlp3s0", "192.168.0.7/24"), card("wg0", "10.9.0.7/24")
    assert usable(models(LO, DOCKER0, wireless, vpn)) == models(wireless, vpn)
    assert usable(models(wireless, ETH0)) == models(ETH0)
    found = findings(sick(cards=[LO, DOCKER0, wireless], names={"addresses": ["192.168.0.7"], "problem": ""}))
    assert set(found) == {"cards-wrong-kind"} and "docker0" in found["cards-wrong-kind"].seen
    assert "wlp3s0" not in found["cards-wrong-kind"].seen


def test_which_card_nccl_takes() -> None:
    found = models(LO, DOCKER0, card("virbr0", "192.168.122.1/24"), ETH0, card("ib0", "10.1.0.1/24"))
    assert nccl_choice(found, {}) == "ib0"
    assert nccl_choice(found[:-1], {}) == "eth0"
    assert nccl_choice(found[:3], {}) == "docker0" and nccl_choice(found[:1], {}) == "lo"
    bridge = card("br-0123456789ab", "172.18.0.1/16")  # Docker's, by its address; NCCL goes by the name
    assert nccl_choice(models(LO, bridge, ETH0), {}) == "br-0123456789ab"
    assert nccl_choice(found, {"NCCL_SOCKET_IFNAME": "=eth0"}) == "eth0"
    assert nccl_choice(found, {"NCCL_SOCKET_IFNAME": "^ib,virbr,lo,docker"}) == "eth0"
    assert nccl_choice(found, {"NCCL_SOCKET_IFNAME": "none"}) is None
    assert matches(["eth0", "eth1", "lo"], "eth") == ["eth0", "eth1"]


def test_which_card_gloo_takes() -> None:
    found = models(LO, DOCKER0, ETH0)
    assert gloo_choice(found, {}, ["10.0.0.1"]) == "eth0"
    assert gloo_choice(found, {}, ["127.0.1.1"]) == "lo"
    assert gloo_choice(found, {}, []) == "lo"
    assert gloo_choice(found, {"GLOO_SOCKET_IFNAME": "docker0"}, ["10.0.0.1"]) == "docker0"


def test_a_wrong_card_that_would_be_taken_is_named() -> None:
    facts = sick(cards=[LO, card("br-0123456789ab", "172.18.0.1/16"), ETH0])
    found = findings(facts)["card-wrong"]
    assert "NCCL takes br-0123456789ab" in found.seen and "containers" in found.why
    assert found.fix.endswith("export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0")
    several = findings(sick(cards=[LO, card("eth1", "192.168.0.1/24"), ETH0]))
    assert several["card-several"].level == "note"
    assert findings(sick(cards=[LO]))["card-none"].level == "note"
    slow = findings(sick(cards=[LO, {**ETH0, "speed_mbit": 100}]))
    assert slow["card-slow"].level == "warn"


def test_a_busy_port_says_by_whom() -> None:
    taken = {"port": 29500, "busy": True, "pid": 77, "command": "python old.py", "user": "me"}
    found = findings(sick(port=taken))["port-busy"]
    assert "process 77 of me: python old.py" in found.seen and "kill 77" in found.fix
    hidden = findings(sick(port={**taken, "pid": None, "command": None}))["port-busy"]
    assert "a process of me" in hidden.seen and "ss -ltnp" in hidden.fix


@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_on_other_systems_it_says_what_it_cannot_see(platform) -> None:
    unseen: dict[str, Any] = {"cards": None, "shm": None, "memory__available": None, "infiniband": []}
    found = findings(sick(platform=platform, **unseen))
    assert set(found) == {"unseen"}
    assert "network interfaces" in found["unseen"].seen and "gloo" in found["unseen"].why


# -- the verb ------------------------------------------------------------------------------------------------


def test_what_a_run_needs_follows_its_settings() -> None:
    settings = resources_of(TrainConfig(batch=24, img=320, device="cpu:3", workers=2))
    need = estimate_of(settings, cores=8, gpus=0)
    assert (need.ranks, need.workers, need.wanted.micro_batch, need.on_gpu) == (3, 2, 8, False)
    assert need.text == "3 processes x 8 images of 320 px, 2 loader processes each, 4 micro-batches ahead"
    assert "assumed" not in need.text
    measured = resources_of(TrainConfig(batch=-1, device="cpu"))
    assert "8 images of 640 px (assumed: the run measures" in estimate_of(measured, cores=8, gpus=0).text
    assert estimate_of(resources_of(TrainConfig(device="0,1")), cores=8, gpus=2).workers == 3
    assert estimate_of(resources_of(TrainConfig(device="0")), cores=64, gpus=1).workers == MOST_LOADERS
    assert estimate_of(resources_of(TrainConfig(device="0,1", parallel="dp")), cores=8, gpus=2).ranks == 1


def test_the_worst_is_told_last_and_the_same_of_many_hosts_once() -> None:
    findings = [Finding("b", "fault", "m1", "broken", fix="mend it"), Finding("g", "note", "m1", "no GPU")]
    out = io.StringIO()
    print_findings([*findings, Finding("g", "note", "m2", "no GPU")], out)
    assert (
        out.getvalue() == "note  g: m1, m2: no GPU\nfault b: m1: broken\n  try : mend it\n\n1 fault, 1 note\n"
    )
    assert (exit_code(findings), exit_code(findings[1:])) == (4, 0)
    assert as_json(findings)["worst"] == "fault"


def test_the_preflight_of_a_run_is_quick_and_speaks_of_what_could_end_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "1")
    found = preflight(resources_of(TrainConfig(img=64, batch=4, device="cpu")))
    assert [finding.code for finding in found] == ["stray-variables"]


def test_a_run_of_one_machine_starts_whatever_interface_the_variables_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One process uses no interface, and the launcher of several names the loopback interface."""
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "ib0")
    for device in ("cpu", "cpu:2"):
        assert preflight(resources_of(TrainConfig(img=64, batch=4, device=device))) == []
    assert not set(agent_environment(os.environ).values()) & {"ib0", "=ib0"}


def test_the_verb_writes_json_and_ends_with_4_for_faults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in TORCHRUN:
        monkeypatch.setenv(name, "2")
    assert main(["doctor", "--quick", "--img", "64", "--json", "-"]) == 4
    out = capsys.readouterr()
    values = json.loads(out.out)
    assert values["worst"] == "fault" and "stray-variables" in {f["code"] for f in values["findings"]}
    assert "unset RANK" in out.err
    for name in TORCHRUN:
        monkeypatch.delenv(name)
    assert main(["doctor", "--quick", "--img", "64", "--json", "found.json"]) == 0
    assert json.loads((tmp_path / "found.json").read_text())["worst"] in ("ok", "note", "warn")


def test_json_that_cannot_be_written_is_said_before_anything_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for target, words in {
        "none/of it/x.json": ["there is no folder none/of it", "mkdir -p 'none/of it'"],
        str(tmp_path): ["is a folder", "doctor.json"],
    }.items():
        assert main(["doctor", "--quick", "--img", "64", "--json", target]) == 2
        out = capsys.readouterr()
        assert all(word in out.err for word in words) and not out.out, out.err
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="/proc takes no files")
def test_a_disk_that_refuses_the_json_is_no_matter_of_the_runs_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.log").touch()
    assert main(["doctor", "--log", str(tmp_path / "a.log"), "--json", "/proc/x.json"]) == 3
    assert "a file elsewhere, or -" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"hosts": "a:1", "fleet": "f.yaml"}, "--hosts"),
        ({"log": "x.log", "hosts": "a:1"}, "--log"),
        ({"batch": "7", "micro_batch": "2"}, "does not divide"),
    ],
)
def test_settings_that_contradict_each_other(given, words) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve_doctor(given)


def test_hosts_without_devices_are_examined_without_their_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    fleets: list[Fleet] = []

    def examined(fleet: Fleet, *_: object, **settings: object) -> tuple[list[Finding], None]:
        fleets.append(fleet)
        return [], None

    monkeypatch.setattr("yolofleet.fleet.launch.preflight.examine_fleet", examined)
    cli_doctor.examine(resolve_doctor({"hosts": "a,b:2"}))
    cli_doctor.examine(resolve_doctor({"hosts": "a", "device": "0,1"}))
    assert [[host.device for host in fleet.hosts] for fleet in fleets] == [["cpu", "0,1"], ["0,1"]]


# -- the page ------------------------------------------------------------------------------------------------


def test_every_finding_that_is_reported_has_a_row_and_every_row_is_reported() -> None:
    source = Path(yolofleet.__file__).resolve().parent
    codes = {f"ssh-{kind}" for _, kind, *_ in REASONS}
    codes |= {f"way-{outcome}" for outcome in get_args(ConnectionTest.model_fields["outcome"].annotation)}
    for path in source.rglob("*.py"):
        for call in calls(path, "finding"):
            codes |= texts(call.args[0]) or assigned(path, getattr(call.args[0], "id", ""))
    for name in ("remote.py", "ssh.py"):
        for call in calls(source / "fleet" / "hosts" / name, "Unreachable"):
            codes |= {f"ssh-{kind}" for kind in texts(call.args[1])}
    assert codes - {"ssh-", "way-", "way-connected"} == set(kinds())
    assert {*QUICK, *NO_SUCH_GPU} <= set(kinds())


def test_a_finding_has_the_levels_and_texts_of_its_row() -> None:
    assert finding("threads", "a", threads=3).seen == "OMP_NUM_THREADS=3"
    assert finding("gpu-none", level="fault", instead="--device cpu").why == "the run asks for one"
    with pytest.raises(AssertionError, match="no level fault"):
        finding("threads", level="fault", threads=3)
    with pytest.raises(KeyError):
        finding("threads")
    for kind in kinds().values():
        assert kind.meaning and set(kind.levels) <= set(LEVELS), kind.code
        for text in (kind.seen, kind.why, kind.fix):
            assert isinstance(text, str) or set(text) == set(kind.levels), kind.code


def test_the_reference_has_every_finding_of_machines_and_logs() -> None:
    docs = Path(__file__).resolve().parents[3] / "docs"
    page = runpy.run_path(str(docs / "doctor_tables.py"))["markdown"]()
    rows = [line.strip("| ").split(" | ")[0] for line in page.splitlines() if line.startswith("| `")]
    assert sorted(rows) == sorted(f"`{code}`" for code in [*kinds(), *{rule.code for rule in RULES}])


def assigned(source: Path, name: str) -> set[str]:
    """Codes among what a name may be given, alone or with others."""
    tree = ast.parse(source.read_text(encoding="utf-8"))
    given = [n for n in ast.walk(tree) if isinstance(n, ast.Assign)]
    mine = [
        n for n in given if name in {getattr(t, "id", "") for target in n.targets for t in ast.walk(target)}
    ]
    return {text for n in mine for text in texts(n.value) if re.fullmatch("[a-z0-9-]+", text)}


def calls(source: Path, name: str) -> list[ast.Call]:
    tree = ast.parse(source.read_text(encoding="utf-8"))
    return [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == name]


def texts(node: ast.AST) -> set[str]:
    """Of a text, or of "one text if ... else another"."""
    return {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
