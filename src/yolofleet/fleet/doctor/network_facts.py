"""Read the network interfaces, host names, ports and firewall of this machine, as plain values.

Rules and owners of ports are read as far as this user may. Interfaces and addresses come from the kernel (netlink), so nothing needs to be installed. On other systems than Linux
the interfaces cannot be seen. This module runs in a Python without pydantic.
"""

from __future__ import annotations

import ipaddress
import json
import re
import socket
import struct
from collections.abc import Iterator
from typing import Any

from yolofleet.fleet.doctor.machine import Machine, within
from yolofleet.support.listener import open_listener
from yolofleet.support.system.proc import entries_of, number_of, text_of

Interface = dict[str, Any]  # for JSON: name, addresses ["10.0.0.1/24"], up, mtu, kind, speed_mbit

RESOLVE_S = 3.0  # an unreachable name server can take 10 s and more
# -- from the kernel -----------------------------------------------------------------------------------------

_GETLINK, _GETADDR, _NEWLINK, _NEWADDR, _DONE, _ERROR = 18, 22, 16, 20, 3, 2
_REQUEST_DUMP = 0x301
_UP, _RUNNING = 0x1, 0x40
_IFNAME, _MTU, _LINKINFO, _INFO_KIND = 3, 4, 18, 1
_ADDRESS, _LOCAL = 1, 2
_HEADER, _LINK, _ADDR = struct.Struct("=LHHLL"), struct.Struct("=BxHiII"), struct.Struct("=BBBBI")


def interfaces(machine: Machine) -> list[Interface] | None:
    """Return the interfaces in the kernel's order; None if they cannot be seen."""
    if machine.platform != "linux":
        return None
    try:
        found: dict[int, Interface] = {}
        for index, flags, attributes in _dump(_GETLINK, _NEWLINK, _LINK):
            kind = dict(_attributes(attributes.get(_LINKINFO, b""))).get(_INFO_KIND, b"")
            name = attributes[_IFNAME].rstrip(b"\0").decode(errors="replace")
            speed = number_of(machine.system / "class" / "net" / name / "speed") or 0
            found[index] = {
                "name": name,
                "addresses": [],
                "up": bool(flags & _UP and flags & _RUNNING),
                "mtu": int.from_bytes(attributes[_MTU], "little") if _MTU in attributes else None,
                "kind": kind.rstrip(b"\0").decode(errors="replace"),
                "speed_mbit": speed if speed > 0 else None,
            }
        for index, prefix, attributes in _dump(_GETADDR, _NEWADDR, _ADDR):
            packed = attributes.get(_LOCAL) or attributes.get(_ADDRESS)
            if packed and index in found:
                found[index]["addresses"].append(f"{ipaddress.ip_address(packed)}/{prefix}")
    except (OSError, struct.error, KeyError, ValueError):  # netlink forbidden, as in some sandboxes
        return None
    return list(found.values())


def _dump(ask: int, expected: int, head: struct.Struct) -> Iterator[tuple[int, int, dict[int, bytes]]]:
    """Yield (index of the interface, its flags or the prefix length of an address, attributes) of every answer."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0) as asking:
        asking.settimeout(2.0)
        asking.bind((0, 0))
        body = head.pack(0, 0, 0, 0, 0)
        asking.send(_HEADER.pack(_HEADER.size + len(body), ask, _REQUEST_DUMP, 1, 0) + body)
        while True:
            data = asking.recv(1 << 17)
            while len(data) >= _HEADER.size:
                length, kind, *_ = _HEADER.unpack_from(data)
                if kind in (_DONE, _ERROR) or length < _HEADER.size:
                    return
                if kind == expected:
                    fields = head.unpack_from(data, _HEADER.size)
                    attributes = dict(_attributes(data[_HEADER.size + head.size : length]))
                    if head is _LINK:
                        yield fields[2], fields[3], attributes
                    else:
                        yield fields[4], fields[1], attributes
                data = data[(length + 3) & ~3 :]


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= 4:
        length, kind = struct.unpack_from("=HH", data)
        if length < 4:
            return
        yield kind & 0x3FFF, data[4:length]
        data = data[(length + 3) & ~3 :]


# -- names ---------------------------------------------------------------------------------------------------


def resolve(name: str, deadline_s: float = RESOLVE_S) -> dict[str, Any]:
    """Return the ``addresses`` of a host name as programs here resolve it, and the ``problem``, "" if there is none."""
    late = {"addresses": [], "problem": f"no answer within {deadline_s:g} s"}
    return within(deadline_s, lambda: _look_up(name)) or late


def _look_up(name: str) -> dict[str, Any]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as problem:
        return {"addresses": [], "problem": getattr(problem, "strerror", None) or str(problem)}
    return {"addresses": list(dict.fromkeys(str(entry[4][0]) for entry in found)), "problem": ""}


def route_to(address: str) -> tuple[str, str]:
    """Return (own address that the kernel would use, "") or ("", why there is no route). It sends nothing."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((address, 9))
            return str(asking.getsockname()[0]), ""
        except OSError as problem:
            return "", problem.strerror or str(problem)


def neighbour_state(machine: Machine, address: str) -> str:
    """Return the state of a machine on the same network: ``known``, ``silent`` (it does not answer) or "" (unknown)."""
    for line in text_of(machine.proc / "net" / "arp").splitlines()[1:]:
        fields = line.split()
        if len(fields) >= 4 and fields[0] == address:
            return "known" if int(fields[2], 16) & 0x2 else "silent"
    return ""


ASK_S = 3.0  # timeout of a firewall's tools
_LISTENING = "0A"
RULES_SHOWN = 4
IPTABLES = ["ip", "filter", "INPUT"]  # the chain of iptables, as nft names it
Filters = tuple[list[str], list[list[str]]]  # rules that drop or reject, and their [family, table, chain]


