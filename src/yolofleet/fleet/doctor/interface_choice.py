"""Which network interfaces of a machine can connect it to others, and which ones torch and NCCL choose."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence

from yolofleet.fleet.doctor.host_facts import Interface

DOCKER = r"docker\d*|br-[0-9a-f]{12}|podman\d*|cni[-\d].*|flannel.*|cali.*|veth.+|nerdctl\d*"
VIRTUAL_MACHINES = r"virbr.*|vnet\d+|vmnet\d+|vboxnet\d+|lxcbr\d+|lxdbr\d+|incusbr\d+"
PRIVATE_NETWORK = r"tun\d*|tap\d*|wg.*|tailscale\d*|zt.*|ppp\d*|utun\d*|nordlynx|ipsec\d*"
WRONG_KINDS = (  # pattern of the whole name -> why machines cannot meet on the interface
    (r"lo\d*", "loopback: it reaches this machine alone"),
    (DOCKER, "a network of containers on this machine: other machines cannot reach it"),
    (VIRTUAL_MACHINES, "a network of virtual machines on this machine: other machines cannot reach it"),
)
VPN = "a private network (VPN): slow, and often filtered"
SECOND_BEST = (  # ... and why they should not
    (PRIVATE_NETWORK, VPN),
    (r"wl.*|wlan\d*", "wireless: slow, and it loses packets"),
)


def wrong_kind(interface: Interface) -> str:
    """Return why a fleet should not meet on this interface; "" if it may."""
    if interface.kind in ("tun", "wireguard"):
        return VPN
    kinds = (*WRONG_KINDS, *SECOND_BEST)
    return next((why for pattern, why in kinds if re.fullmatch(pattern, interface.name)), "")


def ipv4_of(interface: Interface) -> list[str]:
    """Return the IPv4 addresses without their prefix lengths."""
    plain = [text.partition("/")[0] for text in interface.addresses]
    return [address for address in plain if ":" not in address]


def interface_with(interfaces: Iterable[Interface] | None, address: str) -> Interface | None:
    """Return the interface that has an address; None if there is none."""
    return next(
        (i for i in interfaces or () if address in (text.partition("/")[0] for text in i.addresses)), None
    )


def network_of(interface: Interface | None, address: str) -> str:
    """Return the subnet of an address of this interface, as ``10.0.0.0/24``; the address itself if it has none."""
    for text in interface.addresses if interface else ():
        if text.partition("/")[0] == address:
            return str(ipaddress.ip_interface(text).network)
    return address


def usable(interfaces: Iterable[Interface] | None) -> list[Interface]:
    """Return interfaces of the right kind that are up and have an IPv4 address; else VPNs and wireless ones."""
    there = [one for one in interfaces or () if one.up and ipv4_of(one)]
    wrong = {why for _, why in WRONG_KINDS}
    return [one for one in there if not wrong_kind(one)] or [
        one for one in there if wrong_kind(one) not in wrong
    ]


def matches(names: Sequence[str], setting: str) -> list[str]:
    """Return the names that a value of NCCL_SOCKET_IFNAME selects, in their order.

    The value is a comma-separated list of prefixes. ``=`` before it means whole names, and ``^`` all but these. For
    GLOO_SOCKET_IFNAME, gloo takes whole names and knows neither sign.
    """
    exclude, rest = setting.startswith("^"), setting.lstrip("^")
    exact, rest = rest.startswith("="), rest.lstrip("=")
    wanted = [part for part in rest.split(",") if part]

    def fits(name: str) -> bool:
        return any(name == part if exact else name.startswith(part) for part in wanted)

    return [name for name in names if fits(name) != exclude]


def nccl_choice(interfaces: Sequence[Interface], environment: Mapping[str, str]) -> str | None:
    """Return the first interface that NCCL would use: NCCL_SOCKET_IFNAME, else ib*, else none of docker*, lo, virbr*.

    Source: NCCL's documentation of NCCL_SOCKET_IFNAME; NCCL's code leaves virbr* for last.
    """
    names = [one.name for one in interfaces if one.up and one.addresses]
    setting = environment.get("NCCL_SOCKET_IFNAME")
    for pattern in (setting,) if setting else ("ib", "^docker,lo,virbr", "docker", "lo", "virbr"):
        chosen = matches(names, pattern)
        if chosen:
            return chosen[0]
    return None


def gloo_choice(
    interfaces: Sequence[Interface], environment: Mapping[str, str], host_addresses: Sequence[str]
) -> str | None:
    """Return the interface that torch's gloo would use.

    It is GLOO_SOCKET_IFNAME, else the one with the address of the host's own name, else loopback, to which 127.0.1.1
    belongs.

    Args:
        host_addresses: what the host's own name resolves to there.
    """
    setting = environment.get("GLOO_SOCKET_IFNAME")
    if setting:
        names = [one.name for one in interfaces]
        return next((name for name in setting.split(",") if name in names), None)
    for address in host_addresses:
        if address.startswith("127."):
            break
        one = interface_with(interfaces, address)
        if one is not None:
            return one.name
    return next((one.name for one in interfaces if one.name.startswith("lo")), None)
