"""The process group of a run: this rank's identity, and its collectives.

``training/rank/worker.py`` builds ``World`` once, from the place that ``place.py`` reads from the environment. Training and validation
communicate only through it. Each communicating method is a collective: all ranks call it in the same order, and it ends
within ``timeout_s`` or raises ``ClusterError``.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from yolofleet.runs.report.console import NullConsole
from yolofleet.support import devices
from yolofleet.support.errors import ClusterError
from yolofleet.support.listener import LOOPBACK, open_listener
from yolofleet.support.place import Place
from yolofleet.support.text import echo, inform, listed
from yolofleet.training.parallel.activity import Activity
from yolofleet.training.parallel.store import connect_store, has_libuv, host_store

PRINT_MISSING_S = 20.0  # importing torch can take that long on a network disk
# Agents start the ranks when they have met. A rank that waits longer may belong to an agent whose store is gone.
AFTER_AGENTS_S = 180.0
STORE_TIMEOUT_S = 300.0  # torch's default
POLL_S = 0.05
ROUND_S = 5.0  # of long work of rank 0: ranks meet after this time, so that no collective times out
COLLECTIVE_HINT = (
    "yolofleet doctor; NCCL_DEBUG=INFO in front of the command shows which network, driver or device fails"
)


def _join_group(place: Place, device: torch.device, timeout_s: float) -> None:
    """Make the process group of all ranks; see :meth:`World.join`."""
    backend = devices.collective_backend(device)
    shares_host = place.only_device and not devices.is_host(device)
    only_device = ""
    if shares_host:
        # SLURM counts the GPUs of each task from 0 if a control group hides the others: the variable alone is not enough
        only_device = f"{socket.gethostname()} {place.only_device} {devices.uuid_of(device)}".strip()
    where = f"{place.address}:{place.port}"
    most_s, longer = timeout_s, "; --timeout-s waits longer"
    if _by_agent() and timeout_s >= AFTER_AGENTS_S:
        most_s, longer = AFTER_AGENTS_S, ""
    began_s = time.monotonic()
    words = f"rank 0 waits for connections between the ranks, at most {timeout_s:.0f} s (--timeout-s)"
    notice = threading.Timer(PRINT_MISSING_S, echo, [words], {"to": sys.stderr})
    notice.daemon = True
    try:
        meeting = _Meeting(_meeting_store(place, timeout_s), place.rank, most_s)
        left_s = max(most_s - (time.monotonic() - began_s), 0.1)
        missing = _missing_ranks(meeting, place, where, backend, only_device, left_s)
        if not missing:
            if place.rank == 0:
                notice.start()
            dist.init_process_group(
                _common_backend(meeting.store, place, backend),
                store=meeting.store,
                rank=place.rank,
                world_size=place.size,
                timeout=timedelta(seconds=timeout_s),
            )
            dist.all_reduce(torch.zeros(1))  # gloo has connected after it
    except (OSError, RuntimeError, ValueError) as problem:
        raise ClusterError(
            f"rank {place.rank} could not join the other ranks at {where} within {timeout_s:.0f} s",
            source=str(problem).splitlines()[0],
            hint="check that every machine can reach the address and that the port is open; yolofleet doctor --hosts",
        ) from None
    finally:
        notice.cancel()
    if missing:
        hint = f"check that it was started with the same address and port, and read its logs{longer}"
        raise ClusterError(f"{missing} did not connect to {where} within {most_s:.0f} s", hint=hint)


def _by_agent() -> bool:
    """Return whether torchrun's agent has started this process, and owns the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _meeting_store(place: Place, timeout_s: float) -> dist.Store:
    """Return the rendezvous store: that of torchrun's agent, else one that rank 0 starts.

    Raises:
        RuntimeError: the store does not answer. OSError: the port is in use.
    """
    if place.rank or _by_agent():
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
    return dist.PrefixStore("yolofleet", store)