def port_facts(machine: Machine, port: int) -> dict[str, Any]:
    """Return whether a port is ``busy``; ``pid``, ``command`` and ``user`` of its process are None if unknown."""
    found = _listener(machine, port)
    if found is None:
        return {"port": port, "busy": _refuses(port), "pid": None, "command": None, "user": None}
    uid, inode = found
    pid = _owner(machine, inode)
    command = None
    if pid is not None:
        words = text_of(machine.proc / str(pid) / "cmdline").replace("\0", " ").strip()
        command = words or text_of(machine.proc / str(pid) / "comm") or None
    return {"port": port, "busy": True, "pid": pid, "command": command, "user": _user(uid)}


def _listener(machine: Machine, port: int) -> tuple[int, str] | None:
    """Return (uid, inode) of the socket that listens on a port at any address."""
    for table in ("tcp", "tcp6"):
        for line in text_of(machine.proc / "self" / "net" / table).splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                return int(fields[7]), fields[9]
    return None


def _owner(machine: Machine, inode: str) -> int | None:
    """Return the process that has a socket open; None if it is unknown: only root sees other users' files."""
    for process in entries_of(machine.proc):
        if not process.name.isdecimal():
            continue
        for file in entries_of(process / "fd"):
            try:
                if str(file.readlink()) == f"socket:[{inode}]":
                    return int(process.name)
            except OSError:
                continue
    return None


def _user(uid: int) -> str:
    try:
        import pwd

        return pwd.getpwuid(uid).pw_name
    except (ImportError, KeyError):
        return str(uid)


def _refuses(port: int) -> bool:
    """Return whether a process listens, on systems without the tables of Linux."""
    try:
        open_listener("", port).close()
    except OSError:
        return True
    return False


def ephemeral_ports(machine: Machine) -> list[int]:
    """Return [first, last] of the kernel's ephemeral port range, in which gloo and NCCL listen."""
    numbers = text_of(machine.proc / "sys" / "net" / "ipv4" / "ip_local_port_range").split()
    return [int(n) for n in numbers] if len(numbers) == 2 and "".join(numbers).isdecimal() else [32768, 60999]


# -- firewall ------------------------------------------------------------------------------------------------


def firewall(machine: Machine) -> dict[str, Any]:
    """Return what filters incoming connections.

    ``kind``: firewalld, ufw, nft, iptables, or "" if none is known to be active; ``readable``: whether the rules can be
    read, which takes root; ``rules``: some that drop or reject; ``chains``: their [family, table, chain] in nft.
    """
    rules, chains = _nft(machine) or _iptables(machine) or (None, [])
    kind = "" if not chains else "iptables" if all(chain == IPTABLES for chain in chains) else "nft"
    if re.search(r"^ENABLED=yes", text_of(machine.etc / "ufw" / "ufw.conf"), re.MULTILINE):
        kind = "ufw"
    if machine.run(["firewall-cmd", "--state"], ASK_S).out.strip() == "running":
        kind = "firewalld"
    shown = (rules or [])[:RULES_SHOWN]
    return {"kind": kind, "readable": rules is not None, "rules": shown, "chains": chains}


def _nft(machine: Machine) -> Filters | None:
    """Return what nft shows; None if nft is missing or not permitted."""
    answer = machine.run(["nft", "--json", "list", "ruleset"], ASK_S)
    try:
        items = json.loads(answer.out)["nftables"] if answer.code == 0 else None
    except (ValueError, KeyError, TypeError):
        items = None
    if items is None:
        return None
    waiting = [
        c
        for item in items
        if (c := item.get("chain")) and c.get("hook") == "input" and c["family"] in ("ip", "inet")
    ]
    bases = [[c["family"], c["table"], c["name"]] for c in waiting]
    by_chain: dict[tuple[str, str, str], list[Any]] = {}
    for item in items:
        if rule := item.get("rule"):
            by_chain.setdefault((rule["family"], rule["table"], rule["chain"]), []).append(
                rule.get("expr", [])
            )
    rules, chains = [], []
    for base, chain in zip(bases, waiting, strict=True):
        found = [f"{' '.join(base)}: policy drop"] if chain.get("policy") == "drop" else []
        found += [f"{' '.join(base)}: {verdict}" for verdict in _verdicts(tuple(base), by_chain)]
        rules += found
        chains += [base] if found else []
    return rules, chains


def _verdicts(base: Any, by_chain: dict[tuple[str, str, str], list[Any]]) -> list[str]:
    """Return the verdicts drop and reject of a chain, and of the chains that it jumps to."""
    verdicts, seen, waiting = [], set(), [base]
    while waiting:
        chain = waiting.pop()
        if chain in seen:
            continue
        seen.add(chain)
        for expressions in by_chain.get(chain, []):
            for expression in expressions:
                target = (expression.get("xt") or {}).get("name")  # how nft shows rules of iptables
                further = expression.get("jump") or expression.get("goto")
                if "drop" in expression or target == "DROP":
                    verdicts.append("drop")
                elif "reject" in expression or target == "REJECT":
                    verdicts.append("reject")
                elif further:
                    waiting.append((*chain[:2], further["target"]))
    return verdicts


def _iptables(machine: Machine) -> Filters | None:
    answer = machine.run(["iptables", "-S", "INPUT"], ASK_S)
    if answer.code != 0:
        return None
    lines = [line.strip() for line in answer.out.splitlines()]
    rules = [line for line in lines if re.search(r"^-P INPUT DROP|-j (DROP|REJECT)", line)]
    return rules, [IPTABLES] if rules else []
