"""Read which process uses a port, and the rules of the firewall, as far as this user may. Standard library alone."""

from __future__ import annotations

import json
import os
import re
import socket
from typing import Any

from yolofleet.fleet.doctor.machine import Machine
from yolofleet.support.system.kernel_files import entries_of, text_of

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
    with socket.socket() as trial:
        if os.name == "posix":  # on Windows this option would let two processes share a port
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("", port))
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
