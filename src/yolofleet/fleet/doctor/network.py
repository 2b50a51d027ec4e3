"""What the facts about networks mean: cards, names and ports of one host, and the way from each host to each.

Touches nothing: the facts come from ``network_interfaces.py`` and ``ports.py``, the attempts to connect from ``probes.py``.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from yolofleet.fleet.doctor.findings import Finding
from yolofleet.fleet.doctor.network_interfaces import (
    Card,
    card_with,
    gloo_choice,
    ipv4_of,
    nccl_choice,
    network_of,
    usable,
    wrong_kind,
)
from yolofleet.fleet.doctor.ports import opening

Facts = Mapping[str, Any]

SLOW_CARD_MBIT = 100
LOCKED_MEMORY = 1 << 30  # InfiniBand wants its buffers locked; the usual default is 8 MiB


def judge_network(facts: Facts, where: str = "") -> list[Finding]:
    """Cards, host name, port, firewall and InfiniBand of one computer."""
    parts: list[Callable[[Facts, str], list[Finding]]] = [
        _cards,
        _choice,
        _host_name,
        _port,
        _firewall,
        _infiniband,
    ]
    return list(chain.from_iterable(part(facts, where) for part in parts))


# -- one computer --------------------------------------------------------------------------------------------


def card_text(card: Card) -> str:
    """``eth0 10.0.0.1/24, 10000 Mbit/s, MTU 1500``."""
    addresses = [text for text in card["addresses"] if ":" not in text] or card["addresses"]
    speed = f", {card['speed_mbit']} Mbit/s" if card["speed_mbit"] else ""
    return f"{card['name']} {' '.join(addresses)}{speed}, MTU {card['mtu']}"


def _cards(facts: Facts, where: str) -> list[Finding]:
    cards = facts["cards"]
    if cards is None:
        return []
    good = usable(cards)
    others = {
        card["name"]: wrong_kind(card)
        for card in cards
        if card["up"] and ipv4_of(card) and card not in good and not card["name"].startswith("lo")
    }
    if not good:
        seen = "no network card that other machines can reach"
        return [Finding("card-none", "note", where, seen, "runs on this machine alone are not concerned")]
    found = [Finding("cards", "ok", where, "; ".join(map(card_text, good)))]
    if others:
        found.append(
            Finding(
                "cards-wrong-kind",
                "note",
                where,
                "; ".join(f"{name}: {why}" for name, why in others.items()),
                "a run that picks one of them waits for the others in vain",
            )
        )
    for card in good:
        if card["speed_mbit"] and card["speed_mbit"] <= SLOW_CARD_MBIT:
            found.append(
                Finding(
                    "card-slow",
                    "warn",
                    where,
                    card_text(card),
                    "the gradients of one step of yolov5s take 2 s and more",
                    "another card or cable: sudo ethtool " + card["name"],
                )
            )
    return found


def _choice(facts: Facts, where: str) -> list[Finding]:
    """What torch and NCCL take when nobody says which card."""
    cards = facts["cards"]
    if not cards or not usable(cards):
        return []
    variables = facts["variables"]
    nccl = nccl_choice(cards, variables)
    gloo = gloo_choice(cards, variables, facts["names"]["addresses"])
    seen = f"left to themselves, NCCL takes {nccl or 'none'} and gloo {gloo or 'none'}"
    bad = {card["name"]: wrong_kind(card) for card in cards if wrong_kind(card) and card not in usable(cards)}
    wrong = {name: bad[name] for name in (nccl, gloo) if name in bad}
    if "GLOO_SOCKET_IFNAME" not in variables:  # loopback because of the host's name, which is said there
        wrong.pop("lo", None)
    first = usable(cards)[0]["name"]
    setting = f"export NCCL_SOCKET_IFNAME={first} GLOO_SOCKET_IFNAME={first}"
    ours = "yolofleet train --hosts sets them on every host; by hand: "
    if wrong:
        why = "; ".join(f"{name}: {reason}" for name, reason in wrong.items())
        return [Finding("card-wrong", "warn", where, seen, why, ours + setting)]
    if len(usable(cards)) > 1:
        names = ", ".join(card["name"] for card in usable(cards))
        why = f"several cards ({names}): on a network that not all machines share, they cannot meet"
        return [Finding("card-several", "note", where, seen, why, ours + setting)]
    return [Finding("card-choice", "ok", where, seen)]


def _host_name(facts: Facts, where: str) -> list[Finding]:
    host, names, cards = facts["host"], facts["names"], facts["cards"] or []
    good = [address for card in usable(cards) for address in ipv4_of(card)]
    line = f"{good[0]} {host}" if good else f"ADDRESS {host}"
    if not names["addresses"]:
        return [
            Finding(
                "host-name-unknown",
                "warn",
                where,
                f"this machine's own name {host} has no address: {names['problem']}",
                "gloo falls back to loopback, so other machines cannot connect; torchrun waits for name servers",
                f"echo '{line}' | sudo tee -a /etc/hosts",
            )
        ]
    shown = ", ".join(names["addresses"])
    loopback = [address for address in names["addresses"] if _is_loopback(address)]
    if loopback and len(loopback) == len(names["addresses"]):
        return [
            Finding(
                "host-name-loopback",
                "note",  # so Debian and Ubuntu install it
                where,
                f"this machine's own name {host} is {shown}",
                "yolofleet names the card; gloo and torchrun by hand would tell other machines to connect to themselves",
                f"in /etc/hosts, in place of the line with {loopback[0]} {host}: {line}" if good else "",
            )
        ]
    if cards and not any(card_with(cards, address) for address in names["addresses"]):
        return [
            Finding(
                "host-name-elsewhere",
                "warn",
                where,
                f"this machine's own name {host} is {shown}, and no card here has that address",
                "an old entry: other machines would connect to somebody else",
                f"in /etc/hosts: {line}",
            )
        ]
    return [Finding("host-name", "ok", where, f"{host} is {shown}")]


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _port(facts: Facts, where: str) -> list[Finding]:
    port = facts["port"]
    if port is None:
        return []
    if not port["busy"]:
        return [Finding("port", "ok", where, f"port {port['port']} is free")]
    if port["pid"] is not None:
        owner = f"process {port['pid']} of {port['user']}: {(port['command'] or '?')[:120]}"
        fix = f"kill {port['pid']}, if it is a leftover; or another port"
    else:
        owner = f"a process of {port['user']}" if port["user"] else "somebody"
        fix = f"sudo ss -ltnp 'sport = :{port['port']}' shows who; or another port"
    return [
        Finding(
            "port-busy",
            "warn",
            where,
            f"port {port['port']} is taken by {owner}",
            "'Address already in use' under torchrun with this --master_port; yolofleet takes the next free one",
            fix,
        )
    ]


def _firewall(facts: Facts, where: str) -> list[Finding]:
    firewall = facts.get("firewall")
    if firewall is None or facts["platform"] != "linux":
        return []
    low, high = facts["ephemeral_ports"]
    networks = [network_of(c, a) for c in usable(facts["cards"] or []) for a in ipv4_of(c)]
    if firewall["kind"]:
        rules = f" ({'; '.join(firewall['rules'])})" if firewall["rules"] else ""
        return [
            Finding(
                "firewall",
                "note",
                where,
                f"{firewall['kind']} filters what comes in{rules}",
                f"other machines must reach ports {low} to {high} here: gloo and NCCL choose among them",
                opening(firewall, networks[0] if networks else "NETWORK"),
            )
        ]
    if not firewall["readable"]:
        return [
            Finding(
                "firewall-unseen",
                "note",
                where,
                "the firewall's rules cannot be seen: that takes root, and the program nft or iptables",
                "whether others are let in shows when they try: yolofleet doctor --hosts",
            )
        ]
    return [Finding("firewall-open", "ok", where, "no firewall rule here refuses what comes in")]


def _infiniband(facts: Facts, where: str) -> list[Finding]:
    ports = facts.get("infiniband")
    if not ports:
        return []
    shown = ", ".join(f"{p['adapter']}:{p['port']} {p['state']} {p['rate']} {p['layer']}" for p in ports)
    active = [port for port in ports if port["state"] == "ACTIVE"]
    if not active:
        return [
            Finding(
                "infiniband-down",
                "warn",
                where,
                shown,
                "NCCL uses the slower network",
                "cable, switch, subnet manager: ibstat",
            )
        ]
    found = [Finding("infiniband", "ok", where, shown)]
    locked = facts["limits"]["locked_memory"]
    if locked is not None and locked < LOCKED_MEMORY:
        found.append(
            Finding(
                "locked-memory",
                "warn",
                where,
                f"a process may lock {locked >> 20} MiB of memory, and there is InfiniBand",
                "NCCL fails with 'ibv_reg_mr' or 'unhandled system error'",
                "'* - memlock unlimited' in /etc/security/limits.conf; docker run --ulimit memlock=-1",
            )
        )
    return found


# -- from host to host ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Meeting:
    """Where a host can be reached by the others: one of its addresses, and the card that has it."""

    address: str
    card: str


def candidates(facts: Facts, address: str = "", interface: str = "") -> list[Meeting]:
    """Addresses of a host at which others may find it: what is said for it, else all of its usable cards in
    the kernel's order.

    Args:
        address, interface: as the fleet's description says.
    """
    cards = facts["cards"] or []
    if address:
        card = card_with(cards, address)
        return [Meeting(address, str(card["name"]) if card else interface)]
    named = [card for card in cards if card["name"] == interface] if interface else usable(cards)
    return [Meeting(own, str(card["name"])) for card in named for own in ipv4_of(card)]


def meeting_of(
    host: str, wanted: Sequence[Meeting], reached: Mapping[str, Mapping[str, str]]
) -> Meeting | None:
    """The first address at which all other hosts reach this one; if there is none, the one that most reach.

    Args:
        reached: address of this host -> other host -> outcome.
    """

    def got_through(meeting: Meeting) -> int:
        outcomes = reached.get(meeting.address, {})
        return sum(outcome == "connected" for other, outcome in outcomes.items() if other != host)

    return max(wanted, key=got_through, default=None)


def judge_way(source: str, target: str, attempt: Facts, target_facts: Facts, port_name: str) -> Finding:
    """An attempt to connect, in words.

    Args:
        attempt: what ``probes.reach_one`` found on ``source``.
        target_facts: of the host that listened.
        port_name: what the port stands for.
    """
    where = f"{source} -> {target}"
    at = f"{attempt['address']}:{attempt['port']} ({port_name})"
    through = f" through {attempt['card']}" if attempt["card"] else ""
    outcome, own = attempt["outcome"], attempt["own"]
    card = card_with(target_facts["cards"] or [], attempt["address"])
    network = network_of(card, attempt["address"]) if card else attempt["address"]
    if own and "/" in network and ipaddress.ip_address(own) not in ipaddress.ip_network(network):
        network = own  # it comes from another network, by a router
    let_in = f"on {target}, as root:\n{opening(_firewall_of(target_facts), network)}"
    if outcome == "connected":
        return Finding("ways", "ok", where, f"{at} answers{through}")
    if outcome == "refused":
        return Finding(
            "way-refused",
            "fault",
            where,
            f"{at}: connection refused{through}, although {target} listens there",
            f"a firewall on {target} or on the way rejects it (REJECT)",
            let_in,
        )
    if outcome == "prohibited":
        return Finding(
            "way-prohibited",
            "fault",
            where,
            f"{at}: '{attempt['said']}' at once{through}, although there is a route",
            f"a firewall on {target} (firewalld answers so) or a router on the way rejects it",
            let_in,
        )
    if outcome == "dropped":
        return Finding(
            "way-dropped",
            "fault",
            where,
            f"{at}: {attempt['said']}{through}",
            f"a firewall on {target} or on the way drops it without a word (DROP; in clouds: the security group)",
            let_in,
        )
    if outcome == "silent":
        return Finding(
            "way-silent",
            "fault",
            where,
            f"{at}: no machine answers to this address on the network of {attempt['card'] or 'this card'}",
            "another cable, switch or VLAN, or another machine's card is down: this is the wrong card",
            f"name the right one in fleet.yaml: interface: CARD or address: ADDRESS of {target}",
        )
    if outcome == "no-route":
        return Finding(
            "way-no-route",
            "fault",
            where,
            f"{attempt['address']}: {attempt['said'] or 'no route'}",
            f"{source} knows no way to this network",
            f"on {source}: ip route get {attempt['address']}; or name another card of {target} in fleet.yaml: "
            "interface: CARD",
        )
    if outcome == "self":
        return Finding(
            "way-self",
            "fault",
            where,
            f"{attempt['address']} is an address of {source} itself",
            "each machine has such a network of its own (as docker0): this is the wrong card",
            f"name the right one in fleet.yaml: interface: CARD or address: ADDRESS of {target}",
        )
    return Finding(
        "way-other",
        "fault",
        where,
        f"{at}: something else answered ({attempt['said']})",
        "a proxy, an address that is translated (NAT), or two machines with the same address",
        f"on {source}: ip neigh show {attempt['address']}",
    )


def _firewall_of(facts: Facts) -> dict[str, Any]:
    return facts.get("firewall") or {"kind": "", "chains": []}
