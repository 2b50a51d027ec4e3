"""A rendezvous of torchrun's agents over a store on loopback.

torchrun's own backends do not fit: ``c10d`` unpickles what it finds in the store, and
the store of every backend listens on all addresses. Here the agent of one host owns the store, on 127.0.0.1. Agents of
other hosts, and all workers, connect to a port of their own 127.0.0.1: behind it is the store itself, or a relay to it
(``fleet/hosts/relay.py``). Everything in the store is text, numbers or bytes.

The option ``node`` of ``--rdzv-conf`` is the number of this host, 0 by default. ``--rdzv-endpoint=127.0.0.1:PORT`` is
where the store is, unless this agent owns it: then it has got a socket that listens, or the port is 0.
"""

from __future__ import annotations

import socket

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from yolofleet.support.listener import LOOPBACK, open_listener
from yolofleet.training.parallel.store import connect_store, host_store

BACKEND = "loopback"
TIMEOUT_S = 600.0  # torch's default, for agents that wait for other hosts


class LoopbackRendezvous(RendezvousHandler):
    """A rendezvous with fixed membership: hosts ``0`` to ``nodes - 1``, known before the start."""

    def __init__(self, node: int, nodes: int, run_id: str, port: int, listener: socket.socket | None) -> None:
        self._node, self._nodes, self._run_id = node, nodes, run_id
        self._port, self._listener = port, listener
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
        return RendezvousInfo(store, self._node, self._nodes, where)

    def _open(self) -> TCPStore:
        if self._listener is not None:
            return host_store(self._listener, TIMEOUT_S)
        if self._port == 0:
            return host_store(open_listener(LOOPBACK), TIMEOUT_S)
        return connect_store(LOOPBACK, self._port, TIMEOUT_S)

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
    node = parameters.get_as_int("node", 0)
    assert node is not None
    listener = _listeners.pop() if _listeners else None
    return LoopbackRendezvous(node, parameters.max_nodes, parameters.run_id, port, listener)
