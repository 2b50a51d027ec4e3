"""The right to write the copy of a run in a store: one process has it at a time.

Each holder makes an object with the next number, which a store with conditional writes lets only one process make. The holder
writes its object again every ``RENEW_S``, and looks for a higher number. A process that wants the right waits until the last
holder has ended, or until the object of that holder has not changed for ``LEASE_S``. The clocks of the machines do not matter:
both times are the store's.

A holder that was cut off finds the higher number before it writes again, except for an object that it is writing at that moment.
The new holder copies everything again after ``LEASE_S``, so such an object does not stay. A store without conditional writes can let
two processes begin at the same moment; one of them then finds the object of the other in the place of its own, and stops.

A detached run has another lease (``fleet/hosts/lease.py``): no store is common to all hosts of a fleet, so a majority of them votes,
and each measures the time on its own clock. The two have no rule in common but that the highest number holds.
"""

from __future__ import annotations

import json
import os
import platform
import re
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

from yolofleet.storage.object_store import Gone
from yolofleet.storage.object_writer import ObjectWriter
from yolofleet.support.errors import ConfigError, YolofleetError
from yolofleet.support.text import shown

FOLDER = ".lease"
RENEW_S, LEASE_S = 20.0, 90.0
GUARD_S = 45.0  # after this time without a renewal, the holder renews before it writes
LOOK_S = 3.0
_CLOCK = f"{FOLDER}/clock"  # is written to learn the time of the store
_NUMBERED = re.compile(rf"{re.escape(FOLDER)}/([0-9]{{8}})\.json")


class LeaseTaken(YolofleetError):
    """Another process continues the run."""


class BucketLease:
    """The lease of the copy of a run below an address.

    Args:
        command: identifies the command that started this process, also after it has started its processes again; "": unknown.
    """

    def __init__(self, store: ObjectWriter, command: str) -> None:
        self.store = store
        self.number = 0  # number of this holder's claim; 0: not claimed
        self.took_over = False  # the holder before had not ended, and may still write one object
        self.follows_own = False  # there was no holder before, or it was a process of the same command
        self.command_before = ""  # command of the holder before
        self._values: dict[str, Any] = {"host": platform.node(), "process": os.getpid(), "command": command}
        self._values |= {"token": secrets.token_hex(8), "renewed": 0}
        self._confirmed_s, self._lost = 0.0, ""
        self._renewing = threading.Lock()

    def claim(self, tell: Callable[[str], None]) -> None:
        """Get the lease, from an earlier process of the same command at once.

        Args:
            tell: gets the reason of a wait.
        Raises:
            ConfigError: another process has the lease. StorageError: the store cannot be read or written.
        """
        number, holder, silent_s = self._newest()
        began_s, is_told, mine = time.monotonic(), False, self._values["command"]
        while holder and not holder.get("ended") and not (mine and holder.get("command") == mine):
            left_s = LEASE_S - silent_s - (time.monotonic() - began_s)
            if left_s <= 0:
                break
            if not is_told:
                is_told = True
                tell(
                    f"{self.store.root}: the run has not ended on {_name(holder)}; waiting up to {left_s:.0f} s to see whether "
                    "it goes on there"
                )
            time.sleep(min(LOOK_S, left_s))
            before, (number, holder, _) = (number, holder), self._newest()
            if (number, holder) != before and not holder.get("ended"):
                if not holder.get("failed"):
                    raise self._held(holder)
                silent_s, began_s = 0.0, time.monotonic()  # its run has failed, and it copies the rest
        self.took_over = bool(holder) and not holder.get("ended")
        self.command_before = str(holder.get("command", ""))
        self.follows_own = not holder or (mine != "" and self.command_before == mine)
        self.number = number + 1
        if not self.store.create(self._key(self.number), self._content()):
            raise self._held(self._holder(self.number))
        newest = max(self._times(), default=self.number)
        if newest > self.number:  # a listing can omit an object that another process makes meanwhile
            self.store.remove(self._key(self.number))
            raise self._held(self._holder(newest))
        self._confirmed_s = time.monotonic()
        if number:
            self.store.remove(self._key(number))

    def guard(self) -> None:
        """Make sure that this process still has the lease, before it writes. Raises as :meth:`renew`."""
        if self._lost or time.monotonic() - self._confirmed_s > GUARD_S:
            self.renew()

    def renew(self, **state: bool | str) -> None:
        """Write the lease again.

        Args:
            state: ``ended``: give it back; ``failed``: the run has failed, but the same command may start it again;
                ``command``: of the process that has written what is there.
        Raises:
            LeaseTaken: another process has it. StorageError: the store cannot be read or written.
        """
        with self._renewing:
            if not self._lost:
                newest = max(self._times(), default=self.number)
                holder = self._holder(max(newest, self.number))
                if (
                    newest > self.number
                    or holder.get("token", self._values["token"]) != self._values["token"]
                ):
                    self._lost = f"{self.store.root}: the run goes on on {_name(holder)}"
            if self._lost:
                raise LeaseTaken(self._lost)
            self._values |= state
            self._values["renewed"] += 1
            self.store.write(self._key(self.number), self._content())
            self._confirmed_s = time.monotonic()

    def _held(self, holder: dict[str, Any]) -> ConfigError:
        return ConfigError(
            f"{self.store.root}: the run goes on on {_name(holder)}",
            hint=f"end it there first; a machine that is lost counts as ended after {LEASE_S:.0f} s",
        )

    def _content(self) -> bytes:
        return json.dumps(self._values).encode()

    def _key(self, number: int) -> str:
        return f"{FOLDER}/{number:08d}.json"

    def _times(self) -> dict[int, int]:
        """Return when the object of each number was written, by the store's clock; 0 of the clock itself."""
        found = self.store.objects(FOLDER)[0]
        times = {
            int(match[1]): about.modified_ns
            for key, about in found.items()
            if (match := _NUMBERED.fullmatch(key))
        }
        return times | ({0: found[_CLOCK].modified_ns} if _CLOCK in found else {})

    def _newest(self) -> tuple[int, dict[str, Any], float]:
        """Return the highest number, what its object says, and how long ago it was written by the store's clock."""
        self.store.write(_CLOCK, secrets.token_hex(8).encode())
        times = {0: 0} | self._times()
        number = max(times)
        return number, self._holder(number) if number else {}, max(times[0] - times[number], 0) / 1e9

    def _holder(self, number: int) -> dict[str, Any]:
        """Return what the object of a number says: an unknown host if it is damaged, nothing if it is gone."""
        try:
            values = json.loads(self.store.content(self._key(number)))
        except Gone:
            return {}
        except (ValueError, RecursionError):
            values = None
        return values if isinstance(values, dict) and values else {"host": "another machine"}


def _name(holder: dict[str, Any]) -> str:
    return shown(holder.get("host"))
