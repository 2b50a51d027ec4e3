"""A fleet as a value: its hosts, their devices, and their folders.

It comes from ``--hosts a:8,b:4,c:0+2`` or from a YAML file. OpenSSH knows how to log in (user, port, keys, jump hosts):
~/.ssh/config.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from yolofleet.config.resolve import Resolved, Sourced, resolve
from yolofleet.config.schema import Frozen, setting
from yolofleet.storage.yaml_lines import Located, read_yaml
from yolofleet.support.device_names import ALL, MOST_PROCESSES, numbered, plain_device, processes_of
from yolofleet.support.errors import ConfigError
from yolofleet.support.text import did_you_mean, shown

USER = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"  # no leading hyphen: ssh would take it for an option
MACHINE = rf"(?=[0-9_.-]*[A-Za-z]){USER}|[0-9]{{1,3}}(?:\.[0-9]{{1,3}}){{3}}"  # not 8 or 2024-01-01, which are mistakes
NAME = rf"(?:{USER}@)?(?:{MACHINE})"
VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"
FORMS = (
    "a:8 is GPUs 0 to 7 of host a, a:all all its GPUs, b:0+2 its GPUs 0 and 2, b:2-5 its GPUs 2 to 5, c:+3 its GPU 3 alone, "
    "d:cpu:4 four processes on CPUs"
)
FILE_FORM = "docs/several-machines.md describes the fleet file"
FIRST_PORT = 29500
SPARE = ":spare"  # ends a host that waits and replaces a lost one
MOST_HOSTS, MOST_GPUS = 1024, 64
HERE = "localhost"  # this machine, without ssh
Values = TypeVar("Values", bound=Frozen)


@dataclass(frozen=True)
class Host:
    """One machine of a fleet."""

    name: str  # as OpenSSH knows it; ``localhost`` is this machine, without ssh
    device: str  # as ``--device`` there: ``cpu:2``, ``0,2``, or ``all`` until its GPUs are counted
    address: str = ""  # where the other hosts reach it; "" = the preflight check chooses one
    interface: str = ""  # the network interface for communication; "" = the preflight check chooses one
    python: str = ""  # an interpreter that has yolofleet; "" = the same path as here
    folder: str = ""  # the working folder; "" = the same path as here
    data: str = ""  # the data set there; "" = as ``--data``
    # environment variables of all processes there. The list of processes shows them, so no secrets
    env: Mapping[str, str] = field(default_factory=dict)
    is_here: bool = False  # this process runs there, so it needs no ssh

    @property
    def processes(self) -> int:
        return processes_of(self.device)


@dataclass(frozen=True)
class Fleet:
    """The machines of a run."""

    hosts: tuple[Host, ...]  # rank 0 runs on the first
    source: str = "--hosts"  # the option or file that names the fleet
    port: int = FIRST_PORT  # port of the rendezvous on the first host, or the next free one
    silence_s: float = 20.0  # timeout of heartbeats, after which a host ends everything
    grace_s: float = 30.0  # seconds from a request to stop until processes are killed
    # a run starts on so many of the hosts; the others wait to replace a lost one. 0: on all
    starts_on: int = 0

    @property
    def active(self) -> tuple[Host, ...]:
        """The hosts that a run starts on."""
        return self.hosts[: self.starts_on or None]

    @property
    def spare(self) -> tuple[Host, ...]:
        """The hosts that wait."""
        return self.hosts[len(self.active) :]

    @property
    def processes(self) -> int:
        """Processes that a run starts with."""
        return sum(host.processes for host in self.active)

    def without(self, spares: Collection[str]) -> Fleet:
        """Return the fleet without spares of these names."""
        kept = tuple(host for host in self.spare if host.name not in spares)
        return replace(self, hosts=(*self.active, *kept), starts_on=len(self.active))

    def of(self, numbers: Sequence[int]) -> Fleet:
        """Return the fleet of the hosts with these numbers, in this order."""
        return replace(self, hosts=tuple(self.hosts[number] for number in numbers), starts_on=0)

    def with_spares(self, spares: Fleet) -> Fleet:
        """Return the fleet with other hosts as spares. Raise ConfigError if a host is named twice."""
        hosts = _fleet([(host, False) for host in (*self.hosts, *spares.hosts)], self.source).hosts
        return replace(self, hosts=hosts, starts_on=len(self.active))

    def first_rank(self, node: int) -> int:
        """Return the lowest rank on a host. Ranks are numbered host by host."""
        return sum(host.processes for host in self.hosts[:node])

    def ranks(self, node: int) -> range:
        """Return the ranks on a host."""
        first = self.first_rank(node)
        return range(first, first + self.hosts[node].processes)

    def ranks_text(self, node: int) -> str:
        """Return ``rank 3`` or ``ranks 0 to 7``."""
        ranks = self.ranks(node)
        return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"


def parse_hosts(text: str, device: str = "auto", source: str = "--hosts") -> Fleet:
    """Return the fleet of ``a:8,b:4,c:0+2,d:cpu:2,e:8:spare``. A name without devices gets those of ``--device``.

    Raises:
        ConfigError: an entry is not valid.
    """
    entries = [entry.strip() for entry in text.split(",")]
    return _fleet([(_short(entry, device, source), _is_spare(entry)) for entry in entries], source)


def load_fleet(path: Path, device: str = "auto") -> Fleet:
    """Return the fleet of a YAML file.

    Its keys are ``hosts``, a list of short forms or mappings; ``defaults`` of every host; ``port``, ``silence_s`` and
    ``grace_s``.

    Raises:
        ConfigError: a line is not valid.
    """
    values = read_yaml(path)
    _known(values, ("hosts", "defaults", *FleetNumbers.model_fields), path)
    defaults: Mapping[str, Any] = {}
    if "defaults" in values:
        defaults, line = values["defaults"]
        if not isinstance(defaults, Mapping):
            raise ConfigError("defaults: is not a mapping", source=f"{path}:{line}", hint=FILE_FORM)
        _known(defaults, [name for name in HOST_KEYS if name not in ("host", "address")], path)
    if "hosts" not in values:
        raise ConfigError(f"{path} names no hosts", source=str(path), hint="hosts: [a:8, b:4]")
    listed, line = values["hosts"]
    if not isinstance(listed, list):
        raise ConfigError(
            f"hosts: {shown(listed)} is not a list", source=f"{path}:{line}", hint="hosts: [a:8, b:4]"
        )
    hosts = [(_listed(entry, defaults, device, path, line), _is_spare(entry)) for entry in listed]
    return _fleet(hosts, str(path), **_checked(FleetNumbers, path, values))


def named_fleet(hosts: str | None, file: str | None, device: str) -> Fleet | None:
    """Return the fleet that ``--hosts`` or ``--fleet`` names; None if neither was given.

    Raises:
        ConfigError: both were given, or one is empty. An empty ``--hosts "$NODES"`` must not mean this machine.
    """
    for flag, value in (("--hosts", hosts), ("--fleet", file)):
        if value is not None and not value.strip():
            raise ConfigError(
                f"{flag} is given, and empty",
                hint=f"check that the variable in it is set: {flag} {'a:8,b:4' if flag == '--hosts' else 'fleet.yaml'}",
            )
    if hosts and file:
        raise ConfigError("--hosts and --fleet both name the machines", hint="leave one out")
    if file:
        return load_fleet(Path(file), device)
    return parse_hosts(hosts, device) if hosts else None


def given_fleet(config: Resolved[Any], device: str = "") -> Fleet | None:
    """Return the fleet that ``--hosts`` or ``--fleet`` names, as :func:`named_fleet`; ``device``: instead of ``--device``."""
    hosts, file = (
        getattr(config.value, name) if config.is_given(name) else None for name in ("hosts", "fleet")
    )
    return named_fleet(hosts, file, device or config.value.device)


def _is_spare(entry: object) -> bool:
    return isinstance(entry, str) and entry.endswith(SPARE)


def _fleet(listed: list[tuple[Host, bool]], source: str, **settings: Any) -> Fleet:
    """Return the fleet of hosts, each with whether it waits as a spare."""
    spares = [host for host, is_spare in listed if is_spare]
    hosts = [*(host for host, is_spare in listed if not is_spare), *spares]
    if spares and len(spares) == len(hosts):
        raise ConfigError("all hosts are spares", source=source, hint=f"a:8,b:8,c:8{SPARE}")
    names = [host.name.rpartition("@")[2].lower() for host in hosts]
    if not hosts or len(hosts) > MOST_HOSTS:
        raise ConfigError(
            f"{len(hosts)} hosts; 1 to {MOST_HOSTS} make a fleet", source=source, hint=FILE_FORM
        )
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise ConfigError(
            f"host {twice} is named twice", source=source, hint=f"name it once, with all its devices: {FORMS}"
        )
    return Fleet(tuple(hosts), source, **settings, starts_on=len(hosts) - len(spares) if spares else 0)


# -- the short form ------------------------------------------------------------------------------------------


def _short(entry: str, device: str, source: str) -> Host:
    match = re.fullmatch(rf"({NAME})(?::(.*))?", entry.removesuffix(SPARE), re.DOTALL)
    if not match:
        raise ConfigError(f"{shown(entry)} is not a host", source=source, hint=FORMS)
    name, spec = match[1], match[2]
    if spec is None:
        return Host(name, _bare_device(name, device, source))
    return Host(name, _device(spec, name, source))


def _device(spec: str, name: str, source: str) -> str:
    """Return the value of ``--device`` for a short form: 8 -> 0,1,..,7; 0+2 -> 0,2; +3 -> 3; 0-2 -> 0,1,2; cpu:4 -> cpu:4."""
    if _is_cpus(spec) or spec == ALL:
        return spec
    if re.fullmatch(r"[1-9][0-9]?", spec) and int(spec) <= MOST_GPUS:
        return numbered(range(int(spec)))
    ids = _plain(spec.removeprefix("+").replace("+", ","), source).split(",")
    if ("+" in spec or "-" in spec) and _are_ids(ids):
        return ",".join(ids)
    hint = FORMS
    if spec == "0":
        hint = f"{name}:+0 is GPU 0 alone, {name}:0+1 are GPUs 0 and 1, {name}:2 the first two"
    elif spec.isdigit():
        hint = f"a host has 1 to {MOST_GPUS} GPUs; {FORMS}"
    elif spec.startswith("cpu"):
        hint = f"{name}:cpu:1 to {name}:cpu:{MOST_PROCESSES} start that many processes on its CPUs"
    raise ConfigError(f"{shown(f'{name}:{spec}')}: {shown(spec)} names no devices", source=source, hint=hint)


def _plain(device: str, source: str) -> str:
    try:
        return str(plain_device(device))
    except ValueError as problem:
        raise ConfigError(f"{shown(device)} {problem}", source=source, hint=FORMS) from None


def _is_cpus(text: str) -> bool:
    match = re.fullmatch(r"cpu(?::([1-9][0-9]{0,2}))?", text)
    return match is not None and int(match[1] or 1) <= MOST_PROCESSES


def _are_ids(texts: list[str]) -> bool:
    """Return whether the texts are numbers of GPUs, each once."""
    return all(re.fullmatch(r"0|[1-9][0-9]{0,2}", text) for text in texts) and len({*texts}) == len(texts)


def _bare_device(name: str, device: str, source: str) -> str:
    if device in ("auto", "", "mps"):
        raise ConfigError(
            f"host {name} has no devices",
            source=source,
            hint=f"{FORMS}; --device 0,1 counts for hosts without devices",
        )
    return device


# -- the file ------------------------------------------------------------------------------------------------

PRINTABLE = r"^[^\p{C}\p{Zl}\p{Zp}]*$"  # these texts become parts of command lines


class HostTexts(Frozen):
    """Keys of a host whose values are texts; see :class:`Host`."""

    address: str = setting("", "the host's address as the other hosts reach it", pattern=PRINTABLE)
    interface: str = setting("", "a network interface, such as eth0", pattern=PRINTABLE)
    python: str = setting("", "the path of an interpreter that has yolofleet", pattern=PRINTABLE)
    folder: str = setting("", "the path of the working folder", pattern=PRINTABLE)
    data: str = setting("", "the data set, as for --data", pattern=PRINTABLE)


class FleetNumbers(Frozen):
    """Keys of the whole fleet; see :class:`Fleet`."""

    port: int = setting(Fleet.port, f"a port, such as {FIRST_PORT}", ge=1024, le=65000)
    silence_s: float = setting(Fleet.silence_s, "seconds", ge=5, le=3600)
    grace_s: float = setting(Fleet.grace_s, "seconds", ge=1, le=3600)


HOST_KEYS = ("host", "device", "gpus", *HostTexts.model_fields, "env")


def _checked(model: type[Values], path: Path, *entries: Mapping[str, Located]) -> dict[str, Any]:
    """Return the values of ``model`` that the entries of a file give; a later entry overrides an earlier one."""
    layers = [
        {
            name: Sourced(entry.value, f"{path}:{entry.line}")
            for name, entry in given.items()
            if name in model.model_fields
        }
        for given in entries
    ]
    return resolve(model, layers).value.model_dump()


def _listed(entry: Any, defaults: Mapping[str, Any], device: str, path: Path, list_line: int) -> Host:
    if isinstance(entry, str):
        short = _short(entry, _default_device(defaults, path) or device, f"{path}:{list_line}")
        return Host(short.name, short.device, **_checked(HostTexts, path, defaults), env=_env(defaults, path))
    if not isinstance(entry, Mapping):
        raise ConfigError(
            f"hosts: {shown(entry)} is not a host", source=f"{path}:{list_line}", hint="hosts: [a:8, b:4]"
        )
    _known(entry, HOST_KEYS, path)
    line = next(iter(entry.values())).line if entry else list_line
    source = f"{path}:{line}"
    name = entry["host"].value if "host" in entry else ""
    if not isinstance(name, str) or not re.fullmatch(NAME, name):
        raise ConfigError(f"host: {shown(name)} is not a host's name", source=source, hint="host: node-a")
    if "device" in entry and "gpus" in entry:
        raise ConfigError(
            f"host {name}: device and gpus both choose its devices", source=source, hint="leave one out"
        )
    own = (
        _default_device(entry, path) or _default_device(defaults, path) or _bare_device(name, device, source)
    )
    return Host(
        name,
        own,
        **_checked(HostTexts, path, defaults, entry),
        env={**_env(defaults, path), **_env(entry, path)},
    )


def _default_device(entry: Mapping[str, Any], path: Path) -> str:
    """Return the devices of the key ``device`` (as ``--device``) or ``gpus`` (a number or a list of ids); "" without."""
    if "device" in entry:
        value, line = entry["device"]
        text = _plain(str(value), f"{path}:{line}")
        if not _is_cpus(text) and text != ALL and not _are_ids(text.split(",")):
            raise ConfigError(
                f"device: {shown(value)} is not a valid device for a fleet",
                source=f"{path}:{line}",
                hint=f'device: "0,2", 0-3, all, or cpu:1 to cpu:{MOST_PROCESSES}',
            )
        return text
    if "gpus" in entry:
        value, line = entry["gpus"]
        if value == ALL:
            return ALL
        ids = [str(i) for i in value] if isinstance(value, list) else []
        if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_GPUS:
            ids = [str(i) for i in range(value)]
        if not ids or not _are_ids(ids):
            raise ConfigError(
                f"gpus: {shown(value)} names no devices",
                source=f"{path}:{line}",
                hint="gpus: 8 is GPUs 0 to 7, gpus: [0] is GPU 0 alone, gpus: all is every GPU",
            )
        return ",".join(ids)
    return ""


def _env(entry: Mapping[str, Any], path: Path) -> dict[str, str]:
    if "env" not in entry:
        return {}
    values, line = entry["env"]
    if not isinstance(values, Mapping):
        raise ConfigError("env: is not a mapping", source=f"{path}:{line}", hint="env: {NCCL_DEBUG: WARN}")
    found = {}
    for name, (value, at) in values.items():
        is_text = not isinstance(value, (list, Mapping)) and str(value).isprintable()  # part of a command
        if not re.fullmatch(VARIABLE, name) or not is_text:
            raise ConfigError(
                f"env: {shown(name)}: {shown(value)} is not a valid variable",
                source=f"{path}:{at}",
                hint="env: {NCCL_DEBUG: WARN}; names consist of letters, digits and _",
            )
        found[name] = "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return found


def _known(values: Mapping[str, Any], names: Iterable[str], path: Path) -> None:
    for name, entry in values.items():
        if name not in names:
            line = entry.line if isinstance(entry, Located) else "?"
            raise ConfigError(
                f"unknown key {shown(name)}",
                source=f"{path}:{line}",
                hint=did_you_mean(name, names) or f"one of {', '.join(names)}",
            )
