"""Predict when a training will end, from its rate so far. Nothing here waits for a device."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

from yolofleet.config.schema import TrainConfig
from yolofleet.runs.report.clock import Clock
from yolofleet.runs.report.console import NullConsole
from yolofleet.runs.report.results import EventLog
from yolofleet.support.terminal import duration
from yolofleet.training.schedule import StepPlan

MEASURED_STEPS = 100  # steps of this process before it predicts the end of the run
WRONG_END = 0.25  # share of the time that is left: a larger change of the predicted end is printed


@dataclass
class Forecast:
    """The predicted end of one rank's run. The argument ``plan`` of its methods is the last step that is done.

    Attributes:
        ends_at_s: the end that was printed last, by time.time; 0 = none yet.
    """

    config: TrainConfig
    dataset_images: int
    clock: Clock
    ends_at_s: float = 0.0

    def images_left(self, plan: StepPlan) -> int:
        """Return the images of the run after the step; ``--minutes`` may leave some out."""
        images, most = self.config.epochs * self.dataset_images - plan.end_image, self.config.max_steps
        return min(images, (most - plan.step - 1) * plan.images) if most else images

    def left_s(self, plan: StepPlan) -> float:
        """Return the predicted seconds to the end of the run at its present rate; 0: unknown.

        Each epoch that is left costs as much besides its steps as the last ones: validation and checkpoint.
        """
        times, images = self.clock.run_so_far(), self.images_left(plan)
        if images <= 0 or self.config.minutes or not times.rate_img_s > 0:
            return 0.0
        rest = (times.seconds["evaluate"] + times.seconds["checkpoint"]) / max(times.images, 1)
        return images * (1 / times.rate_img_s + rest)

    def tell_end(self, plan: StepPlan, console: NullConsole, events: EventLog) -> None:
        """Print when the run will end, if that is new or has changed."""
        left_s = self.left_s(plan)
        ends_at_s = time.time() + left_s
        if not left_s or abs(ends_at_s - self.ends_at_s) <= WRONG_END * left_s:
            return
        words = "the run will end" if not self.ends_at_s else "corrected: the run will end"
        self.ends_at_s = ends_at_s
        at = time.strftime("%a %H:%M", time.localtime(ends_at_s))
        console.fact(f"{words} in about {duration(left_s)}, {at}")
        events.write("predicted_end", step=plan.step, seconds=left_s)

    def progress(self, plan: StepPlan) -> dict[str, Any]:
        """Return the values of the step for the status of the run: see ``RunStatus.note``."""
        times, epoch_rate = self.clock.run_so_far(), self.clock.epoch_so_far().rate_img_s
        images, minutes = self.images_left(plan), self.config.minutes
        left_s = self.left_s(plan) or math.nan
        # the last step may have images of one more epoch
        share = min(plan.end_image / max(plan.end_image + images, 1), 1.0)
        if minutes:
            trained_s = times.elapsed_s - times.seconds["start"]
            left_s, share = max(60 * minutes - trained_s, 0.0), min(trained_s / (60 * minutes), 1.0)
        return {
            "step": plan.step + 1,
            "epoch": min(-(-plan.end_image // self.dataset_images), self.config.epochs),
            "epochs": self.config.epochs,
            "share": share,
            "rate_img_s": times.rate_img_s if math.isnan(epoch_rate) else epoch_rate,
            "ends_at_s": time.time() + left_s,
        }
