"""Judge a machine's network, which interfaces torch and NCCL choose, and the ways from each host to each.

The facts come from ``network_facts.py``, the connection tests from ``probes.py``.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from yolofleet.fleet.doctor.findings import Finding, finding
from yolofleet.fleet.doctor.host_facts import ConnectionTest, Firewall, HostFacts, Interface

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


SLOW_MBIT = 100
LOCKED_MEMORY = 1 << 30  # InfiniBand needs its buffers locked; the usual limit is 8 MiB


def judge_network(facts: HostFacts) -> list[Finding]:
    """Judge interfaces, host name, port, firewall and InfiniBand of one machine."""
    return [*_interfaces(facts), *_host_name(facts), *_port(facts), *_firewall(facts), *_infiniband(facts)]


# -- one machine ---------------------------------------------------------------------------------------------


def interface_text(one: Interface) -> str:
    """Return ``eth0 10.0.0.1/24, 10000 Mbit/s, MTU 1500``."""
    addresses = [text for text in one.addresses if ":" not in text] or one.addresses
    speed = f", {one.speed_mbit} Mbit/s" if one.speed_mbit else ""
    return f"{one.name} {' '.join(addresses)}{speed}, MTU {one.mtu}"


def _interfaces(facts: HostFacts) -> Iterator[Finding]:
    """Judge the interfaces, and which ones torch and NCCL choose by default."""
    if facts.interfaces is None:
        return
    interfaces, variables, good = facts.interfaces, facts.variables, usable(facts.interfaces)
    if not good:
        yield finding("card-none")
        return
    yield finding("cards", interfaces="; ".join(map(interface_text, good)))
    others = [one for one in interfaces if one.up and ipv4_of(one) and one not in good]
    shown = "; ".join(f"{one.name}: {wrong_kind(one)}" for one in others if not one.name.startswith("lo"))
    if shown:
        yield finding("cards-wrong-kind", interfaces=shown)
    for one in good:
        if one.speed_mbit and one.speed_mbit <= SLOW_MBIT:
            yield finding("card-slow", interface=interface_text(one), name=one.name)
    nccl = nccl_choice(interfaces, variables)
    gloo = gloo_choice(interfaces, variables, facts.names.addresses)
    choice = f"by default, NCCL takes {nccl or 'none'} and gloo {gloo or 'none'}"
    bad = {one.name: wrong_kind(one) for one in interfaces if wrong_kind(one) and one not in good}
    wrong = {name: bad[name] for name in (nccl, gloo) if name in bad}
    if "GLOO_SOCKET_IFNAME" not in variables:  # another finding has this cause
        wrong.pop("lo", None)
    setting = f"export NCCL_SOCKET_IFNAME={good[0].name} GLOO_SOCKET_IFNAME={good[0].name}"
    if wrong:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in wrong.items())
        yield finding("card-wrong", choice=choice, reasons=reasons, setting=setting)
    elif len(good) > 1:
        names = ", ".join(one.name for one in good)
        yield finding("card-several", choice=choice, interfaces=names, setting=setting)
    else:
        yield finding("card-choice", choice=choice)


def _host_name(facts: HostFacts) -> Iterator[Finding]:
    host, known = facts.host, facts.names.addresses
    good = [address for one in usable(facts.interfaces) for address in ipv4_of(one)]
    line = f"{good[0] if good else 'ADDRESS'} {host}"
    shown = ", ".join(known)
    if not known:
        yield finding("host-name-unknown", host=host, problem=facts.names.problem, line=line)
    elif all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in known):
        fix = f"in /etc/hosts, in place of the line with {known[0]} {host}: {line}" if good else ""
        yield finding("host-name-loopback", host=host, addresses=shown, fix=fix)
    elif facts.interfaces and not any(interface_with(facts.interfaces, address) for address in known):
        yield finding("host-name-elsewhere", host=host, addresses=shown, line=line)
    else:
        yield finding("host-name", host=host, addresses=shown)


def _port(facts: HostFacts) -> Iterator[Finding]:
    port = facts.port
    if port is None:
        return
    if not port.busy:
        yield finding("port", port=port.port)
        return
    if port.pid is not None:
        owner = f"process {port.pid} of {port.user}: {(port.command or '?')[:120]}"
        fix = f"kill {port.pid}, if it is a leftover; or another port"
    else:
        owner = f"a process of {port.user}" if port.user else "an unknown process"
        fix = f"sudo ss -ltnp 'sport = :{port.port}' shows the process; or another port"
    yield finding("port-busy", port=port.port, owner=owner, fix=fix)


def _firewall(facts: HostFacts) -> Iterator[Finding]:
    firewall = facts.firewall
    if firewall is None or facts.platform != "linux":
        return
    if not firewall.kind:
        yield finding("firewall-open" if firewall.readable else "firewall-unseen")
        return
    low, high = facts.ephemeral_ports
    rules = f" ({'; '.join(firewall.rules)})" if firewall.rules else ""
    networks = [network_of(one, address) for one in usable(facts.interfaces) for address in ipv4_of(one)]
    fix = opening(firewall, networks[0] if networks else "NETWORK")
    yield finding("firewall", kind=firewall.kind, rules=rules, low=low, high=high, fix=fix)


def opening(firewall: Firewall, network: str) -> str:
    """Return what to type so that everything from ``network`` comes in: a line, or one for each known firewall.

    It opens a whole network and not a port, because gloo and NCCL listen on ports that the kernel chooses.
    """
    lines = {
        "firewalld": f"sudo firewall-cmd --permanent --zone=trusted --add-source={network} && "
        "sudo firewall-cmd --reload",
        "ufw": f"sudo ufw allow from {network}",
        "nft": f"sudo nft insert rule inet filter input ip saddr {network} accept",
        "iptables": f"sudo iptables -I INPUT -s {network} -j ACCEPT",
    }
    if firewall.kind == "nft":  # a drop of any chain is final, so each chain needs its line
        return "\n".join(
            lines["iptables"]
            if chain == ["ip", "filter", "INPUT"]
            else f"sudo nft insert rule {' '.join(chain)} ip saddr {network} accept"
            for chain in firewall.chains
        )
    if firewall.kind in lines:
        return lines[firewall.kind]
    return "\n".join(f"{name}: {line}" for name, line in lines.items())


def _infiniband(facts: HostFacts) -> Iterator[Finding]:
    if not facts.infiniband:
        return
    shown = ", ".join(f"{p.adapter}:{p.port} {p.state} {p.rate} {p.layer}" for p in facts.infiniband)
    if not any(port.state == "ACTIVE" for port in facts.infiniband):
        yield finding("infiniband-down", ports=shown)
        return
    yield finding("infiniband", ports=shown)
    locked = facts.limits.locked_memory
    if locked is not None and locked < LOCKED_MEMORY:
        yield finding("locked-memory", mib=locked >> 20)


# -- from host to host ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Endpoint:
    """Where other hosts reach a host: one of its addresses, and the interface that has it."""

    address: str
    interface: str

    def __str__(self) -> str:
        return f"{self.address} ({self.interface})"


def candidates(facts: HostFacts, address: str = "", interface: str = "") -> list[Endpoint]:
    """Return where others may reach a host: as the fleet's description says, else its usable interfaces."""
    if address:
        found = interface_with(facts.interfaces, address)
        return [Endpoint(address, found.name if found else interface)]
    named = [one for one in facts.interfaces or () if one.name == interface]
    return [
        Endpoint(own, one.name)
        for one in (named if interface else usable(facts.interfaces))
        for own in ipv4_of(one)
    ]


