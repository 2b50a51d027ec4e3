"""A rendezvous of torchrun's agents over a store on loopback.

torchrun's own backends do not fit: ``c10d`` unpickles what it finds in the store, and
the store of every backend listens on all addresses. Here the agent of one host owns the store, on 127.0.0.1. Agents of
other hosts, and all workers, connect to a port of their own 127.0.0.1: behind it is the store itself, or a relay to it
(``fleet/hosts/relay.py``). Everything in the store is text, numbers or bytes.

Options of ``--rdzv-conf``: ``node`` is the number of this host, 0 by default; ``hosts`` the names of all, with / between
them; ``timeout_s`` how long one waits for the others. ``--rdzv-endpoint=127.0.0.1:PORT`` is
where the store is, unless this agent owns it: then it has got a socket that listens, or the port is 0.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from yolofleet.support.errors import ClusterError
from yolofleet.support.listener import LOOPBACK, open_listener
from yolofleet.support.text import echo, listed, quoted
from yolofleet.training.parallel.store import connect_store, host_store

BACKEND = "loopback"
TIMEOUT_S = 600  # torch's default
PRINT_MISSING_S = 20.0


class LoopbackRendezvous(RendezvousHandler):
    """A rendezvous with fixed membership: hosts ``0`` to ``nodes - 1``, known before the start."""

    def __init__(
        self,
        node: int,
        hosts: list[str],
        run_id: str,
        port: int,
        listener: socket.socket | None,
        limit_s: float,
    ) -> None:
        self._node, self._hosts, self._run_id = node, hosts, run_id
        self._port, self._listener, self._limit_s = port, listener, limit_s
        self._store: TCPStore | None = None
        self._round = 0

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True  # workers use this store too, so rank 0 does not open another

    def next_rendezvous(self) -> RendezvousInfo:
        if self._store is None:
            self._store = self._open()
        self._round += 1  # restarted workers must not read keys of the round before
        store = PrefixStore(f"{self._run_id}/{self._round}", self._store)
        where = RendezvousStoreInfo(LOOPBACK, self._store.port)
        self._wait_for_hosts(store)
        return RendezvousInfo(store, self._node, len(self._hosts), where)

    def _wait_for_hosts(self, store: PrefixStore) -> None:
        """Wait until every host is here. The first one prints which are missing. Raise ClusterError if one does not come."""
        store.set(f"here/{self._node}", "")
        keys, late = {f"here/{n}": name for n, name in enumerate(self._hosts)}, [""]
        for wait_s in (PRINT_MISSING_S, self._limit_s - PRINT_MISSING_S):
            with suppress(RuntimeError):  # its time is over
                store.wait(list(keys), timedelta(seconds=min(max(wait_s, 0.1), self._limit_s)))
            if not (late := [name for key, name in keys.items() if not store.check([key])]):
                return
            if self._node == 0 and wait_s == PRINT_MISSING_S:
                echo(
                    f"{self._hosts[0]} waits for {listed(late)}, at most {self._limit_s:.0f} s (--timeout-s)"
                )
        raise ClusterError(
            f"{listed(late)} did not reach {self._hosts[0]} within {self._limit_s:.0f} s (--timeout-s)",
            hint=f"yolofleet doctor --hosts {quoted(','.join([self._hosts[0], *late]))}",
        )

    def _open(self) -> TCPStore:
        if self._listener is not None:
            return host_store(self._listener, self._limit_s)
        if self._port == 0:
            return host_store(open_listener(LOOPBACK), self._limit_s)
        return connect_store(LOOPBACK, self._port, self._limit_s)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def register() -> None:
    """Register :data:`BACKEND` with torchrun in this process."""
    rendezvous_handler_registry.register(BACKEND, _handler)


_listeners: list[socket.socket] = []


def own_store(listener: socket.socket) -> None:
    """Let the next rendezvous of this process own the store, which listens on this socket."""
    _listeners[:] = [listener]


def _handler(parameters: RendezvousParameters) -> RendezvousHandler:
    _, port = parse_rendezvous_endpoint(parameters.endpoint, default_port=0)
    node, timeout_s = parameters.get_as_int("node", 0), parameters.get_as_int("timeout_s", TIMEOUT_S)
    assert node is not None and timeout_s is not None
    hosts = str(parameters.get("hosts", "this host")).split("/")
    listener = _listeners.pop() if _listeners else None
    return LoopbackRendezvous(node, hosts, parameters.run_id, port, listener, timeout_s)
