"""Who am I and how do we talk: the processes of one run.

``World`` is built once, in ``worker.py``, from the place that ``place.py`` reads in the environment. The training and
validation of a run communicate through it alone. Each communicating method is a collective: all ranks call it, in the
same order, and it ends within ``timeout_s`` or raises ``ClusterError``.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from yolofleet import devices
from yolofleet.errors import ClusterError
from yolofleet.parallel.activity import Activity
from yolofleet.parallel.listener import LOOPBACK, open_listener
from yolofleet.parallel.place import Place
from yolofleet.parallel.store import connect_store, has_libuv, host_store
from yolofleet.text import echo, listed

SAY_MISSING_S = 20.0  # importing torch takes up to that on a network disk
STORE_ANSWER_S = 300.0  # torch's default for a store
COLLECTIVE_HINT = (
    "yolofleet doctor; NCCL_DEBUG=INFO in front of the command shows which network, driver or device fails"
)


class Store(Protocol):
    """What is used of torch's key-value stores; calls raise RuntimeError when it is gone."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def check(self, keys: list[str], /) -> bool: ...


def _meeting_store(place: Place, timeout_s: float) -> dist.Store:
    """Return the store where the ranks meet: that of torchrun's agent, else one that rank 0 starts.

    Raises:
        RuntimeError: it cannot be reached. OSError: the port is taken.
    """
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if place.rank or by_agent:
        store = connect_store(place.address, place.port, timeout_s)
    elif place.address == LOOPBACK:  # all ranks are on this machine
        store = host_store(open_listener(LOOPBACK, place.port), timeout_s)
    else:  # torch listens on all addresses; see docs/security.md
        store = dist.TCPStore(
            place.address,
            place.port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
            use_libuv=has_libuv(),
        )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"yolofleet/{attempt}", store)


def _missing_ranks(
    store: dist.Store, place: Place, where: str, backend: str, only_device: str, timeout_s: float
) -> str:
    """Wait until every rank has published its backend and device; return the names of those that are late, else "".

    Rank 0 prints whom it waits for when that takes long.
    """
    store.set(f"here/{place.rank}", f"{backend} {only_device}")
    keys = {rank: f"here/{rank}" for rank in range(place.size)}
    for wait_s in (min(SAY_MISSING_S, timeout_s), max(timeout_s - SAY_MISSING_S, 0.1)):
        try:
            store.wait(list(keys.values()), timedelta(seconds=wait_s))
            return ""
        except RuntimeError:
            late = [str(rank) for rank, key in keys.items() if not store.check([key])]
        if not late:  # they have come in this moment
            return ""
        names = f"rank{'s' if len(late) > 1 else ''} {listed(late)}"
        if place.rank == 0 and wait_s == SAY_MISSING_S:
            echo(f"waiting at {where} for {names} of {place.size}", to=sys.stderr)
    return names


def _common_backend(store: dist.Store, place: Place, mine: str) -> str:
    """Return the backend that every rank can use: its own if all have the same, else gloo.

    GPUs that sum through NCCL and CPUs that sum through gloo would wait for each other for ever.

    Raises:
        ClusterError: two ranks see the same single GPU.
    """
    texts = store.multi_get([f"here/{rank}" for rank in range(place.size)])
    published = [text.decode("utf-8", "replace").partition(" ") for text in texts]
    first: dict[str, int] = {}
    for rank, (_, _, only_device) in enumerate(published):
        if only_device and first.setdefault(only_device, rank) != rank:
            raise ClusterError(
                f"ranks {first[only_device]} and {rank} see the same single device: {only_device}",
                hint="start one process for each device, or let each process see all (CUDA_VISIBLE_DEVICES)",
            )
    if {backend for backend, _, _ in published} == {mine}:
        return mine
    if place.rank == 0:
        echo("ranks have different kinds of devices: all sums go through gloo", to=sys.stderr)
    return "gloo"


# In torch 2.6, the destructor of a gloo group holds Python's lock while it waits for gloo's threads, and they may need
# the lock to let go of the last collective's tensor: a deadlock. Groups that ranks have left are therefore kept.
_LEFT_GROUPS: list[Any] = []


