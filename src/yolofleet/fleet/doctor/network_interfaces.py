"""Network cards and names of this computer, as plain values, and which card torch and NCCL would take.

Cards and addresses come from the kernel itself (netlink), so nothing needs to be installed; on other systems
than Linux the cards cannot be seen. Standard library alone.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from yolofleet.fleet.doctor.machine import Machine, within
from yolofleet.system.kernel_files import number_of, text_of

Card = dict[str, Any]  # JSON-able: name, addresses ["10.0.0.1/24"], up, mtu, kind, speed_mbit

RESOLVE_S = 3.0  # a name server that is gone can take 10 s and more
DOCKER = r"docker\d*|br-[0-9a-f]{12}|podman\d*|cni[-\d].*|flannel.*|cali.*|veth.+|nerdctl\d*"
VIRTUAL_MACHINES = r"virbr.*|vnet\d+|vmnet\d+|vboxnet\d+|lxcbr\d+|lxdbr\d+|incusbr\d+"
PRIVATE_NETWORK = r"tun\d*|tap\d*|wg.*|tailscale\d*|zt.*|ppp\d*|utun\d*|nordlynx|ipsec\d*"
WRONG_KINDS = (  # name of the card, as a whole -> why machines cannot meet on it
    (r"lo\d*", "loopback: it reaches this machine alone"),
    (DOCKER, "a network of containers on this machine: other machines cannot reach it"),
    (VIRTUAL_MACHINES, "a network of virtual machines on this machine: other machines cannot reach it"),
)
VPN = "a private network (VPN): slow, and often filtered"
SECOND_BEST = (  # ... and why they should not
    (PRIVATE_NETWORK, VPN),
    (r"wl.*|wlan\d*", "wireless: slow, and it loses packets"),
)


def wrong_kind(card: Card) -> str:
    """Why a fleet should not meet on this card; "" = it is fine."""
    if card["kind"] in ("tun", "wireguard"):
        return VPN
    kinds = (*WRONG_KINDS, *SECOND_BEST)
    return next((why for pattern, why in kinds if re.fullmatch(pattern, card["name"])), "")


# -- from the kernel -----------------------------------------------------------------------------------------

_GETLINK, _GETADDR, _NEWLINK, _NEWADDR, _DONE, _ERROR = 18, 22, 16, 20, 3, 2
_REQUEST_DUMP = 0x301
_UP, _RUNNING = 0x1, 0x40
_IFNAME, _MTU, _LINKINFO, _INFO_KIND = 3, 4, 18, 1
_ADDRESS, _LOCAL = 1, 2
_HEADER, _LINK, _ADDR = struct.Struct("=LHHLL"), struct.Struct("=BxHiII"), struct.Struct("=BBBBI")


def cards(machine: Machine) -> list[Card] | None:
    """In the kernel's order; None where they cannot be seen."""
    if machine.platform != "linux":
        return None
    try:
        found: dict[int, Card] = {}
        for index, flags, attributes in _dump(_GETLINK, _NEWLINK, _LINK):
            kind = dict(_attributes(attributes.get(_LINKINFO, b""))).get(_INFO_KIND, b"")
            name = attributes[_IFNAME].rstrip(b"\0").decode(errors="replace")
            found[index] = {
                "name": name,
                "addresses": [],
                "up": bool(flags & _UP and flags & _RUNNING),
                "mtu": int.from_bytes(attributes[_MTU], "little") if _MTU in attributes else None,
                "kind": kind.rstrip(b"\0").decode(errors="replace"),
                "speed_mbit": _speed(machine, name),
            }
        for index, prefix, attributes in _dump(_GETADDR, _NEWADDR, _ADDR):
            packed = attributes.get(_LOCAL) or attributes.get(_ADDRESS)
            if packed and index in found:
                found[index]["addresses"].append(f"{ipaddress.ip_address(packed)}/{prefix}")
    except (OSError, struct.error, KeyError, ValueError):  # netlink forbidden, as in some sandboxes
        return None
    return list(found.values())


def _speed(machine: Machine, name: str) -> int | None:
    speed = number_of(machine.system / "class" / "net" / name / "speed")
    return speed if speed and speed > 0 else None


def _dump(ask: int, expected: int, head: struct.Struct) -> Iterator[tuple[int, int, dict[int, bytes]]]:
    """(index of the card, its flags or the address's prefix length, attributes) of every answer."""
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


# -- which one is taken --------------------------------------------------------------------------------------