def best_endpoint(
    host: str, wanted: Sequence[Endpoint], reached: Mapping[str, Mapping[str, str]]
) -> Endpoint | None:
    """Return the first endpoint that all other hosts reach; if there is none, the one that most hosts reach.

    Args:
        reached: address of this host -> other host -> outcome.
    """

    def count(endpoint: Endpoint) -> int:
        outcomes = reached.get(endpoint.address, {})
        return sum(outcome == "connected" for other, outcome in outcomes.items() if other != host)

    return max(wanted, key=count, default=None)


@dataclass(frozen=True)
class Target:
    """What a host tries to connect to."""

    host: str
    address: str
    port: int
    purpose: str  # what uses such a port


def judge_way(
    source: str, target: Target, test: ConnectionTest, facts: HostFacts | None, firewall: Firewall
) -> Finding:
    """Judge a test of a connection.

    Args:
        test: what ``probes.reach_one`` found on ``source``.
        facts, firewall: of the target's host; None: unknown.
    """
    where = f"{source} -> {target.host}"
    at = f"{target.address}:{target.port} ({target.purpose})"
    through = f" through {test.interface}" if test.interface else ""
    if test.outcome == "connected":
        return finding("ways", where, seen=f"{at} answers{through}")
    reached = interface_with(facts.interfaces if facts else None, target.address)
    network = network_of(reached, target.address)
    if test.own and ipaddress.ip_address(test.own) not in ipaddress.ip_network(network):
        network = test.own  # it comes from another network, through a router
    own = test.interface or "this interface"
    return finding(
        f"way-{test.outcome}",
        where,
        at=at,
        through=through,
        source=source,
        target=target.host,
        address=target.address,
        said=test.said or "no route",
        interface=(reached.name if reached else "INTERFACE") if test.outcome == "stalls" else own,
        own_interface=own,
        let_in=f"on {target.host}, as root:\n{opening(firewall, network)}",
    )
