"""Images of the data set that cannot be read. Others replace a few of them, and more end the run."""

from __future__ import annotations

from collections.abc import Iterable

from yolofleet.data.input.sample import MicroBatch
from yolofleet.support.errors import DataError
from yolofleet.support.text import quoted
from yolofleet.training.report import TrainReport

SHOWN = 10  # images that an error names
MOST_UNREADABLE = 100  # images; at most 1 % of the data set, but always UNREADABLE_ALLOWED
UNREADABLE_ALLOWED = 3


class UnreadableImages:
    """The images that were replaced so far; equal on every rank."""

    def __init__(self, report: TrainReport) -> None:
        self._report = report
        self._known = dict[int, str]()  # why, by number
        self._most = max(min(report.dataset_images // 100, MOST_UNREADABLE), UNREADABLE_ALLOWED)

    def new_in(self, micro_batches: Iterable[MicroBatch]) -> dict[int, str]:
        """Return the numbers of the images that are new to this rank, and why they cannot be read."""
        found = (item for batch in micro_batches for item in batch.unreadable.items())
        return {number: why for number, why in found if number not in self._known}

    def share(self, new: dict[int, str]) -> None:
        """Report images that were replaced, each once. Collective: every rank, if any has a new one.

        Raises:
            DataError: there are too many.
        """
        report = self._report
        with report.clock("comm"):
            every = report.world.gather(list(new.items()))
        for number, why in sorted({number: why for theirs in every for number, why in theirs}.items()):
            self._known[number] = why
            count = len(self._known)
            report.world.console.warn(f"{why}: another image replaces it ({count} of at most {self._most})")
            if report.world.is_main:
                report.events.write("unreadable", why=why, count=count)
        if len(self._known) > self._most:
            reasons = list(self._known.values())
            more = f"; and {len(reasons) - SHOWN} more, see the log" if len(reasons) > SHOWN else ""
            raise DataError(
                f"{len(reasons)} images of {report.dataset_images} cannot be read, and at most {self._most} may be replaced: "
                + "; ".join(reasons[:SHOWN])
                + more,
                hint=f"yolofleet data check {quoted(report.config.data)} --decode finds all of them; --resume continues from "
                "the last checkpoint",
            )
