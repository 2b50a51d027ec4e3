"""What the HTTP servers of this package share: names, limits of connections, and uvicorn's settings."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Collection
from typing import Any

import uvicorn
from starlette.requests import Request
from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_WAITING = 400  # connections that are not admitted: a process may have 1024 open files on most systems
HEADER_S = 2.0  # until the header of a request is complete
LOOPBACK_NAMES = ("localhost", "127.0.0.1")


def names_of(address: str) -> tuple[list[str], bool]:
    """Return the names under which a server on ``address`` is reached, and whether any address of the machine is one."""
    names = [*LOOPBACK_NAMES, address]
    if not ipaddress.ip_address(address).is_loopback:
        names += [socket.gethostname().lower(), socket.getfqdn().lower()]
    return names, address == "0.0.0.0"


def own_host(request: Request, names: Collection[str], *, any_address: bool) -> str | None:
    """Return the header ``Host`` if it names this server, else None.

    A site of a stranger whose name leads to this address (DNS rebinding) sends another name.

    Args:
        names: that are accepted, without the port.
        any_address: accept every IP address as well: the server listens on all addresses of the machine.
    """
    hosts = request.headers.getlist("host")
    host = hosts[0] if len(hosts) == 1 else ""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    if name.lower() in names:
        return host
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return None
    return host if any_address else None


class PromptProtocol(H11Protocol):
    """Limit the connections, those that the application has admitted apart from the others.

    uvicorn has one limit for all, so one client could lock the others out with silent connections. Here a new connection
    closes the oldest one that is not admitted. ``HEADER_S`` limits the wait for the header of the first request, and ``idle_s``
    that for a later one.
    """

    # one pair for each server: connections that are not admitted, the oldest first, and those that are
    waiting: dict[PromptProtocol, None]
    admitted: set[PromptProtocol]
    idle_s = 0  # 0: HEADER_S
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {**self.app_state, "connection": self}  # a request finds it in its scope
        self.wait()
        self._await_request(HEADER_S)

    def wait(self) -> None:
        """Note that this connection is not, or no longer, admitted. Close the oldest one if there are too many."""
        self.admitted.discard(self)
        self.waiting[self] = None
        if len(self.waiting) > MOST_WAITING:
            oldest = next(iter(self.waiting))
            del self.waiting[oldest]
            oldest.transport.abort()

    def admit(self) -> None:
        """Note that this connection is admitted."""
        self.waiting.pop(self, None)
        self.admitted.add(self)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_request(self.idle_s or HEADER_S)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.waiting.pop(self, None)
        self.admitted.discard(self)
        if self._timer is not None:
            self._timer.cancel()

    def _await_request(self, limit_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(limit_s, self._close_if_silent)

    def _close_if_silent(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


def server_of(
    application: Callable[..., Any], protocol: type[PromptProtocol], *, end_s: int, idle_s: int = 0
) -> uvicorn.Server:
    """Return the server of an application; ``run(sockets=[...])`` answers requests until Ctrl-C, SIGTERM or ``should_exit``.

    Args:
        end_s: time for the requests that have begun when it must end.
        idle_s: time after a request until the next one of its connection is complete; 0: ``HEADER_S``.
    """
    settings = uvicorn.Config(
        application,
        loop="asyncio",
        http=type("Protocol", (protocol,), {"waiting": {}, "admitted": set(), "idle_s": idle_s}),
        ws="none",
        lifespan="off",
        interface="asgi3",
        access_log=False,
        log_config=None,  # its messages could hold addresses
        log_level="critical",
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=idle_s or 5,
        timeout_graceful_shutdown=end_s,
    )
    return uvicorn.Server(settings)
