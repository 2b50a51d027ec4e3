"""What a host may answer to a probe (``probes.py``): the shape of each answer, by what was asked.

A host is not believed: it may be broken, of another version, or somebody's who means ill. Names, addresses and
versions go into commands that a person types, so they have nothing in them that a shell would obey.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping
from typing import Any

from yolofleet.errors import ClusterError
from yolofleet.fleet.doctor.shapes import ABSENT, fits, is_number, is_positive, is_whole, misfit

Asked = Mapping[str, Any]

LONGEST_TEXT = 200_000  # characters; the kernel allows a variable 128 KiB
OUTCOMES = ("connected", "refused", "prohibited", "dropped", "silent", "no-route", "self", "other")


def _words(pattern: str) -> Callable[[Any], bool]:
    compiled = re.compile(pattern, re.ASCII)
    return lambda value: isinstance(value, str) and compiled.fullmatch(value) is not None


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= LONGEST_TEXT


def _is_said(value: Any) -> bool:
    return _is_text(value) and bool(value)


def _is_nothing(value: Any) -> bool:
    return isinstance(value, str) and not value


def _is_address(value: Any) -> bool:
    return _is_text(value) and _parses(ipaddress.ip_address, value.partition("%")[0])


def _has_prefix(value: Any) -> bool:
    return _is_text(value) and _parses(ipaddress.ip_interface, value)


def _parses(parse: Callable[[str], object], text: str) -> bool:
    try:
        parse(text)
    except ValueError:
        return False
    return True


def _is_outcome(value: Any) -> bool:
    return value in OUTCOMES


def _are_ports(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(is_whole, value))


def _are_two_ports(value: Any) -> bool:
    return _are_ports(value) and len(value) == 2


def _is_large_file(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and _is_text(value[0]) and is_whole(value[1])


def _is_chain(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(map(_words(r"[\w./-]+"), value))


_count, _perhaps_text = (is_whole, None), (_is_text, None)
_pid = (lambda value: is_whole(value) and value > 0, None)
_host_name = _words(r"[^\s'\"\\`$;&|<>]{1,255}")
_card_name = _words(r"[\w.:@+,~%=-]+")
_version = (_words(r"[\w.+!-]{1,100}"), None)

NAMES = {"addresses": [_is_address], "problem": _is_text}
CARD = {
    "name": _card_name,
    "addresses": [_has_prefix],
    "up": bool,
    "mtu": _count,
    "kind": _is_text,
    "speed_mbit": _count,
}
FIREWALL = {"kind": _is_text, "readable": bool, "rules": [_is_text], "chains": [_is_chain]}
BROKEN = {"problem": _is_said}  # of a probe that came to nothing
FACTS = {
    "host": _host_name,
    "platform": _is_text,
    "network_id": _is_text,
    "memory": ({"available": None}, {"total": is_whole, "available": is_whole, "machine_available": is_whole}),
    "shm": ({"size": is_whole, "free": is_whole, "largest": [_is_large_file]}, None),
    "cores": {"visible": _count, "usable": _count, "quota": (is_number, None)},
    "limits": {"open_files": _count, "open_files_hard": _count, "locked_memory": _count},
    "variables": {str: _is_text},
    "cards": ([CARD], None),
    "names": NAMES,
    "port": ({"port": is_whole, "busy": bool, "pid": _pid, "command": _perhaps_text, "user": _perhaps_text}, None),
    "ephemeral_ports": _are_two_ports,
    "disks": [
        {"folder": _is_text, "below": _is_text, "free": _count, "write_bytes_per_s": (is_number, None), "problem": _perhaps_text}
    ],
    "software": {"python": _is_text, "system": _is_text, "yolofleet": _version, "package_sha256": _is_text,
                 "torch": _version, "nccl": _version, "numpy": _version, "cv2": _version},
}  # fmt: skip
GPU = {"index": _count, "name": _is_text, "memory_mib": _count, "used_mib": _count, "busy_percent": _count,
       "uncorrected_errors": _count}  # fmt: skip
DEVICE = {
    "name": _is_text,
    "capability": _words(r"\d{1,3}\.\d{1,3}"),
    "memory": is_whole,
    "problem": _is_text,
}
TORCH = {"version": _version, "cuda": _version, "hip": _version, "nccl": _version, "arch_list": [_words(r"[\w:+-]{1,100}")],
         "devices": [DEVICE], "problem": _is_text}  # fmt: skip
SLOW_FACTS = {  # left out when it must be quick
    "libraries": ({"problems": {str: _is_text}, "torch": (TORCH, None)}, {**BROKEN, "late": bool}),
    "gpus": {"state": _is_text, "said": _is_text, "cards": is_whole, "driver": _perhaps_text, "gpus": [GPU]},
    "firewall": FIREWALL,
    "clock": {"synchronised": (bool, None)},
    "infiniband": [{"adapter": _is_text, "port": _is_text, "state": _is_text, "rate": _is_text, "layer": _is_text}],
}  # fmt: skip
SPLIT = {"digest": _is_text, "images": is_whole, "labels": is_whole}
ATTEMPT = {"outcome": _is_outcome, "own": (_is_nothing, _is_address), "card": _perhaps_text, "said": _is_text}


def _facts(asked: Asked) -> Any:
    may_lack: dict[str, Any] = {"gpu_count": _count} if not asked.get("count_gpus") else {}
    may_lack |= SLOW_FACTS if asked.get("quick") else {}
    return FACTS | {"gpu_count": _count} | SLOW_FACTS | {name: (ABSENT, of) for name, of in may_lack.items()}


ANSWERS: dict[str, Callable[[Asked], Any]] = {
    "facts": _facts,
    "data": lambda _: ({"splits": {str: SPLIT}, "problem": _is_nothing}, BROKEN),
    "time": lambda _: {"time_s": is_number},
    "look_up": lambda asked: dict.fromkeys(asked["names"], NAMES),
    "firewall": lambda _: FIREWALL,
    "listen": lambda _: {"ports": _are_ports},
    "unlisten": lambda _: dict,
    "reach": lambda asked: lambda value: fits(value, [ATTEMPT]) and len(value) == len(asked["targets"]),
    "measure": lambda _: (
        {"round_trip_s": is_positive, "bytes_per_s": is_positive, "problem": _is_nothing, "stalled": bool},
        {"bytes_per_s": None, **BROKEN, "stalled": bool},
    ),
    "free_port": lambda _: {"port": is_whole},
    "all_reduce": lambda _: (
        {"seconds": is_positive, "barrier_s": is_number, "problem": _is_nothing},
        BROKEN,
    ),
}


def check_answer(host: str, probe: str, asked: Asked, answer: Any) -> None:
    """Raise ClusterError if ``answer`` does not have the form that the question asks for."""
    at = misfit(answer, ANSWERS[probe](asked))
    if at is not None:
        raise ClusterError(
            f"{host} answers {probe!r} as no doctor of this version does: see {probe}{at[:100]}",
            hint="install the same version of yolofleet on every host; if it is the same, that host is broken",
        )
