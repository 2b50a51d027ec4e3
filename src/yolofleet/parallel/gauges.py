"""Speed, memory and temperature of this rank, for its heartbeats."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import Any

import torch

from yolofleet import devices
from yolofleet.parallel.activity import Phases
from yolofleet.system.proc import host_temperature_c, resident_bytes

WINDOW = 20  # heartbeats, about 20 s, over which a rank's speed is measured
TEMPERATURE_EVERY = 10  # heartbeats: asking a driver may take milliseconds


class Gauges:
    """Reads the figures of this rank that its heartbeat carries, in the thread of the watchdog."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._past: deque[tuple[int, float, float]] = deque(maxlen=WINDOW)
        self._number, self._temperature_c = 0, 0.0

    def read(self, clock: Phases | None) -> dict[str, Any]:
        """Return the fields of a heartbeat from ``rate_img_s`` on."""
        found = {"rate_img_s": 0.0, "waits": 0.0, "memory_gib": 0.0}
        # a driver may raise anything, and no figure here is worth the watch over the run
        with suppress(Exception):
            found["memory_gib"] = round(self._memory_bytes() / 2**30, 2)
            if self._number == 0 or (self._temperature_c and self._number % TEMPERATURE_EVERY == 0):
                self._temperature_c = round(self._read_temperature_c(), 0)
        self._number += 1
        found["temperature_c"] = self._temperature_c
        if clock is not None:
            self._past.append(clock.spent())
            (images, busy_s, comm_s), (images_then, busy_then_s, comm_then_s) = self._past[-1], self._past[0]
            busy_s, comm_s = max(busy_s - busy_then_s, 0.0), max(comm_s - comm_then_s, 0.0)
            if busy_s > 0:
                found["rate_img_s"] = round(max(images - images_then, 0) / busy_s, 3)
                found["waits"] = round(comm_s / (busy_s + comm_s), 3)
        return found

    def _memory_bytes(self) -> float:
        return resident_bytes() if devices.is_host(self._device) else devices.peak_memory_bytes(self._device)

    def _read_temperature_c(self) -> float:
        return host_temperature_c() if devices.is_host(self._device) else devices.temperature_c(self._device)