class _Meeting:
    """One meeting of all ranks in a store that may have keys of earlier ones: an agent's store outlives its ranks.

    Rank 0 invents a name for it, and tells it each rank that asks. No number of the launcher can be the name: torchrun's
    agents count restarts each for itself, do not count joins, and begin at 0 if they replace another one.
    """

    def __init__(self, shared: dist.Store, rank: int, timeout_s: float) -> None:
        self._shared, self._rank, self._told, self.is_named = shared, rank, 0, True
        self._name = os.urandom(8).hex()
        self.store = shared
        if rank:
            answer = f"name/{shared.add('asked', 1)}"
            self.is_named = self.wait([answer], timeout_s)
            self._name = shared.get(answer).decode() if self.is_named else ""
        self.store = dist.PrefixStore(self._name, shared)

    def wait(self, keys: list[str], timeout_s: float) -> bool:
        """Wait for keys of ``store``, and return whether they are there. Rank 0 tells the name meanwhile."""
        if self._rank:
            with suppress(RuntimeError):
                self.store.wait(keys, timedelta(seconds=timeout_s))
            return self.store.check(keys)
        gives_up_at_s = time.monotonic() + timeout_s
        while not (is_done := self.store.check(keys)) and time.monotonic() < gives_up_at_s:
            while self._told < self._shared.add("asked", 0):
                self._told += 1
                self._shared.set(f"name/{self._told}", self._name)
            time.sleep(POLL_S)
        return is_done


def _missing_ranks(
    meeting: _Meeting, place: Place, where: str, backend: str, only_device: str, timeout_s: float
) -> str:
    """Wait until every rank has published its backend and device; return the names of missing ranks, else "".

    Rank 0 prints the missing ranks after ``PRINT_MISSING_S``.
    """
    if not meeting.is_named:
        return "rank 0"
    meeting.store.set(f"here/{place.rank}", f"{backend} {only_device}")
    keys = {rank: f"here/{rank}" for rank in range(place.size)}
    for wait_s in (min(PRINT_MISSING_S, timeout_s), max(timeout_s - PRINT_MISSING_S, 0.1)):
        if meeting.wait(list(keys.values()), wait_s):
            return ""
        late = [str(rank) for rank, key in keys.items() if not meeting.store.check([key])]
        names = f"rank{'s' if len(late) > 1 else ''} {listed(late)}"
        if place.rank == 0 and wait_s == PRINT_MISSING_S:
            echo(f"waiting at {where} for {names} of {place.size}", to=sys.stderr)
    return names if late else ""


