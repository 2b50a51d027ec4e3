"""What the doctor reads of a computer: made-up /proc and /sys trees and answers of programs, and the real ones."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from yolofleet.fleet.doctor import machine, machine_facts, probes
from yolofleet.fleet.doctor.host_facts import UNSEEN, Firewall
from yolofleet.fleet.doctor.machine import Answer, Machine
from yolofleet.fleet.doctor.network import opening
from yolofleet.fleet.doctor.network_facts import ephemeral_ports, firewall, interfaces, port_facts, resolve
from yolofleet.fleet.doctor.probes import run_probe

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux has")
ABSENT = Answer()


class Computer:
    """A computer made of files, and of programs that say one thing."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.programs: dict[str, Answer] = {}
        self.asked: list[str] = []

    def file(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def says(self, program: str, out: str, code: int = 0) -> None:
        self.programs[program] = Answer(code, out)

    def machine(self) -> Machine:
        def run(argv, _deadline_s):
            self.asked.append(argv[0])
            return self.programs.get(argv[0], ABSENT)

        folders = {"proc": "proc", "system": "sys", "etc": "etc", "dev": "dev"}
        roots = {name: self.root / folder for name, folder in folders.items()}
        return Machine(**roots, shm=self.root / "shm", environment={}, platform="linux", run=run)


@pytest.fixture
def computer(tmp_path: Path) -> Computer:
    return Computer(tmp_path)


def test_memory_is_what_the_tightest_control_group_leaves(computer: Computer) -> None:
    computer.file("proc/meminfo", "MemTotal: 8000 kB\nMemAvailable: 6000 kB\nSwapTotal: 0 kB\n")
    computer.file("proc/self/cgroup", "0::/pod/run\n")
    computer.file("sys/fs/cgroup/pod/memory.max", "2048000\n")  # of a parent
    computer.file("sys/fs/cgroup/pod/memory.current", "1024000\n")
    computer.file("sys/fs/cgroup/pod/run/memory.max", "max\n")
    found = machine_facts.memory(computer.machine())
    assert found == {"total": 8192000, "swap": 0, "available": 1024000, "machine_available": 6144000}


def test_memory_that_cannot_be_seen_is_none(computer: Computer) -> None:
    assert machine_facts.memory(computer.machine())["available"] is None
    computer.file("proc/meminfo", "MemTotal: 8000 kB\n")
    computer.file("proc/self/cgroup", "0::/\n")
    computer.file("sys/fs/cgroup/memory.max", "2048000\n")
    computer.file("sys/fs/cgroup/memory.current", "1024000\n")
    assert machine_facts.memory(computer.machine())["available"] is None, (
        "a limit alone tells nothing of the machine"
    )
    none_to_write_to = {"size": 0, "free": 0, "largest": [], "read_only": True}
    assert machine_facts.shared_memory(computer.machine()) == none_to_write_to


@pytest.mark.parametrize(
    ("groups", "files", "quota"),
    [
        ("0::/pod", {"pod/cpu.max": "150000 100000"}, 1.5),
        ("0::/pod", {"pod/cpu.max": "max 100000"}, None),
        ("0::/pod/run", {"pod/cpu.max": "200000 100000", "pod/run/cpu.max": "max 100000"}, 2.0),
        ("3:cpu,cpuacct:/d", {"cpu/d/cpu.cfs_quota_us": "50000", "cpu/d/cpu.cfs_period_us": "100000"}, 0.5),
        ("3:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("", {}, None),
    ],
)
def test_the_time_of_cores_that_control_groups_grant(computer: Computer, groups, files, quota) -> None:
    computer.file("proc/self/cgroup", groups)
    for name, text in files.items():
        computer.file(f"sys/fs/cgroup/{name}", text)
    assert machine_facts.cores(computer.machine())["quota"] == quota


def test_who_shares_a_network_of_a_machine_is_told_by_its_boot_and_its_namespace(computer: Computer) -> None:
    assert machine_facts.network_id(computer.machine()) == ""
    computer.file("proc/sys/kernel/random/boot_id", "5a5a\n")
    (computer.root / "proc/self/ns").mkdir(parents=True)
    (computer.root / "proc/self/ns/net").symlink_to("net:[4026531840]")
    assert machine_facts.network_id(computer.machine()) == "5a5a net:[4026531840]"


def test_the_package_digest_is_of_contents_and_names(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "notes.txt").write_text("not part of it\n")
    before = machine_facts.package_sha256(tmp_path)
    os.utime(tmp_path / "a.py", (1, 1))
    (tmp_path / "notes.txt").write_text("changed\n")
    assert machine_facts.package_sha256(tmp_path) == before
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert machine_facts.package_sha256(tmp_path) != before


def test_a_disk_is_measured_where_the_folder_would_be_made_and_nothing_stays(tmp_path: Path) -> None:
    found = machine_facts.disk(tmp_path / "runs" / "train")
    assert found["below"] == str(tmp_path)
    assert found["free"] > 0 and found["write_bytes_per_s"] > 0 and found["problem"] is None
    assert list(tmp_path.iterdir()) == []
    assert machine_facts.disk(tmp_path / ("x" * 300) / "train")["below"] == str(tmp_path), (
        "a name that cannot be"
    )


def test_a_disk_that_does_not_answer_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a network disk whose server is gone."""
    over, usage = threading.Event(), machine_facts.shutil.disk_usage

    def answers_at_last(folder: Path) -> object:
        if folder == tmp_path:
            over.wait(900)
        return usage(folder)

    monkeypatch.setattr(machine_facts.shutil, "disk_usage", answers_at_last)
    monkeypatch.setattr(machine_facts, "DISK_S", 0.1)
    try:
        [found] = run_probe("facts", {"folders": [tmp_path], "quick": True})["disks"]
    finally:
        over.set()
    assert found["problem"] == "no answer within 0.1 s" and found["folder"] == str(tmp_path)


def test_a_folder_that_cannot_be_written_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(**_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(machine_facts.tempfile, "TemporaryFile", read_only)
    assert machine_facts.disk(tmp_path)["problem"] == os.strerror(errno.EROFS)


# -- GPUs ----------------------------------------------------------------------------------------------------

SMI = "0, NVIDIA A100-SXM4-40GB, 550.54.15, 40960, 4, 0, 0\n"


def test_gpus_as_nvidia_smi_lists_them(computer: Computer) -> None:
    computer.says("nvidia-smi", SMI + "1, NVIDIA T4, 550.54.15, 15360, [N/A], [N/A], [N/A]\n")
    found = machine_facts.gpus(computer.machine())
    assert (found["state"], found["driver"]) == ("ok", "550.54.15")
    first, second = found["gpus"]
    assert [*first.values()] == [0, "NVIDIA A100-SXM4-40GB", "550.54.15", 40960, 4, 0, 0]
    assert (second["used_mib"], second["uncorrected_errors"]) == (None, None)


def test_a_driver_that_does_not_answer_is_told_from_no_driver(computer: Computer) -> None:
    assert machine_facts.gpus(computer.machine())["state"] == "none"
    computer.file("sys/bus/pci/devices/0000:01:00.0/vendor", "0x10de\n")
    computer.file("sys/bus/pci/devices/0000:01:00.0/class", "0x030200\n")
    computer.file("sys/bus/pci/devices/0000:01:00.1/vendor", "0x10de\n")  # its sound
    computer.file("sys/bus/pci/devices/0000:01:00.1/class", "0x040300\n")
    found = machine_facts.gpus(computer.machine())
    assert (found["state"], found["cards"], found["said"]) == ("silent", 1, "nvidia-smi is not installed")
    computer.says("nvidia-smi", "Failed to initialize NVML: Driver/library version mismatch\nmore", code=18)
    said = machine_facts.gpus(computer.machine())["said"]
    assert said == "Failed to initialize NVML: Driver/library version mismatch"
    computer.programs["nvidia-smi"] = Answer(late=True)
    assert machine_facts.gpus(computer.machine())["said"] == "no answer within 10 s"


LISTED = "GPU 0: Tesla T4 (UUID: GPU-1)\nGPU 1: Tesla T4 (UUID: GPU-2)\n"


@pytest.mark.parametrize(
    ("says", "files", "count"),
    [
        (LISTED, [], 2),
        ("GPU 0: A100 (UUID: 1)\n  MIG 1g.5gb Device 0: (UUID: 2)\n", [], None),  # CUDA takes one part
        (None, ["proc/driver/nvidia/gpus/0000:01:00.0/information"], 1),  # the driver without its programs
        (None, ["dev/null"], 0),
        (None, ["dev/kfd"], None),  # AMD
        (None, ["dev/nvhost-gpu"], None),  # Jetson
        (None, ["dev/nvidiactl"], None),
        (None, ["dev/dxg"], None),  # WSL
        ("No devices were found\n", ["dev/null"], 0),
        (Answer(18, "Failed to initialize NVML: Driver/library version mismatch\n"), ["dev/nvidia0"], None),
    ],
)
def test_gpus_are_counted_without_torch(computer: Computer, says, files, count) -> None:
    if says is not None:
        computer.programs["nvidia-smi"] = says if isinstance(says, Answer) else Answer(0, says)
    for file in files:
        computer.file(file, "")
    assert machine_facts.gpu_count(computer.machine()) == count


def test_a_package_with_devices_for_torch_makes_the_number_of_gpus_unknown(
    computer: Computer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computer.file("dev/null", "")
    info = tmp_path / "packages" / "torch_other-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nother = torch_other:load\n")
    assert machine_facts.gpu_count(computer.machine()) == 0
    monkeypatch.syspath_prepend(info.parent)
    assert machine_facts.gpu_count(computer.machine()) is None


@linux
def test_a_program_that_nobody_can_end_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As nvidia-smi that a stuck driver holds in the kernel: here nobody even tries to end it."""
    monkeypatch.setattr(machine.subprocess.Popen, "kill", lambda process: None)
    monkeypatch.setattr(machine, "KILLED_S", 0.1)
    number = tmp_path / "pid"
    script = f"echo $$ > {number}.new; mv {number}.new {number}; exec sleep 3600"
    assert machine.command(["sh", "-c", script], 0.5) == Answer(late=True)
    while not number.exists():
        time.sleep(0.02)
    os.kill(int(number.read_text()), signal.SIGKILL)  # an error if it had ended


def test_infiniband_ports(computer: Computer) -> None:
    port = "sys/class/infiniband/mlx5_0/ports/1"
    computer.file(f"{port}/state", "4: ACTIVE\n")
    computer.file(f"{port}/rate", "200 Gb/sec (4X HDR)\n")
    computer.file(f"{port}/link_layer", "InfiniBand\n")
    [found] = machine_facts.infiniband(computer.machine())
    assert [*found.values()] == ["mlx5_0", "1", "ACTIVE", "200 Gb/sec (4X HDR)", "InfiniBand"]


def test_variables_that_launchers_and_nccl_listen_to() -> None:
    read = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_DEBUG": "INFO", "RANK": "1"}
    assert machine_facts.variables({**read, "HOME": "/root", "PASSWORD": "secret"}) == read


# -- ports and firewalls -------------------------------------------------------------------------------------

TCP = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:733C 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1 0 100 0 0 10 0
   1: 0100007F:733D 0100007F:733C 01 00000000:00000000 00:00000000 00000000 54321        0 4712 1 0 100 0 0 10 0
   2: 00000000:733D 00000000:0000 0A 00000000:00000000 00:00000000 00000000 54321        0 4713 1 0 100 0 0 10 0
"""


@linux
def test_who_listens_on_a_port(computer: Computer) -> None:
    computer.file("proc/self/net/tcp", TCP)
    computer.file("proc/77/cmdline", "python\0-m\0http.server\0")
    (computer.root / "proc/77/fd").mkdir()
    (computer.root / "proc/77/fd/3").symlink_to("socket:[4711]")
    assert port_facts(computer.machine(), 0x733C) == {
        "port": 0x733C, "busy": True, "pid": 77, "command": "python -m http.server", "user": "root",
    }  # fmt: skip
    others = port_facts(computer.machine(), 0x733D)  # somebody else's process: its files are not ours to see
    assert (others["busy"], others["pid"], others["user"]) == (True, None, "54321")


def test_the_ports_that_the_kernel_chooses_from(computer: Computer) -> None:
    assert ephemeral_ports(computer.machine()) == [32768, 60999]
    computer.file("proc/sys/net/ipv4/ip_local_port_range", "20000\t30000\n")
    assert ephemeral_ports(computer.machine()) == [20000, 30000]


def nft(*items: dict) -> str:
    return json.dumps({"nftables": [{"metainfo": {"version": "1.0.6"}}, *items]})


def chain(family: str, table: str, name: str, **more: str) -> dict:
    return {"chain": {"family": family, "table": table, "name": name, **more}}


def rule(family: str, table: str, of: str, *expressions: dict) -> dict:
    return {"rule": {"family": family, "table": table, "chain": of, "handle": 2, "expr": list(expressions)}}


def test_rules_of_nft_that_keep_others_out_are_found_through_jumps(computer: Computer) -> None:
    ours = ("inet", "own", "in")
    computer.says(
        "nft",
        nft(
            chain(*ours, hook="input", policy="accept"),
            rule(*ours, {"jump": {"target": "more"}}),
            rule("inet", "own", "more", {"match": {}}, {"drop": None}, {"goto": {"target": "in"}}),
            chain("ip", "nat", "forward", hook="forward", policy="drop"),
            # machines meet at addresses of version 4
            chain("ip6", "filter", "input", hook="input", policy="drop"),
            rule("ip", "nat", "forward", {"drop": None}),
        ),
    )
    found = firewall(computer.machine())
    assert (found["kind"], found["rules"]) == ("nft", ["inet own in: drop"])
    line = opening(Firewall(**found), "10.0.0.0/24")
    assert line == "sudo nft insert rule inet own in ip saddr 10.0.0.0/24 accept"


INPUT = ("ip", "filter", "INPUT")
REJECTED = {"xt": {"type": "target", "name": "REJECT"}}
DROP = "-P INPUT DROP\n-A INPUT -i lo -j ACCEPT\n-A INPUT -p tcp -j REJECT --reject-with x\n"


@pytest.mark.parametrize(
    ("programs", "ufw", "kind", "rules", "line"),
    [
        (
            {"nft": nft(chain(*INPUT, hook="input", policy="accept"), rule(*INPUT, REJECTED))}, "",
            "iptables", ["ip filter INPUT: reject"], "sudo iptables -I INPUT -s 10.0.0.0/24 -j ACCEPT",
        ),
        (
            {"iptables": DROP}, "", "iptables", ["-P INPUT DROP", "-A INPUT -p tcp -j REJECT --reject-with x"],
            "sudo iptables -I INPUT -s 10.0.0.0/24 -j ACCEPT",
        ),
        ({}, "", "", [], "firewalld: "),
        ({}, "# on\nENABLED=yes\n", "ufw", [], "sudo ufw allow from 10.0.0.0/24"),
        (
            {"firewall-cmd": "running\n"}, "ENABLED=yes\n", "firewalld", [],
            "sudo firewall-cmd --permanent --zone=trusted --add-source=10.0.0.0/24 ",
        ),
    ],
)  # fmt: skip
def test_a_firewall_is_known_and_opened_with_its_own_program(
    computer: Computer, programs, ufw, kind, rules, line
) -> None:
    for program, out in programs.items():
        computer.says(program, out)
    computer.file("etc/ufw/ufw.conf", ufw)
    found = firewall(computer.machine())
    assert (found["kind"], found["rules"]) == (kind, rules)
    assert opening(Firewall(**found), "10.0.0.0/24").startswith(line)


def test_an_unknown_firewall_has_a_line_for_each_kind() -> None:
    lines = opening(UNSEEN, "10.0.0.0/24").splitlines()
    assert [line.partition(":")[0] for line in lines] == ["firewalld", "ufw", "nft", "iptables"]


# -- the real ones -------------------------------------------------------------------------------------------


@linux
def test_the_kernel_lists_loopback() -> None:
    found = interfaces(Machine())
    assert found is not None
    lo = next(card for card in found if card["name"] == "lo")
    assert "127.0.0.1/8" in lo["addresses"] and lo["mtu"] > 1000


def test_names_resolve_or_say_why() -> None:
    assert "127.0.0.1" in resolve("localhost")["addresses"]
    found = resolve("no-such-host.invalid", deadline_s=5)
    assert found["addresses"] == [] and found["problem"]
    assert resolve("x" * 300)["problem"]  # not a name at all


def test_the_way_to_an_address_needs_no_packet() -> None:
    assert probes.route_to("127.0.0.1") == ("127.0.0.1", "")


def test_quick_facts_are_json_and_need_neither_torch_nor_numpy() -> None:
    code = (
        "import json, sys; from yolofleet.fleet.doctor.probes import run_probe;"
        "print(json.dumps(run_probe('facts', {'folders': ['.'], 'port': 29500, 'quick': True})));"
        "sys.exit(bool({'torch', 'numpy', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["software"]["yolofleet"]


# -- probes over loopback ------------------------------------------------------------------------------------


@linux  # all of 127.0.0.0/8 is there
def test_a_listener_answers_who_knows_its_token_and_its_way_is_measured() -> None:
    token, other = "ab" * 16, "cd" * 16
    question = {"addresses": ["127.0.0.2"], "ports": [0], "token": token, "seconds": 900}
    [port] = run_probe("listen", question)["ports"]
    try:
        targets = [
            {"host": "m", "address": "127.0.0.2", "port": port, "token": token},
            {"host": "m", "address": "127.0.0.2", "port": port, "token": other},
            {"host": "m", "address": "127.0.0.1", "port": port, "token": token},
        ]
        found = run_probe("reach", {"targets": targets})
        assert [one["outcome"] for one in found] == ["connected", "other", "self"]
        speed = run_probe("measure", {"address": "127.0.0.2", "port": port, "token": token})
        assert speed["problem"] == "" and speed["bytes_per_s"] > 0 and speed["round_trip_s"] > 0
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.2:{port}: Address already in use"):
            run_probe("listen", {"addresses": ["127.0.0.2"], "ports": [port], "token": other, "seconds": 900})
    finally:
        run_probe("unlisten", {"token": token})
        run_probe("unlisten", {"token": other})
    for thread in threading.enumerate():
        if thread.daemon and "_accept" in thread.name:
            thread.join(900)
    assert run_probe("reach", {"targets": targets[:1]})[0]["outcome"] == "refused"


@linux
def test_a_way_that_passes_short_messages_alone_stalls(listening, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "LONG_S", 0.5)
    with socket.create_server(("127.0.0.2", 0)) as deaf:

        def serve() -> None:  # it takes the token, and nothing more: what a larger packet would meet
            caller, _ = deaf.accept()
            with caller:
                caller.recv(16)
                caller.sendall(b"y")
                over.wait(900)

        over, thread = threading.Event(), threading.Thread(target=serve)
        thread.start()
        bad = {**listening, "host": "m", "port": deaf.getsockname()[1], "long": True}
        good = {**listening, "host": "n", "long": True}
        found = run_probe("reach", {"targets": [bad, good]})
        over.set()
        thread.join()
    assert [one["outcome"] for one in found] == ["stalls", "connected"]


@linux
def test_the_port_check_listens_on_the_named_addresses_alone() -> None:
    token = "ab" * 16
    with socket.socket() as probe:
        probe.bind(("127.0.0.3", 0))
        probe.listen()
        taken = probe.getsockname()[1]
        named = ["127.0.0.2", "127.0.0.3", "192.0.2.1"]  # the last is no address of this machine
        answer = run_probe(
            "listen", {"addresses": named, "ports": [0, taken], "token": token, "seconds": 900}
        )
    try:
        port, other = answer["ports"]
        assert other == taken, "one address has it"
        at = [(address, port) for address in ("127.0.0.2", "127.0.0.3", "127.0.0.4")]
        found = run_probe(
            "reach", {"targets": [{"host": "m", "address": a, "port": p, "token": token} for a, p in at]}
        )
        assert [one["outcome"] for one in found] == ["connected", "connected", "refused"]
        with pytest.raises(OSError, match=r"cannot listen on 192\.0\.2\.1:0: "):
            run_probe(
                "listen", {"addresses": ["192.0.2.1"], "ports": [0], "token": "cd" * 16, "seconds": 900}
            )
    finally:
        run_probe("unlisten", {"token": token})


@linux
def test_the_port_check_serves_few_callers_and_reads_few_bytes(
    listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = (listening["address"], listening["port"])
    token = bytes.fromhex(listening["token"])
    monkeypatch.setattr(probes, "CONNECT_S", 900.0)
    with contextlib.ExitStack() as open_calls:
        for _ in range(probes.MOST_CALLERS + 8):
            open_calls.enter_context(socket.create_connection(at))
        serving = 0
        while serving < probes.MOST_CALLERS:
            serving = sum("_serve" in thread.name for thread in threading.enumerate())
        assert serving == probes.MOST_CALLERS
    with socket.create_connection(at) as caller:
        caller.sendall(token)
        assert caller.recv(1) == b"y"
        caller.sendall(b"s" + (1 << 40).to_bytes(8, "big"))
        assert caller.recv(1) == b"", "closed before it reads"


class Drips:
    """A caller that sends a byte of its token every 0.4 seconds, by a clock of its own."""

    now_s = 0.0

    def setsockopt(self, *_: int) -> None:
        pass

    def settimeout(self, seconds: float) -> None:
        self.left_s = seconds

    def recv(self, _most: int) -> bytes:
        self.now_s += 0.4
        if self.left_s < 0.4:
            raise TimeoutError
        return b"x"


@linux
def test_the_port_check_cuts_off_a_caller_that_drips(listening, monkeypatch: pytest.MonkeyPatch) -> None:
    caller: Any = Drips()
    monkeypatch.setattr(probes, "CONNECT_S", 1.0)
    monkeypatch.setattr(probes, "time", SimpleNamespace(monotonic=lambda: caller.now_s))
    with pytest.raises(TimeoutError):
        probes._listeners[listening["token"]]._answer(caller)
    monkeypatch.undo()


@pytest.fixture
def listening() -> Iterator[dict[str, Any]]:
    """What ``reach`` needs to find a listener."""
    token = "ab" * 16
    answer = run_probe("listen", {"addresses": ["127.0.0.2"], "ports": [0], "token": token, "seconds": 900})
    yield {"host": "m", "address": "127.0.0.2", "port": answer["ports"][0], "token": token}
    run_probe("unlisten", {"token": token})


@linux
@pytest.mark.parametrize(
    ("fails", "also_at", "outcome", "tries"),
    [
        (1, None, "connected", 2),  # the kernel remembered a cable that was not plugged in
        (99, None, "prohibited", 3),
        (99, "127.0.0.3", "prohibited", 1),  # it is met at another address: nothing to wait for
    ],
)
def test_a_way_that_the_kernel_says_is_none_is_tried_again_before_that_counts(
    listening, monkeypatch: pytest.MonkeyPatch, fails: int, also_at: str | None, outcome: str, tries: int
) -> None:
    connect, tried = socket.create_connection, []

    def refuses_at_first(address: tuple[str, int], timeout_s: float) -> socket.socket:
        if address[0] == "127.0.0.3":
            return connect(("127.0.0.2", address[1]), timeout_s)
        tried.append(address)
        if len(tried) <= fails:
            raise OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH))
        return connect(address, timeout_s)

    monkeypatch.setattr(probes.socket, "create_connection", refuses_at_first)
    monkeypatch.setattr(probes, "AGAIN_AFTER_S", (0.01, 0.01))
    targets = [listening, *([{**listening, "address": also_at}] if also_at else [])]
    found = run_probe("reach", {"targets": targets})
    assert [one["outcome"] for one in found] == [outcome, *(["connected"] if also_at else [])]
    assert len(tried) == tries


def test_only_what_is_listed_can_be_asked() -> None:
    with pytest.raises(LookupError):
        run_probe("__import__", {})


def test_a_process_that_dies_says_how(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if os.name != "posix":
        pytest.skip("a script stands for the interpreter")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'ImportError: libcudart.so' >&2\nkill -11 $$\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    died = {"problem": "ImportError: libcudart.so (signal 11)", "late": False}
    assert machine_facts.in_child("libraries", {}) == died
    python.write_text("#!/bin/sh\necho '{\"problems\": {}}'; echo 3; echo 'unloaded'\n")
    assert machine_facts.in_child("libraries", {}) == {"problems": {}}
    python.write_text("#!/bin/sh\n")
    assert machine_facts.in_child("libraries", {})["problem"] == "nothing said (exit code 0)"
    python.write_text('#!/bin/sh\necho "{\\"ids\\": \\"$CUDA_DEVICE_ORDER\\"}"\n')
    assert machine_facts.in_child("libraries", {}) == {"ids": "PCI_BUS_ID"}, (
        "as nvidia-smi and a run count them"
    )
    python.write_text('#!/bin/sh\necho "{\\"card\\": \\"${GLOO_SOCKET_IFNAME-none}\\"}"\n')
    sum_of = {"address": "127.0.0.1", "port": 1, "rank": 0, "size": 1, "deadline_s": 1}
    assert run_probe("all_reduce", {**sum_of, "card": "eth0"}) == {"card": "eth0"}
    assert run_probe("all_reduce", {**sum_of, "card": ""}) == {"card": "none"}, "not a card without a name"
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setitem(machine_facts.CHILD_S, "libraries", 0.2)
    assert machine_facts.in_child("libraries", {})["late"]
