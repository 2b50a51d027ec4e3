"""Machines in miniature, on one: each a network namespace with its own card, address, host name, /etc/hosts,
/dev/shm, boot and sshd, on a switch of their own.

Linux, root, iproute2 and openssh-server only. The file system is shared, as with NFS, but for /dev/shm and the
folders that are asked to be private. The switch lives in a namespace as well, so nothing of this machine's own
network is touched; leaving the block ends every process in the namespaces and removes them.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

CARD = "eth0"  # of every machine
NETWORK = "10.77.0"
TOOLS = ("ip", "nsenter", "unshare", "ssh", "ssh-keygen", "/usr/sbin/sshd")
READY_S = 900


def missing() -> str:
    """Why machines cannot be made here; empty when they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "machines in miniature need Linux and root"
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"{', '.join(absent)} missing (apt-get install iproute2 openssh-server)" if absent else ""


@dataclass
class Machine:
    """One host.

    Attributes:
        name: as every machine, and OpenSSH there, knows it.
        namespace: of its network, as ``ip netns`` knows it.
        port: its end at the switch.
        sshd: the process whose namespaces are the machine's.
        start_sshd: starts it again, with empty disks of its own and a new boot.
    """

    name: str
    address: str
    namespace: str
    hub: str
    port: str
    sshd: subprocess.Popen[bytes]
    start_sshd: Callable[[], subprocess.Popen[bytes]]

    def argv(self, *command: str | Path) -> list[str]:
        """``command`` on this machine; it is the process that is started, not a child of it."""
        return [
            *("nsenter", f"--target={self.sshd.pid}", "--mount", "--uts", "--net", f"--wdns={Path.cwd()}"),
            *("--", *map(str, command)),
        ]

    def run(
        self,
        *command: str | Path,
        timeout_s: float = 60,
        check: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run to the end, with its words captured."""
        done = subprocess.run(
            self.argv(*command), capture_output=True, text=True, timeout=timeout_s, check=False, env=env
        )
        assert not check or done.returncode == 0, (
            f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
        return done

    def ip(self, *words: str) -> None:
        """An ``ip`` command on its network: more cards, addresses, routes, MTU."""
        _run("ip", "-n", self.namespace, *words)

    def unplug(self) -> None:
        """Pull the cable: packets vanish, nobody is told."""
        _run("ip", "-n", self.hub, "link", "set", self.port, "down")

    def plug(self) -> None:
        _run("ip", "-n", self.hub, "link", "set", self.port, "up")
        self.ip("neigh", "flush", "all")  # that others were not there is remembered for a second or two

    def limit_rate(self, rate: str) -> None:
        """Let it send no more than ``rate``, such as ``8mbit``; ``""`` = as before."""
        queue = ("tbf", "rate", rate, "burst", "32kb", "latency", "400ms") if rate else ("pfifo",)
        _run("tc", "-n", self.namespace, "qdisc", "replace", "dev", CARD, "root", *queue)

    def power_off(self) -> None:
        """Everything on it ends at once, and nobody is told. Its sshd is gone, too."""
        self.unplug()
        _end_all(self.namespace)
        self.sshd.wait()

    def power_on(self) -> None:
        """Start it again, with empty disks of its own."""
        self.sshd = self.start_sshd()
        self.plug()

    @property
    def hosts_file(self) -> Path:
        """Its /etc/hosts; write to it in place."""
        return Path("/etc/netns", self.namespace, "hosts")

    def processes(self) -> dict[int, str]:
        """Everything that runs on it but sshd and its sessions: pid -> command line."""
        found = {}
        for pid in _pids(self.namespace):
            with suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                if command and not command.startswith(("sshd:", "/usr/sbin/sshd")):
                    found[pid] = command
        return found

    def listening(self) -> list[tuple[str, int]]:
        """Addresses and ports of TCP on which something listens, but sshd's; ``*`` = all addresses."""
        found = []
        words = self.run("ss", "--tcp", "--listening", "--numeric", "--no-header").stdout
        for line in words.splitlines():
            address, _, port = line.split()[3].rpartition(":")
            if int(port) != 22:
                found.append((address.replace("0.0.0.0", "*").replace("[::]", "*"), int(port)))
        return found


@dataclass(frozen=True)
class Lab:
    """Hosts, and the desk: the machine that somebody types at. It reaches every host by ``ssh NAME``."""

    hosts: list[Machine]
    desk: Machine

    @property
    def machines(self) -> list[Machine]:
        return [*self.hosts, self.desk]

    def left_behind(self) -> dict[str, list[str]]:
        """Processes and open ports on every machine; nothing where there are none."""
        found = {}
        for machine in self.machines:
            words = [f"{pid} {command}" for pid, command in machine.processes().items()]
            if machine.sshd.poll() is None:  # it is on
                words += [f"port {address}:{port}" for address, port in machine.listening()]
            if words:
                found[machine.name] = words
        return found


@contextmanager
def machines(
    count: int,
    *,
    shm: str = "256m",
    private: Sequence[Path] = (),
    disk: str = "50%",
    environment: Mapping[str, str] | None = None,
) -> Iterator[Lab]:
    """Hosts ``m1`` ... at 10.77.0.1 ..., and a desk at 10.77.0.254.

    Args:
        shm: size of each machine's /dev/shm.
        private: existing folders that are each machine's own, and empty.
        disk: the most that each of them holds; 50% = half of this machine's memory.
        environment: of every ssh session.
    """
    assert not missing(), missing()
    _sweep()
    mark = f"yf-{os.getpid()}-{time.monotonic_ns() % 10**6}"
    hub, names = f"{mark}-hub", [*(f"m{i + 1}" for i in range(count)), "desk"]
    addresses = [*(f"{NETWORK}.{i + 1}" for i in range(count)), f"{NETWORK}.254"]
    namespaces = [f"{mark}-{name}" for name in names]
    known = "".join(f"{address} {name}\n" for address, name in zip(addresses, names, strict=True))
    found: list[Machine] = []
    before = {}
    with TemporaryDirectory(prefix="yf-machines-") as temporary:
        try:
            before = {signal.SIGTERM: signal.signal(signal.SIGTERM, _leave)}
            _keys(Path(temporary), names, addresses)
            _run("ip", "netns", "add", hub)
            _run("ip", "-n", hub, "link", "add", "switch", "type", "bridge")
            _run("ip", "-n", hub, "link", "set", "switch", "up")
            for i, (name, address, namespace) in enumerate(zip(names, addresses, namespaces, strict=True)):
                _run("ip", "netns", "add", namespace)
                _plug_in(hub, f"port{i}", namespace, address)
                etc = Path("/etc/netns", namespace)
                (etc / "ssh").mkdir(parents=True)
                (etc / "hosts").write_text(f"127.0.0.1 localhost\n{known}")
                (etc / "ssh" / "ssh_config").write_text(_client_config(Path(temporary)))
                mounts = [("/dev/shm", shm), *((str(path), disk) for path in private)]
                start = partial(_start_sshd, Path(temporary), name, namespace, mounts, environment or {})
                found.append(Machine(name, address, namespace, hub, f"port{i}", start(), start))
            for machine in found:
                _wait_for_sshd(machine, Path(temporary))
            yield Lab(found[:-1], found[-1])
        finally:
            for namespace in namespaces:
                _end_all(namespace)
            for machine in found:
                machine.sshd.wait()
            for namespace in (hub, *namespaces):
                _remove(namespace)
            for number, handler in before.items():
                signal.signal(number, handler)


def add_card_in_front(machine: Machine, name: str, address: str) -> None:
    """A card that leads nowhere, before its real one in the kernel's order.

    Args:
        address: with its prefix length.
    """
    machine.ip("link", "delete", CARD)
    machine.ip("link", "add", name, "type", "veth", "peer", "name", f"{name}-end")
    machine.ip("address", "add", address, "dev", name)
    for end in (name, f"{name}-end"):
        machine.ip("link", "set", end, "up")
    _plug_in(machine.hub, machine.port, machine.namespace, machine.address)


def _plug_in(hub: str, port: str, namespace: str, address: str) -> None:
    _run("ip", "-n", hub, "link", "add", port, "type", "veth", "peer", "name", CARD, "netns", namespace)
    _run("ip", "-n", hub, "link", "set", port, "master", "switch", "up")
    _run("ip", "-n", namespace, "address", "add", f"{address}/24", "dev", CARD)
    _run("ip", "-n", namespace, "link", "set", "lo", "up")
    _run("ip", "-n", namespace, "link", "set", CARD, "up")


def _keys(folder: Path, names: Sequence[str], addresses: Sequence[str]) -> None:
    """One key of the user's and one of each machine's; all are gone with the folder."""
    for name in ("user", *names):
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(folder / name))
    lines = []
    for name, address in zip(names, addresses, strict=True):
        key = (folder / f"{name}.pub").read_text().rpartition(" ")[0]
        lines.append(f"{name},{address} {key}\n")
    (folder / "known_hosts").write_text("".join(lines))