def _common_backend(store: dist.Store, place: Place, mine: str) -> str:
    """Return the backend that every rank can use: ``mine`` if all ranks have the same, else gloo.

    Ranks that reduce through NCCL and ranks that reduce through gloo would wait for each other for ever.

    Raises:
        ClusterError: two ranks see the same single device.
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
        inform("ranks have different kinds of devices: all reductions use gloo")
    return "gloo"


# In torch 2.6, the destructor of a gloo group holds the GIL while it waits for gloo's threads, which may need the GIL to
# release the last collective's tensor: a deadlock. So this list keeps closed groups alive.
_LEFT_GROUPS: list[Any] = []


@dataclass
class World:
    """This process among ``size``. Rank 0 writes the files of the run and prints."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    source: str = "alone"
    host: str = field(default_factory=socket.gethostname)
    activity: Activity = field(default_factory=Activity, compare=False)
    console: NullConsole = field(default_factory=NullConsole, compare=False)  # that of rank 0 may print
    is_guest: bool = False  # another program made the process group (Ray)
    restarts: int = 0  # attempts before this one, which a failure or a joining host ended

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @classmethod
    def single(cls, device: torch.device | str = "cpu") -> World:
        return cls(0, 1, 0, 1, torch.device(device))

    @classmethod
    def join(
        cls, place: Place, device: torch.device, timeout_s: float, activity: Activity | None = None
    ) -> World:
        """Join the process group. NCCL, or the device's own backend, reduces device tensors; gloo reduces CPU tensors.

        Collective: every rank, once, at most ``timeout_s``.

        Args:
            activity: of this process, if it has begun one.
        Raises:
            ClusterError: a rank is missing.
        """
        devices.select(device)
        is_guest = dist.is_initialized()  # Ray has made the group
        if place.size > 1 and not is_guest:
            _join_group(place, device, timeout_s)
        return cls(
            place.rank,
            place.size,
            place.local_rank,
            place.local_size,
            device,
            place.source,
            is_guest=is_guest,
            restarts=place.restarts,
            activity=activity or Activity(),
        )

    def connect(self) -> None:
        """Run a first collective on the device: NCCL connects in it, and may fail or hang.

        Collective: every rank, also one on a CPU, because others may have GPUs; once, after :meth:`join`, under the watchdog.

        Raises:
            ClusterError: the collective failed.
        """
        if self.size == 1:
            return
        with self.activity.doing("connecting"):
            self.all_reduce_(torch.zeros(1, device=self.device))
            with self._cluster_errors(f"sum a number on {self.device}"):
                devices.synchronize(self.device)  # NCCL's wait() returns before the device has finished

    def store(self, name: str, timeout_s: float) -> dist.Store | None:
        """Open a separate connection to the rendezvous store; return None if it is not a TCPStore.

        It works while collectives hang. A random prefix keeps its keys apart from those of other programs.

        Collective: every rank.
        """
        token = self.broadcast_bytes(os.urandom(8).hex().encode()).decode()
        found: Any = dist.distributed_c10d._get_default_store()  # torch has no public function for it
        while isinstance(found, dist.PrefixStore):
            found = found.underlying_store
        if not isinstance(found, dist.TCPStore):
            return None
        try:
            own = connect_store(found.host, found.port, min(timeout_s, STORE_TIMEOUT_S))
        except RuntimeError:
            return None
        return dist.PrefixStore(f"yolofleet-{name}-{token}", own)

    @property
    def ends_by_exit(self) -> bool:
        """Whether this process must call ``os._exit`` after a failure instead of closing the group.

        Both the shutdown of NCCL and its abort may wait for ranks that never call them.
        """
        return self.size > 1 and not devices.is_host(self.device) and not self.is_guest

    def close(self, *, failed: bool = False) -> None:
        """Close the group. After a failure abort NCCL, because its shutdown would wait for ranks that never call it."""
        if self.size == 1 or not dist.is_initialized():
            return
        if failed and not devices.is_host(self.device):
            with suppress(Exception):  # experimental in torch; the end of the process closes the rest
                dist.distributed_c10d._abort_process_group()
        else:
            _LEFT_GROUPS.append(dist.group.WORLD)
            dist.destroy_process_group()

    # -- collectives -------------------------------------------------------------------------------

    def all_reduce_async(self, tensor: Tensor) -> Any:
        """Start to sum ``tensor`` over all ranks in place; return a handle for :meth:`wait` (None if size is 1).

        Collective: every rank, same shapes and order.
        """
        if self.size == 1:
            return None
        return self._start("all_reduce", tensor, lambda: dist.all_reduce(tensor, async_op=True))

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Sum ``tensor`` over all ranks in place, and return it. Collective: every rank."""
        self.wait(self.all_reduce_async(tensor))
        return tensor

    def _start(self, name: str, tensor: Tensor, collective: Callable[[], Any]) -> Any:
        """Start an asynchronous collective; NCCL connects, and may fail, in the first one of its kind."""
        self.activity.started(name, tensor.shape, tensor.dtype)
        with self._cluster_errors(f"start {self.activity.last_text()} on {tensor.device}"):
            return collective()

    @contextmanager
    def _cluster_errors(self, what: str) -> Iterator[None]:
        """Raise errors of the collective library as ClusterError, except out-of-memory errors."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as problem:
            raise ClusterError(
                f"rank {self.rank} could not {what}", source=_first_sentences(problem), hint=COLLECTIVE_HINT
            ) from None

    def wait(self, work: Any) -> None:
        """Wait for an asynchronous collective.

        Raises:
            ClusterError: another rank is gone, or the deadline has passed.
        """
        if work is None:
            return
        self.activity.waiting = True
        try:
            work.wait()
        except RuntimeError as problem:
            raise ClusterError(
                f"rank {self.rank} lost the other ranks in a collective",
                source=_first_sentences(problem),
                hint="read the message of the first rank that failed, in logs/rank-*.log of the run",
            ) from None
        finally:
            self.activity.waiting = False

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Return every rank's bytes, in rank order (text or numbers, never pickles). Collective: every rank."""
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

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order. JSON carries it, which keeps the bits of floats. Collective: every rank."""
        return [json.loads(packed) for packed in self.all_gather_bytes(json.dumps(value).encode())]

    def broadcast_bytes(self, payload: bytes, source: int = 0) -> bytes:
        """Return the ``payload`` of rank ``source`` on every rank; others' is ignored. Collective: every rank."""
        if self.size == 1:
            return payload
        length = torch.tensor([len(payload) if self.rank == source else 0], dtype=torch.int64)
        self.broadcast_(length, source)
        data = torch.zeros(int(length), dtype=torch.uint8)
        if self.rank == source and payload:
            data.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        self.broadcast_(data, source)
        return data.numpy().tobytes()

    def broadcast_(self, tensor: Tensor, source: int = 0) -> None:
        """Copy the values of rank ``source`` into every rank's tensor. Collective: every rank."""
        if self.size > 1:
            self.wait(self._start("broadcast", tensor, lambda: dist.broadcast(tensor, source, async_op=True)))

    def barrier(self) -> None:
        """Wait for every rank. Collective: every rank."""
        self.all_reduce_(torch.zeros(1))

    def tell_validated(self, done: int, batches: int) -> None:
        """Tell the watchdog and the console that this rank has validated so many batches. No collective."""
        self.activity.tick()
        self.console.validating(done, batches)

    def sum_rows(self, row: list[float]) -> list[float]:
        """Return the element-wise sum of all ranks' floats, added in rank order. Collective: every rank."""
        return [sum(column) for column in zip(*self.gather(row), strict=True)]


