"""Ask several hosts at the same time, and remember which are lost and what was found."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from yolofleet.fleet.doctor.findings import Finding, finding
from yolofleet.fleet.doctor.host_facts import HostFacts, read_answer
from yolofleet.fleet.doctor.network import Endpoint
from yolofleet.support.errors import YolofleetError

Host = TypeVar("Host")
T = TypeVar("T")


def on_each(hosts: Sequence[Host], work: Callable[[Host], T]) -> list[T]:
    """Call ``work`` for all hosts at the same time. Raise the first exception, in their order."""
    pool = ThreadPoolExecutor(max(1, len(hosts)))
    try:
        return list(pool.map(work, hosts))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # after Ctrl-C, do not wait for a host that hangs


@dataclass(frozen=True)
class Peer:
    """A host that answers."""

    name: str  # as the user calls it
    # takes the name of a probe and its arguments, returns the answer; raises YolofleetError if the host is
    # lost
    ask: Callable[[str, Mapping[str, Any]], Any]
    device: str = "auto"  # as ``--device`` there
    # address, interface: where others shall reach it; "" = to be found
    address: str = ""
    interface: str = ""
    data: str = ""  # data set there


@dataclass
class Examination:
    """What was found, and what the next question needs."""

    peers: list[Peer]  # hosts that still answer
    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, HostFacts] = field(
        default_factory=dict
    )  # what each host answered, by name; none for a host that did not
    endpoints: dict[str, Endpoint] = field(default_factory=dict)  # where the others reach each host
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(
        self,
        probe: str,
        arguments: Mapping[str, Any] | Callable[[Peer], Mapping[str, Any]],
        peers: Sequence[Peer] | None = None,
        *,
        trips_s: dict[str, tuple[float, float]] | None = None,
    ) -> dict[str, Any]:
        """Ask hosts at the same time. A host that is lost, or sends something else, is a finding and is asked no more.

        Args:
            peers: ask only these.
            trips_s: filled with when each was asked and when it had answered, by this machine's clock.
        Returns:
            Host -> its answer, as the model of ``host_facts.py``.
        """
        asked = [peer for peer in self.peers if peers is None or peer in peers]
        if not asked:
            return {}

        def one(peer: Peer) -> Any:
            began_s = time.time()
            question = arguments(peer) if callable(arguments) else arguments
            try:
                return read_answer(peer.name, probe, question, peer.ask(probe, question))
            except YolofleetError as problem:
                return problem
            finally:
                if trips_s is not None:
                    trips_s[peer.name] = (began_s, time.time())

        replies = dict(zip([peer.name for peer in asked], on_each(asked, one), strict=True))
        lost = {name: reply for name, reply in replies.items() if isinstance(reply, YolofleetError)}
        with self._lock:
            self.peers = [peer for peer in self.peers if peer.name not in lost]
            self.findings += [
                finding("host-lost", name, seen=error.what, why=f"asked for {probe!r}", fix=error.hint or "")
                for name, error in lost.items()
            ]
        return {name: reply for name, reply in replies.items() if name not in lost}

    @property
    def names(self) -> list[str]:
        return [peer.name for peer in self.peers]
