"""What a rank asks for, such as to stop or to save, and when it does.

With ``auto``, saves between the ends of epochs follow J. W. Young, "A first order approximation to the optimum checkpoint
interval" (1974, doi 10.1145/361147.361115), which J. T. Daly (2006, doi 10.1016/j.future.2004.11.016) confirms for costs
far below the time between failures: interval = sqrt(2 x cost of a save x mean time between failures).
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

from yolofleet.support.system.signals import handling, request_stop, stop_source
from yolofleet.support.terminal import duration
from yolofleet.support.text import announcement

if TYPE_CHECKING:
    from yolofleet.config.schema import TrainConfig
    from yolofleet.training.parallel.activity import Activity
    from yolofleet.training.parallel.world import World

NOTICE = "--preempt-notice on "
# Assumption: a host fails once a week, counting preemptions and reboots. Hosts of a cluster fail less often (a few times
# a year), spot machines more often. The interval changes only with its square root.
BETWEEN_FAILURES_S = 7 * 86400.0
MOST_COST = 0.01  # of the time
FIRST_SAVE_S = 600.0  # at the latest: before it, no cost is known


class Asked(NamedTuple):
    """What a rank asks for, or any rank. The ranks sum it together with the label counts of a step (``step.py``).

    Attributes:
        stop: abandon the step.
        save, keep: after the step, save the state on disk, or keep it in memory.
        end: end the run in time (``--minutes``).
        unreadable: tell the other ranks of images that were replaced.
        compare: compare the speed of the ranks (``--shares auto``).
    """

    stop: bool = False
    save: bool = False
    keep: bool = False
    end: bool = False
    unreadable: bool = False
    compare: bool = False


NOTHING = Asked()


class StopRequest:
    """Records Ctrl-C or a stop signal (``support/system/signals.py``); the loop then saves the state and stops.

    One process abandons the step that it computes, after the micro-batch. Several finish it, and start no other.

    A request during a validation ends the validation; a resumed run repeats it. A second Ctrl-C ends the process at once.

    Args:
        activity: of this rank. The heartbeats tell the other ranks of the request, so that their validations end, too.

    Attributes:
        source: what asked this rank: the name of a signal, or ``--preempt-notice on HOST``; "" before.
        asked_at_s: when, by time.monotonic.
    """

    def __init__(self, activity: Activity) -> None:
        self.source, self.asked_at_s = "", 0.0
        self._activity = activity

    def __bool__(self) -> bool:
        """Return whether this rank knows of a request, its own or another rank's."""
        return self._activity.stop_requested

    @property
    def machine_goes(self) -> bool:
        """Whether this rank was asked because its machine will be taken away."""
        return self.source.startswith(NOTICE)

    def saved_note(self) -> str:
        """Return a note about a state that was saved just now, for a request that this rank got."""
        return f"the state was saved {duration(time.monotonic() - self.asked_at_s)} after the request"

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.source and number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if not self.source:  # a step can be long, so tell the user at once that Ctrl-C has worked
            self.source, self.asked_at_s = stop_source(number), time.monotonic()
            self._activity.stop_requested = True
            with suppress(OSError):
                words = "stopping, then saving; Ctrl-C again ends at once"
                os.write(2, announcement(f"\n{words}").encode())


@contextmanager
def stop_requests(activity: Activity) -> Iterator[StopRequest]:
    """Handle the signals that ask this rank to stop, inside the block."""
    stop = StopRequest(activity)
    with handling(stop.on_signal):
        yield stop


def preempt_notices(config: TrainConfig, world: World) -> AbstractContextManager[None]:
    """Watch for the notice that this machine will be taken away, in one process of each machine (``--preempt-notice``)."""
    if not config.preempt_notice or world.local_rank:
        return nullcontext()
    from yolofleet.training.preempt_notice import preempt_notices

    return preempt_notices(
        config.preempt_notice,
        notice=lambda: request_stop(f"{NOTICE}{world.host}"),
        log=lambda text: world.console.to_log(f"note: {text}"),
        warn=world.console.warn,
    )


class SaveTimer:
    """Measures on one rank how long training stands still for a save, and tells when the next save is due.

    Only rank 0 asks it, and the ranks share its answer: clocks of ranks differ.

    Args:
        minutes: between saves; 0 = never, None: as the cost of a save and the number of hosts say.
        period: epochs between saves; None: saves at ends of epochs are due if they are cheap.
        now: seconds, monotonic.

    Attributes:
        cost_s: of the last save; 0 before the first one.
    """

    def __init__(
        self, minutes: float | None, period: int | None, hosts: int, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.minutes, self.period, self.hosts, self._now = minutes, period, hosts, now
        self.cost_s = self._spent_s = 0.0
        self._saved_at_s = self._epoch_saved_at_s = now()
        self._has_saved = False

    @property
    def interval_s(self) -> float:
        """Seconds between two saves."""
        if self.minutes is not None:
            return 60 * self.minutes or math.inf
        if not self._has_saved:
            return FIRST_SAVE_S
        return max(math.sqrt(2 * self.cost_s * BETWEEN_FAILURES_S / self.hosts), self.cost_s / MOST_COST)

    def is_due(self, *, ends_epoch: bool) -> bool:
        """Return whether to save after the next step. At the first end of an epoch it always is, with no ``period``."""
        if ends_epoch and self.period is None:
            return self._now() - self._epoch_saved_at_s >= self.cost_s / MOST_COST
        return self._now() - self._saved_at_s > self.interval_s

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Count the time of the block as cost of the next save: copying, writing, or waiting for the last write."""
        began_s = self._now()
        yield
        self._spent_s += self._now() - began_s

    def saved(self, *, ends_epoch: bool) -> None:
        """Record a save."""
        self.cost_s, self._spent_s = self._spent_s, 0.0
        self._has_saved = True
        self._saved_at_s = self._now()
        if ends_epoch:
            self._epoch_saved_at_s = self._saved_at_s
