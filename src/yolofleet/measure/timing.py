"""Time works of a training on all ranks: in turns, by wall and CPU seconds. ``bench train`` and ``plan probe`` use it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from yolofleet.support import devices
from yolofleet.support.text import inform
from yolofleet.training.parallel.world import World

WARM_UP = 3  # steps: memory is allocated, kernels are chosen, the image cache is filled
ROUNDS = 5  # turns of works that are compared on an accelerator, which works best on several steps at once


@dataclass(frozen=True)
class Seconds:
    """Wall seconds, and CPU seconds of this process: other jobs on the machine change those less."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> Seconds:
        return cls(time.perf_counter(), time.process_time())

    def since(self, before: Seconds) -> Seconds:
        return Seconds(self.wall - before.wall, self.cpu - before.cpu)

    def over(self, times: int) -> Seconds:
        return Seconds(self.wall / times, self.cpu / times)

    @classmethod
    def median(cls, seconds: Iterable[Seconds]) -> Seconds:
        every = list(seconds)
        return cls(statistics.median(s.wall for s in every), statistics.median(s.cpu for s in every))


@contextmanager
def part(name: str, world: World) -> Iterator[None]:
    """Show the part that is measured now, and tell it to the watchdog."""
    if world.is_main:
        inform(f"measuring: {name}")
    with world.activity.doing(f"bench: {name}"):
        yield


@dataclass(frozen=True)
class Turns:
    """Seconds of one call of each work, by turn."""

    seconds: Mapping[str, Sequence[Seconds]]

    def median(self, name: str) -> Seconds:
        return Seconds.median(self.seconds[name])

    def ratio(self, one: str, other: str, *, by_cpu: bool) -> float:
        """Return the median over turns of the time of ``one`` / that of ``other``: the load of a turn cancels out."""
        pairs = zip(self.seconds[one], self.seconds[other], strict=True)
        return statistics.median(a.cpu / b.cpu if by_cpu else a.wall / b.wall for a, b in pairs)


def in_rounds(
    works: Mapping[str, Callable[[], object]], world: World, rounds: int, calls: Mapping[str, int]
) -> dict[str, list[Seconds]]:
    """Return this rank's seconds of a call of each work, by round. The works take turns, and all ranks begin together.

    Collective: every rank.

    Args:
        calls: of a work in each round; 1 if the work is not named.
    """
    seconds: dict[str, list[Seconds]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            devices.synchronize(world.device)
            world.barrier()
            began = Seconds.now()
            for _ in range(calls.get(name, 1)):
                work()
            devices.synchronize(world.device)
            seconds[name].append(Seconds.now().since(began).over(calls.get(name, 1)))
            world.activity.tick()
    return seconds


def in_turns(works: Mapping[str, Callable[[], object]], world: World, calls: int) -> Turns:
    """Take works in turns, so that other jobs on the machine slow all of them down alike.

    Collective: every rank; the seconds are those of the slowest rank in each turn.

    Args:
        calls: of each work in total. A turn has one; on an accelerator, which works on in the background, it has more,
            and the device is waited for at the end of the turn only.
    """
    turns = calls if devices.is_host(world.device) else min(ROUNDS, calls)
    mine = in_rounds(works, world, turns, dict.fromkeys(works, calls // turns))
    return Turns({name: _slowest(world, seconds) for name, seconds in mine.items()})


def _slowest(world: World, mine: Sequence[Seconds]) -> list[Seconds]:
    """Return the largest seconds of all ranks, one by one. Collective: every rank."""
    every = world.gather([value for s in mine for value in (s.wall, s.cpu)])
    largest = [max(column) for column in zip(*every, strict=True)]
    return [Seconds(*largest[at : at + 2]) for at in range(0, len(largest), 2)]