def _client_config(folder: Path) -> str:
    """/etc/ssh/ssh_config of every machine: what a user's ~/.ssh/config would say."""
    return f"""Host *
  User root
  IdentityFile {folder}/user
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile /dev/null
"""


def _start_sshd(
    folder: Path, name: str, namespace: str, disks: Sequence[tuple[str, str]], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    config = folder / f"{name}.sshd_config"
    # bash reads ~/.bashrc in a session of ssh, which may take a second or hang, but not below another shell
    settings = " ".join(f'"{key}={value}"' for key, value in {"SHLVL": "2", **environment}.items())
    config.write_text(
        f"""HostKey {folder}/{name}
AuthorizedKeysFile {folder}/user.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
MaxStartups 100
UseDNS no
SetEnv {settings}
"""
    )
    boot = folder / f"{name}.boot_id"  # processes of other boots are not looked for in /proc
    boot.write_text(f"{uuid.uuid4()}\n")
    mounts = [f"mount --bind {boot} /proc/sys/kernel/random/boot_id"]
    mounts += ["mount -t tmpfs tmpfs /run", "mkdir /run/sshd"]
    mounts += [f"mount -t tmpfs -o size={size} tmpfs {shlex.quote(path)}" for path, size in disks]
    start = f"exec /usr/sbin/sshd -D -f {config} -E {folder}/{name}.log"
    script = " && ".join([f"hostname {name}", *mounts, start])
    return subprocess.Popen(
        ["ip", "netns", "exec", namespace, "unshare", "--uts", "--mount", "sh", "-c", script],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def _wait_for_sshd(machine: Machine, folder: Path) -> None:
    deadline = time.monotonic() + READY_S
    log = folder / f"{machine.name}.log"
    while "listening" not in (log.read_text() if log.exists() else ""):
        assert machine.sshd.poll() is None, f"sshd of {machine.name} ended: {log.read_text()}"
        assert time.monotonic() < deadline, f"sshd of {machine.name} is not ready"
        time.sleep(0.02)


def _pids(namespace: str) -> list[int]:
    done = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
    return [int(pid) for pid in done.stdout.split()]


def _end_all(namespace: str) -> None:
    deadline = time.monotonic() + READY_S
    while (pids := _pids(namespace)) and time.monotonic() < deadline:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _remove(namespace: str) -> None:
    subprocess.run(["ip", "netns", "delete", namespace], stderr=subprocess.DEVNULL, check=False)
    shutil.rmtree(Path("/etc/netns", namespace), ignore_errors=True)


def _sweep() -> None:
    """Remove what a run left behind that was killed."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    for line in listed.splitlines():
        namespace = line.split()[0]
        mark, _, rest = namespace.partition("-")
        owner = rest.partition("-")[0]
        if mark == "yf" and owner.isdigit() and not Path("/proc", owner).exists():
            _end_all(namespace)
            _remove(namespace)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"


def _leave(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