def _first_sentences(problem: Exception) -> str:
    """Return what a collective library says of an error, without gloo's advice to read other logs."""
    return str(problem).partition("\n")[0].partition(" This is typically caused by")[0][:300]


def main_does(world: World, task: str, work: Callable[[], None] | None) -> None:
    """Let rank 0 do ``work``, and every rank wait for its end. Collective: every rank.

    For long work that is not a collective, such as reading from a store.

    Args:
        task: of :meth:`Activity.doing`; it has no limit of its own.
        work: of rank 0; may be None on the others.
    Raises:
        ClusterError: on the other ranks, if it failed. Rank 0 raises what ``work`` raised.
    """
    problems: list[BaseException] = []

    def run() -> None:
        assert work is not None
        try:
            work()
        except BaseException as problem:
            problems.append(problem)

    thread = threading.Thread(target=run, daemon=True, name=task) if world.is_main else None
    with world.activity.doing(task):
        if thread is not None:
            thread.start()
        answer = b"wait"
        while answer == b"wait":
            if thread is not None:
                thread.join(ROUND_S)
                answer = b"wait" if thread.is_alive() else b"failed" if problems else b"done"
            answer = world.broadcast_bytes(answer)
    if problems:
        raise problems[0]
    if answer == b"failed":
        raise ClusterError(f"rank 0 failed at {task}", hint="see the error that rank 0 reports")
