"""Requests to stop a training: signals, Ctrl-C, and the notice of ``--preempt-notice``."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from types import FrameType

from yolofleet.parallel.activity import Activity
from yolofleet.system.signals import stop_source
from yolofleet.text import announcement

NOTICE = "--preempt-notice on "


class StopRequest:
    """Records SIGTERM, SIGUSR1 or Ctrl-C; the loop then finishes the step, saves the state and stops.

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

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.source and number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if not self.source:  # a step can be long, so tell the user at once that Ctrl-C has worked
            self.source, self.asked_at_s = stop_source(number), time.monotonic()
            self._activity.stop_requested = True
            with suppress(OSError):
                words = "stopping after this step, then saving; Ctrl-C again ends at once"
                os.write(2, announcement(f"\n{words}").encode())
