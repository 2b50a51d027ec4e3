"""Faults between machines, provoked one at a time: each is named, with what to type."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from machines import CARD, Lab, Machine, machines

import yolofleet
from yolofleet.data.datasets.shapes import make_shapes

PROGRAM = [sys.executable, "-m", "yolofleet", "doctor"]
FAKETIME = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
HOSTS = "m1:cpu:1,m2:cpu:1"
NEW = ("-p", "tcp", "--syn", "--dport", "1024:65535")  # not ssh, and not answers to the machine's own calls


@pytest.fixture(scope="module")
def own_disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that is another one on each machine."""
    folder = tmp_path_factory.mktemp("cluster") / "own disk"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def lab(own_disk: Path) -> Iterator[Lab]:
    with machines(2, private=[own_disk]) as made:
        yield made


def doctor(
    lab: Lab, *arguments: str | Path, hosts: str = HOSTS, leave_out: Sequence[str] = ("package-differs",)
) -> dict[str, dict]:
    """What it finds from the desk, by code; what is in order is left out. So is what follows from somebody editing
    this checkout just now: hosts that were asked at another moment have another package."""
    fleet = ["--hosts", hosts] if hosts else []
    command = [*PROGRAM, *fleet, "--quick", "--img", "64", "--json", "-", *map(str, arguments)]
    done = lab.desk.run(*command, check=False, timeout_s=900)
    assert "Traceback" not in done.stderr
    values = json.loads(done.stdout)
    assert done.returncode == (4 if values["worst"] == "fault" else 0)
    return {f["code"]: f for f in values["findings"] if f["level"] != "ok" and f["code"] not in leave_out}


@contextmanager
def firewall(machine: Machine, *rule: str) -> Iterator[None]:
    machine.run("iptables", "-A", "INPUT", *rule)
    try:
        yield
    finally:
        machine.run("iptables", "-F", "INPUT")


@contextmanager
def line_of_hosts(machine: Machine, old: str, new: str) -> Iterator[None]:
    before = machine.hosts_file.read_text()
    assert old in before
    machine.hosts_file.write_text(before.replace(old, new))
    try:
        yield
    finally:
        machine.hosts_file.write_text(before)


needs_iptables = pytest.mark.skipif(
    subprocess.run(["which", "iptables"], capture_output=True).returncode != 0,
    reason="iptables missing (apt-get install iptables)",
)


def test_a_healthy_fleet_has_no_findings_and_nothing_stays(lab: Lab) -> None:
    assert doctor(lab) == {}
    assert lab.left_behind() == {}


@needs_iptables
@pytest.mark.parametrize(
    ("target", "code"),
    [
        (("DROP",), "way-dropped"),
        (("REJECT",), "way-refused"),
        (("REJECT", "--reject-with", "icmp-host-prohibited"), "way-prohibited"),  # as firewalld does
    ],
)
def test_a_firewall_is_named_and_the_line_that_is_printed_opens_it(lab: Lab, target, code) -> None:
    with firewall(lab.hosts[1], *NEW, "-j", *target):
        found = doctor(lab)
        assert found[code]["level"] == "fault"
        assert found[code]["where"] == "m1 -> m2"  # the other direction is open
        assert set(found) == {code}
        line = found[code]["fix"].splitlines()[-1].removeprefix("sudo ")
        assert line == "iptables -I INPUT -s 10.77.0.0/24 -j ACCEPT"
        if target == ("DROP",):
            lab.hosts[1].run(*line.split())
            assert doctor(lab) == {}


@needs_iptables
def test_a_rendezvous_port_alone_does_not_make_a_fleet(lab: Lab) -> None:
    """The classic: port 29500 was opened, and gloo's own ports were not."""
    lab.hosts[0].run("iptables", "-A", "INPUT", "-p", "tcp", "--dport", "29500", "-j", "ACCEPT")
    with firewall(lab.hosts[0], *NEW, "-j", "DROP"):
        found = doctor(lab)
    assert "as gloo and NCCL choose" in found["way-dropped"]["seen"]


def test_one_machine_under_two_names(lab: Lab) -> None:
    found = doctor(lab, hosts="m1:cpu:1,m2:cpu:1,10.77.0.1:cpu:1")
    assert set(found) == {"same-machine"}
    assert found["same-machine"]["seen"] == "m1 and 10.77.0.1 are the same machine"


@pytest.mark.skipif(
    any(Path("/dev").glob("nvidia*")), reason="the machines in miniature have this one's GPUs"
)
def test_gpus_that_a_host_does_not_have_are_missed_before_the_run(lab: Lab) -> None:
    found = doctor(lab, hosts="m1:8,m2:cpu:1")
    assert (found["gpu-none"]["level"], found["gpu-none"]["where"]) == ("fault", "m1")
    assert found["gpu-none"]["fix"].startswith("m1:cpu in --hosts")


def test_no_route(lab: Lab) -> None:
    lab.hosts[0].ip("route", "add", "unreachable", lab.hosts[1].address)
    try:
        found = doctor(lab)
    finally:
        lab.hosts[0].ip("route", "delete", "unreachable", lab.hosts[1].address)
    assert found["way-no-route"]["where"] == "m1 -> m2"