@dataclass
class World:
    """One process among ``size``; ``rank`` 0 is the one that writes and prints."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    source: str = "alone"
    host: str = field(default_factory=socket.gethostname)
    activity: Activity = field(default_factory=Activity, compare=False)
    is_guest: bool = False  # another program made the process group (Ray)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @classmethod
    def single(cls, device: torch.device | str = "cpu") -> World:
        return cls(0, 1, 0, 1, torch.device(device))

    @classmethod
    def join(cls, place: Place, device: torch.device, timeout_s: float) -> World:
        """Meet the others: NCCL, or what the device has in its place, for its tensors; gloo for the rest.

        Collective: every rank, once, at most ``timeout_s``.

        Raises:
            ClusterError: a rank is missing.
        """
        devices.select(device)
        is_guest = dist.is_initialized()  # Ray has met them already
        if place.size > 1 and not is_guest:
            backend = devices.collective_backend(device)
            shares_host = place.only_device and not devices.is_host(device)
            only_device = f"{socket.gethostname()} {place.only_device}" if shares_host else ""
            where = f"{place.address}:{place.port}"
            began_s = time.monotonic()
            try:
                store = _meeting_store(place, timeout_s)
                left_s = timeout_s - (time.monotonic() - began_s)
                missing = _missing_ranks(store, place, where, backend, only_device, left_s)
                if not missing:
                    dist.init_process_group(
                        _common_backend(store, place, backend),
                        store=store,
                        rank=place.rank,
                        world_size=place.size,
                        timeout=timedelta(seconds=timeout_s),
                    )
            except (OSError, RuntimeError, ValueError) as problem:
                raise ClusterError(
                    f"rank {place.rank} could not meet the others at {where} within {timeout_s:.0f} s",
                    source=str(problem).splitlines()[0],
                    hint="is the address reachable from every machine, and the port open?",
                ) from None
            if missing:
                raise ClusterError(
                    f"{missing} did not come to {where} within {timeout_s:.0f} s",
                    hint="was it started, with the same address and port, and do its logs say why not? "
                    "--timeout-s waits longer",
                )
        rank, size, local_rank, local_size = place.rank, place.size, place.local_rank, place.local_size
        return cls(rank, size, local_rank, local_size, device, place.source, is_guest=is_guest)

    def connect(self) -> None:
        """Sum one number on the device: NCCL connects at its first collective, and may fail or hang there.

        Collective: every rank, once, after :meth:`join`, under the watchdog.

        Raises:
            ClusterError: the device's collectives do not work.
        """
        if self.size == 1 or devices.is_host(self.device):
            return
        with self.activity.doing("connecting"):
            self.all_reduce_(torch.zeros(1, device=self.device))
            with self._cluster_errors(f"sum a number on {self.device}"):
                devices.synchronize(self.device)  # waiting for NCCL does not wait for the device

    def store(self, name: str) -> Store | None:
        """A connection of one's own to the store where the ranks met, under a name that only they know; None
        when they met otherwise. It talks beside the collectives and answers while they hang.

        Collective: every rank.
        """
        token = self.broadcast_bytes(os.urandom(8).hex().encode()).decode()
        met: Any = dist.distributed_c10d._get_default_store()  # torch has no public way to it
        while isinstance(met, dist.PrefixStore):
            met = met.underlying_store
        if not isinstance(met, dist.TCPStore):
            return None
        try:
            own = connect_store(met.host, met.port, STORE_ANSWER_S)
        except RuntimeError:
            return None
        return dist.PrefixStore(f"yolofleet-{name}-{token}", own)

    @property
    def ends_by_exit(self) -> bool:
        """Whether this process must not leave the group after a failure, but end at once.

        Both the orderly end of NCCL and its abort may wait for ranks that never come to them.
        """
        return self.size > 1 and not devices.is_host(self.device) and not self.is_guest

    def close(self, *, failed: bool = False) -> None:
        """Leave the others. After a failure NCCL is aborted: its orderly end would wait for ranks that never come."""
        if self.size == 1 or not dist.is_initialized():
            return
        if failed and not devices.is_host(self.device):
            with suppress(Exception):  # experimental in torch; what is left open ends with the process
                dist.distributed_c10d._abort_process_group()
        else:
            _LEFT_GROUPS.append(dist.group.WORLD)
            dist.destroy_process_group()

    # -- talking -----------------------------------------------------------------------------------

    def all_reduce_async(self, tensor: Tensor) -> Any:
        """Start summing ``tensor`` over all ranks in place; the result has ``wait()``, or None alone.

        Collective: every rank, same shapes and order.
        """
        if self.size == 1:
            return None
        return self._start("all_reduce", tensor, lambda: dist.all_reduce(tensor, async_op=True))

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks, in place. Collective: every rank."""
        self.wait(self.all_reduce_async(tensor))
        return tensor

    def _start(self, name: str, tensor: Tensor, collective: Callable[[], Any]) -> Any:
        """Call an asynchronous collective; NCCL connects, and may fail, in the first one of its kind."""
        self.activity.started(name, tensor.shape, tensor.dtype)
        with self._cluster_errors(f"start {self.activity.last_text()} on {tensor.device}"):
            return collective()

    @contextmanager
    def _cluster_errors(self, what: str) -> Iterator[None]:
        """Raise the collective library's errors as ClusterError; too little memory stays what it is."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as problem:
            raise ClusterError(
                f"rank {self.rank} could not {what}",
                source=str(problem).splitlines()[0][:300],
                hint=COLLECTIVE_HINT,
            ) from None

    def wait(self, work: Any) -> None:
        """End an asynchronous collective; a lost peer is a ClusterError."""
        if work is None:
            return
        self.activity.waiting = True
        try:
            work.wait()
        except RuntimeError as problem:
            raise ClusterError(
                f"rank {self.rank} lost the others in a collective",
                source=str(problem).splitlines()[0][:300],
                hint="the first rank that failed says why; see logs/rank-*.log of the run",
            ) from None
        finally:
            self.activity.waiting = False

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Every rank's bytes, in rank order (text or numbers, never pickles). Collective: every rank."""
        if self.size == 1:
            return [payload]
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = len(payload)
        self.all_reduce_(lengths)
        longest = int(lengths.max())
        if longest == 0:
            return [b""] * self.size
        mine = torch.zeros(longest, dtype=torch.uint8)
        if payload:
            mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        every = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        self.wait(self._start("all_gather", mine, lambda: dist.all_gather(every, mine, async_op=True)))
        return [t[:n].numpy().tobytes() for t, n in zip(every, lengths.tolist(), strict=True)]

    def broadcast_bytes(self, payload: bytes) -> bytes:
        """Rank 0's bytes on every rank; others pass anything. Collective: every rank."""
        if self.size == 1:
            return payload
        length = torch.tensor([len(payload) if self.is_main else 0], dtype=torch.int64)
        self.broadcast_(length)
        data = torch.zeros(int(length), dtype=torch.uint8)
        if self.is_main and payload:
            data.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        self.broadcast_(data)
        return data.numpy().tobytes()

    def broadcast_(self, tensor: Tensor) -> None:
        """Rank 0's values into every rank's tensor. Collective: every rank."""
        if self.size > 1:
            self.wait(self._start("broadcast", tensor, lambda: dist.broadcast(tensor, 0, async_op=True)))

    def barrier(self) -> None:
        """Wait for every rank. Collective: every rank."""
        self.all_reduce_(torch.zeros(1))

    def sum_rows(self, row: list[float]) -> list[float]:
        """Element-wise sum of every rank's floats, added in rank order. Collective: every rank."""
        rows = [
            struct.unpack(f"<{len(row)}d", packed)
            for packed in self.all_gather_bytes(struct.pack(f"<{len(row)}d", *row))
        ]
        return [sum(column) for column in zip(*rows, strict=True)]
