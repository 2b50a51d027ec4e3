"""Read the network interfaces and host names of this machine, as plain values.

Interfaces and addresses come from the kernel (netlink), so nothing needs to be installed. On other systems than Linux
the interfaces cannot be seen. This module runs in a Python without pydantic.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Iterator
from typing import Any

from yolofleet.fleet.doctor.machine import Machine, within
from yolofleet.support.system.kernel_files import number_of, text_of

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
