"""Log in to lost hosts that came back, and to new ones, while the others train."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import Queue

from yolofleet.fleet.hosts.fleet import Host
from yolofleet.fleet.hosts.messages import Message
from yolofleet.fleet.hosts.remote import Remote
from yolofleet.fleet.hosts.ssh import Unreachable
from yolofleet.support.errors import YolofleetError
from yolofleet.support.text import inform

LOGIN_EVERY_S = 3.0
LOGIN_S = 10.0
IS_OFF = ("unknown-host", "port-refused", "no-route", "time-out", "closed")  # or starts, or has no network


@dataclass(frozen=True)
class Wanted:
    """A host that shall take part."""

    host: Host
    host_index: int | None = None  # number of a lost host; None: the run did not have it
    is_asked: bool = False  # a person waits for an answer


class Returns:
    """Log in to lost and new hosts, in the background.

    Args:
        inbox: gets the messages of their connections.
        prepare: makes a host ready, by its host_index.
        admit: checks a new host, and returns its host_index.
        added: returns hosts that a person wants to add.
    """

    def __init__(
        self,
        inbox: Queue[tuple[Remote, Message]],
        prepare: Callable[[int, Remote], None],
        admit: Callable[[Remote], int],
        added: Callable[[], list[Host]],
    ) -> None:
        self._inbox, self._prepare, self._lock = inbox, prepare, threading.Lock()
        self._admit, self._added_hosts = admit, added
        self._wanted: list[Wanted] = []
        self._ready: dict[int, Remote] = {}
        self._opened: list[Remote] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._log_in, name="returns", daemon=True)

    def start(self) -> None:
        """Begin to look for hosts."""
        self._thread.start()

    def wait_for(self, host: Host, host_index: int | None = None) -> None:
        """Log in to a lost host when it is back, or to one that the run does not have yet when it can be reached."""
        with self._lock:
            self._wanted.append(Wanted(host, host_index))

    def warm(self, host_index: int, remote: Remote) -> None:
        """Make a spare host ready in the background; one that cannot is found out when it takes part."""

        def prepare() -> None:
            with suppress(YolofleetError):
                self._prepare(host_index, remote)

        threading.Thread(target=prepare, daemon=True).start()

    def any_ready(self) -> str:
        """Return the name of a host that is ready, or ""."""
        with self._lock:
            return next((remote.name for remote in self._ready.values()), "")

    def take(self) -> list[tuple[int, Remote]]:
        """Return the hosts that are ready, by their numbers."""
        with self._lock:
            found, self._ready = sorted(self._ready.items()), {}
            self._wanted += [
                Wanted(remote.host, host_index) for host_index, remote in found if remote.is_lost
            ]
        return [(host_index, remote) for host_index, remote in found if not remote.is_lost]

    def awaited(self) -> list[str]:
        """Return the names of the hosts that shall take part when they can be reached."""
        with self._lock:
            return sorted({one.host.name for one in self._wanted} | {r.name for r in self._ready.values()})

    def close(self) -> None:
        """End all connections that this object has made."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(LOGIN_S)
        for remote in self._opened:
            remote.close()

    def _log_in(self) -> None:
        said: dict[str, str] = {}
        while not self._closed.wait(LOGIN_EVERY_S):
            added = [Wanted(host, is_asked=True) for host in self._added_hosts()]
            with self._lock:
                self._wanted += added
                wanted = list(self._wanted)
            for one in wanted:
                remote, host_index = Remote(one.host, self._inbox), one.host_index
                try:
                    remote.open(LOGIN_S)
                    self._opened.append(remote)
                    if host_index is None:
                        host_index = self._admit(remote)
                        self._forget(one)
                        one = Wanted(one.host, host_index)
                        self.wait_for(one.host, host_index)
                    self._prepare(host_index, remote)
                except YolofleetError as problem:
                    remote.close()
                    if remote in self._opened:
                        self._opened.remove(remote)
                    what = re.sub(r":\d+", "", problem.what)  # ports differ
                    is_news = said.get(one.host.name) != what
                    # The launcher has reported the loss of a host that is off.
                    is_off = isinstance(problem, Unreachable) and problem.kind in IS_OFF
                    if is_news and (one.is_asked or not is_off):
                        hint = f"; {problem.hint}" if problem.hint else ""
                        inform(f"\nwarning: {one.host.name} does not take part: {problem.what}{hint}")
                        said[one.host.name] = what
                    if one.is_asked and host_index is None:
                        self._forget(one)
                    continue
                self._forget(one)
                with self._lock:
                    self._ready[host_index] = remote

    def _forget(self, one: Wanted) -> None:
        with self._lock:
            self._wanted.remove(one)
