"""Questions of the doctor to a host, by name. Standard library alone; arguments and answers are plain values.

``PROBES`` is the complete list of what the other end of a connection may ask. Every probe ends within its deadline and
changes nothing: it writes only unnamed files that measure the disk, the index of a data set in the cache, and bytes to
callers that know the token of :func:`connections.listen`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from yolofleet.fleet.doctor.connections import free_port, listen, measure, reach, unlisten
from yolofleet.fleet.doctor.machine import Machine
from yolofleet.fleet.doctor.machine_facts import all_facts, in_child
from yolofleet.fleet.doctor.network_facts import firewall, resolve

Values = dict[str, Any]  # for JSON


def run_probe(name: str, arguments: Mapping[str, Any]) -> Any:
    """Return the answer of a probe. Raise LookupError if it does not exist."""
    if name not in PROBES:
        raise LookupError(f"no probe {name[:40]!r}")
    return PROBES[name](arguments)


def data(arguments: Mapping[str, Any]) -> Values:
    """Return digests of the data set ``data``, as the module ``module`` of this package computes them.

    Raises:
        LookupError: it is no module of this package.
    """
    module = str(arguments["module"])
    if not re.fullmatch(r"yolofleet(\.[a-z_]+)+", module):
        raise LookupError(f"no module {module[:40]!r}")
    wanted = {"data": str(arguments["data"]), "single_cls": bool(arguments.get("single_cls"))}
    return in_child("data", wanted, command=(module,))


def look_up(arguments: Mapping[str, Any]) -> Values:
    """Return the addresses that this machine resolves ``names`` to."""
    names = [str(name) for name in arguments["names"]]
    with ThreadPoolExecutor(8) as pool:
        return dict(zip(names, pool.map(resolve, names), strict=True))


def all_reduce(arguments: Mapping[str, Any]) -> Values:
    """Run one rank of a sum over all hosts through torch's gloo, on the interface ``card`` ("": gloo's choice)."""
    wanted = {name: arguments[name] for name in ("address", "port", "rank", "size", "deadline_s")}
    interface = str(arguments["card"])
    return in_child("all_reduce", wanted, {"GLOO_SOCKET_IFNAME": interface} if interface else {})


PROBES: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "facts": all_facts,
    "data": data,
    "time": lambda _: {"time_s": time.time()},
    "look_up": look_up,
    "firewall": lambda _: firewall(Machine()),
    "listen": listen,
    "unlisten": unlisten,
    "reach": reach,
    "measure": measure,
    "free_port": free_port,
    "all_reduce": all_reduce,
}
