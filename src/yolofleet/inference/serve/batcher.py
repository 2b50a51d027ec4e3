"""Predict the images of all requests in one thread, those that wait at the same time in one forward pass."""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from yolofleet.inference.predict.frames import Frame
from yolofleet.inference.predict.predictor import Predictor
from yolofleet.inference.predict.results import Prediction
from yolofleet.support.closing import Closing


@dataclass(frozen=True)
class _Asked:
    frame: Frame
    predictor: Predictor
    answer: Future[Prediction] = field(default_factory=Future)


class Batcher(Closing):
    """The only thread that runs the network.

    Args:
        batch: most images that are taken together.
        wait_s: how long an image waits for others.
        note: called with the number of images that were taken together.
    """

    def __init__(self, batch: int, wait_s: float, note: Callable[[float], object]) -> None:
        self._batch, self._wait_s, self._note = batch, wait_s, note
        self._asked: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="predict", daemon=True)
        self._thread.start()
        self.has_failed = False  # at the last images

    def ask(self, frame: Frame, predictor: Predictor) -> Future[Prediction]:
        """Return the coming prediction. Nothing is computed for one that is cancelled before its turn.

        Args:
            predictor: of the one network; images with equal settings must name the same object to share a pass.
        """
        asked = _Asked(frame, predictor)
        self._asked.put(asked)
        return asked.answer

    def waiting(self) -> int:
        """Return the number of images whose turn has not come."""
        return self._asked.qsize()

    def close(self) -> None:
        """Predict what was asked before, and end the thread."""
        self._asked.put(None)
        self._thread.join()

    def _run(self) -> None:
        while taken := self._next():
            self._note(len(taken))
            groups: dict[Predictor, list[_Asked]] = defaultdict(list)
            for one in taken:
                if one.answer.set_running_or_notify_cancel():
                    groups[one.predictor].append(one)
            for predictor, group in groups.items():
                # consecutive images of one shape share a pass
                group.sort(key=lambda one: one.frame.image.shape)
                self._predict(predictor, group)

    def _next(self) -> list[_Asked]:
        """Return the next images, in their order; none at the end."""
        taken = list[_Asked]()
        until_s = 0.0
        while len(taken) < self._batch:
            try:
                wait_s = max(until_s - time.monotonic(), 0) if taken else None
                one = self._asked.get(timeout=wait_s)
            except queue.Empty:
                break
            if one is None:
                if taken:
                    self._asked.put(None)
                break
            if not taken:
                until_s = time.monotonic() + self._wait_s
            taken.append(one)
        return taken

    def _predict(self, predictor: Predictor, group: list[_Asked]) -> None:
        try:
            for one, found in zip(group, predictor.stream(one.frame for one in group), strict=True):
                self.has_failed = False
                one.answer.set_result(found)
        except (
            Exception
        ) as problem:  # of the runtime or the device: each request gets it, and the thread goes on
            self.has_failed = True
            for one in group:
                if not one.answer.done():
                    one.answer.set_exception(problem)