def test_a_wrong_card_in_the_fleet_file(lab: Lab, tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text("hosts:\n- m1:cpu:1\n- {host: m2, device: cpu, interface: other0}\n")
    lab.hosts[1].ip("link", "add", "other0", "type", "veth", "peer", "name", "nowhere0")
    try:
        lab.hosts[1].ip("address", "add", "192.168.77.2/24", "dev", "other0")
        for end in ("other0", "nowhere0"):
            lab.hosts[1].ip("link", "set", end, "up")
        found = doctor(lab, "--fleet", file, hosts="")
    finally:
        lab.hosts[1].ip("link", "delete", "other0")
    assert (found["card-unshared"]["level"], found["card-unshared"]["where"]) == ("fault", "m2")
    assert found["card-unshared"]["fix"] == f"in fleet.yaml: interface: {CARD}"
    assert "way-no-route" in found or "way-silent" in found


def test_a_host_name_that_is_127_0_1_1(lab: Lab) -> None:
    with line_of_hosts(lab.hosts[1], f"{lab.hosts[1].address} m2", "127.0.1.1 m2"):
        found = doctor(lab)
    assert found["host-name-loopback"]["where"] == "m2"
    assert "10.77.0.2 m2" in found["host-name-loopback"]["fix"]


def test_a_busy_rendezvous_port_and_who_has_it(lab: Lab) -> None:
    argv = lab.hosts[0].argv(sys.executable, "-m", "http.server", "29500")
    busy = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while ("*", 29500) not in lab.hosts[0].listening():
            assert busy.poll() is None
            time.sleep(0.05)
        found = doctor(lab)
    finally:
        busy.terminate()
        busy.wait()
    assert found["port-busy"]["where"] == "m1"
    assert f"process {busy.pid}" in found["port-busy"]["seen"] and "http.server" in found["port-busy"]["seen"]


def test_other_data_on_one_host(lab: Lab, own_disk: Path) -> None:
    original = make_shapes(own_disk.parent / "shapes", images=4, val_images=2, img=64, seed=1)
    for host in lab.hosts:
        host.run("cp", "-r", original.parent, own_disk)
    assert doctor(lab, "--data", own_disk / "shapes" / "data.yaml") == {}
    label = next((original.parent / "labels" / "train").iterdir())
    lab.hosts[1].run("rm", own_disk / "shapes" / "labels" / "train" / label.name)
    found = doctor(lab, "--data", own_disk / "shapes" / "data.yaml")
    assert "m1: 4 images" in found["data-differs"]["seen"] and "m2: 4 images" in found["data-differs"]["seen"]
    found = doctor(lab, "--data", own_disk / "shapes" / "none.yaml")
    assert found["data-missing"]["fix"].startswith("on m")


@pytest.mark.skipif(not FAKETIME, reason="libfaketime missing (apt-get install libfaketime)")
def test_a_clock_that_is_an_hour_off(lab: Lab, tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(
        f"hosts:\n- m1:cpu:1\n- {{host: m2, device: cpu, env: {{LD_PRELOAD: {FAKETIME[0]}, FAKETIME: +1h}}}}\n"
    )
    found = doctor(lab, "--fleet", file, hosts="")
    assert found["clock-off"]["where"] == "m2"
    assert "60 min ahead" in found["clock-off"]["seen"]


def test_other_software_on_one_host(lab: Lab, tmp_path: Path) -> None:
    """A stub of another torch, and a package of ours with another line, come first on one host's path."""
    stub = tmp_path / "stub"
    shutil.copytree(
        Path(yolofleet.__file__).parent, stub / "yolofleet", ignore=shutil.ignore_patterns("__pycache__")
    )
    (stub / "yolofleet" / "families" / "build.py").write_text("# another version\n")
    (stub / "torch-1.13.dist-info").mkdir()
    (stub / "torch-1.13.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch\nVersion: 1.13\n"
    )
    file = tmp_path / "fleet.yaml"
    file.write_text(f"hosts:\n- m1:cpu:1\n- {{host: m2, device: cpu, env: {{PYTHONPATH: {stub}}}}}\n")
    found = doctor(lab, "--fleet", file, hosts="", leave_out=())
    assert found["torch-differs"]["seen"].endswith("m2: 1.13")
    assert "m2: " in found["package-differs"]["seen"] and "--sync-code" in found["package-differs"]["fix"]


def test_a_disk_that_is_full_and_shared_memory_that_is_small(lab: Lab, own_disk: Path) -> None:
    lab.hosts[1].run("mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", own_disk)
    try:
        found = doctor(lab, "--project", own_disk, "--img", "640", "--workers", "8")
    finally:
        lab.hosts[1].run("umount", own_disk)
    assert (found["disk-low"]["level"], found["disk-low"]["where"]) == ("fault", "m2")
    assert found["shm-small"]["level"] == "fault"  # 375 MiB of 256
    assert "--shm-size" in found["shm-small"]["fix"]


def test_hosts_that_cannot_be_logged_in_to_do_not_hide_the_others(lab: Lab) -> None:
    config = Path("/etc/netns", lab.desk.namespace, "ssh", "ssh_config")
    before = config.read_text()
    config.write_text(f"Host m2\n  PubkeyAuthentication no\n\n{before}")
    try:
        found = doctor(lab, hosts=f"{HOSTS},nowhere:cpu:1")
    finally:
        config.write_text(before)
    assert found["ssh-key-refused"]["where"] == "m2" and "ssh-copy-id m2" in found["ssh-key-refused"]["fix"]
    assert found["ssh-unknown-host"]["where"] == "nowhere"


def test_everything_is_measured_when_there_is_time(lab: Lab) -> None:
    """Loads torch twice on each host: the one test here that takes long."""
    done = lab.desk.run(*PROGRAM, "--hosts", HOSTS, "--img", "64", "--json", "-", check=False, timeout_s=900)
    found = {f["code"]: f for f in json.loads(done.stdout)["findings"]}
    assert found["all-reduce"]["level"] == found["speed"]["level"] == "ok"
    assert "MB/s" in found["speed"]["seen"] and "over 2 hosts" in found["all-reduce"]["seen"]
    assert lab.left_behind() == {}