def ipv4_of(card: Card) -> list[str]:
    """Addresses without their prefix lengths."""
    plain = [text.partition("/")[0] for text in card["addresses"]]
    return [address for address in plain if ":" not in address]


def card_with(found: Iterable[Card], address: str) -> Card | None:
    return next((c for c in found if address in (text.partition("/")[0] for text in c["addresses"])), None)


def network_of(card: Card, address: str) -> str:
    """The subnet of an address of this card, as ``10.0.0.0/24``; the address itself where it has none."""
    for text in card["addresses"]:
        if text.partition("/")[0] == address:
            return str(ipaddress.ip_interface(text).network)
    return address


def usable(found: Iterable[Card]) -> list[Card]:
    """Cards that are up, have an address of the Internet protocol 4, and are of the right kind; where there is none,
    those of a VPN and wireless ones."""
    there = [card for card in found if card["up"] and ipv4_of(card)]
    wrong = {why for _, why in WRONG_KINDS}
    return [card for card in there if not wrong_kind(card)] or [
        card for card in there if wrong_kind(card) not in wrong
    ]


def matches(card_names: Sequence[str], setting: str) -> list[str]:
    """Cards that a value of NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME selects, in the order of the cards.

    NCCL: a comma-separated list of prefixes; ``=`` before it: whole names; ``^``: all but these. Gloo takes
    whole names and knows neither sign.
    """
    exclude, rest = setting.startswith("^"), setting.lstrip("^")
    exact, rest = rest.startswith("="), rest.lstrip("=")
    wanted = [part for part in rest.split(",") if part]

    def fits(name: str) -> bool:
        return any(name == part if exact else name.startswith(part) for part in wanted)

    return [name for name in card_names if fits(name) != exclude]


def nccl_choice(found: Sequence[Card], environment: Mapping[str, str]) -> str | None:
    """The first card that NCCL would take: NCCL_SOCKET_IFNAME, else ib*, else none of docker*, lo and virbr*.

    Source: NCCL's documentation of NCCL_SOCKET_IFNAME; virbr* comes last in what NCCL does.
    """
    names = [card["name"] for card in found if card["up"] and card["addresses"]]
    setting = environment.get("NCCL_SOCKET_IFNAME")
    if setting:
        return next(iter(matches(names, setting)), None)
    for wish in ("ib", "^docker,lo,virbr", "docker", "lo", "virbr"):
        chosen = matches(names, wish)
        if chosen:
            return chosen[0]
    return None


def gloo_choice(
    found: Sequence[Card], environment: Mapping[str, str], host_addresses: Sequence[str]
) -> str | None:
    """The card that torch's gloo would take: GLOO_SOCKET_IFNAME, else the one that has the address of the
    host's own name, else loopback. 127.0.1.1 belongs to loopback.

    Args:
        host_addresses: what the host's own name resolves to here.
    """
    setting = environment.get("GLOO_SOCKET_IFNAME")
    if setting:
        names = [card["name"] for card in found]
        return next((name for name in setting.split(",") if name in names), None)
    for address in host_addresses:
        if address.startswith("127."):
            break
        card = card_with(found, address)
        if card is not None:
            return str(card["name"])
    return next((card["name"] for card in found if card["name"].startswith("lo")), None)


# -- names ---------------------------------------------------------------------------------------------------


def resolve(name: str, deadline_s: float = RESOLVE_S) -> dict[str, Any]:
    """Addresses of a host name as programs here see it: ``addresses`` and ``problem`` ("" where there is none)."""
    late = {"addresses": [], "problem": f"no answer within {deadline_s:g} s"}
    return within(deadline_s, lambda: _look_up(name)) or late


def _look_up(name: str) -> dict[str, Any]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as problem:
        return {"addresses": [], "problem": getattr(problem, "strerror", None) or str(problem)}
    return {"addresses": list(dict.fromkeys(str(entry[4][0]) for entry in found)), "problem": ""}


def route_to(address: str) -> tuple[str, str]:
    """(own address that would be used, "") or ("", why there is no way). Sends nothing."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((address, 9))
            return str(asking.getsockname()[0]), ""
        except OSError as problem:
            return "", problem.strerror or str(problem)


def neighbour_state(machine: Machine, address: str) -> str:
    """Of a machine on the same network: ``known``, ``silent`` (it does not answer) or "" (not to be seen)."""
    for line in text_of(machine.proc / "net" / "arp").splitlines()[1:]:
        fields = line.split()
        if len(fields) >= 4 and fields[0] == address:
            return "known" if int(fields[2], 16) & 0x2 else "silent"
    return ""
