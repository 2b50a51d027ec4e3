"""The steps that are left of a run, and where it ends: with ``--epochs``, ``--max-steps``, ``--minutes`` or ``--patience``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from yolofleet.config.schema import TrainConfig
from yolofleet.data.input.sample import MicroBatchKey
from yolofleet.runs.report.clock import Clock
from yolofleet.training.schedule import COOLDOWN, Schedule, StepPlan, StepSplitter
from yolofleet.training.state import TrainState
from yolofleet.training.validations import Validations


@dataclass
class RunSteps:
    """The steps of a run, which are equal on every rank.

    Attributes:
        schedule: it ends with ``--max-steps``, or where the state says that the minutes of this run end.
    """

    config: TrainConfig
    state: TrainState
    schedule: Schedule
    validations: Validations

    def left(self) -> Iterator[StepPlan]:
        """Yield the remaining steps."""
        if self.is_over():
            return
        step, image = self.state.step, self.state.images_seen
        while True:
            plan = self.schedule.plan(step, image)  # the end of the run may have changed after the last step
            yield plan
            if self.is_last(plan):
                return
            step, image = step + 1, plan.end_image

    def keys(self, splitter: StepSplitter) -> Iterator[MicroBatchKey]:
        """Yield the keys of a rank, up to the first step that needs the figures of a validation that has not ended."""
        left_out, validations = frozenset(self.state.progress.left_out), self.validations
        for plan in self.left():
            if not validations.can_draw(plan):
                return
            if plan.first_image not in left_out:
                for key in splitter.keys(plan):
                    epochs = sorted({epoch for epoch, _ in key.samples})
                    known = [(n, ap) for n in epochs if (ap := validations.class_ap(n)) is not None]
                    yield replace(key, class_ap=tuple(known)) if known else key

    def is_last(self, plan: StepPlan) -> bool:
        return self._is_end(plan.step + 1, plan.end_image)

    def is_over(self) -> bool:
        """Return whether the state is the final one."""
        return self._is_end(self.state.step, self.state.images_seen) or self.validations.out_of_patience()

    def _is_end(self, steps: int, images: int) -> bool:
        last = self.schedule.last_step
        return images >= self.config.epochs * self.schedule.dataset_images or bool(last and steps >= last)

    def reached_limits(self) -> list[str]:
        """Return the settings that end the run at its state, such as ``--max-steps 2``."""
        config, step = self.config, self.state.step
        reached = {
            f"--epochs {config.epochs}": self.state.images_seen
            >= config.epochs * self.schedule.dataset_images,
            f"--max-steps {config.max_steps}": 0 < config.max_steps <= step,
            f"--minutes {config.minutes:g}": 0 < self.state.progress.last_step <= step,
            f"--patience {config.patience}": self.validations.out_of_patience(),
        }
        return [setting for setting, is_reached in reached.items() if is_reached]

    def epochs_after(self, plan: StepPlan) -> int:
        """Return the number of epochs whose last image has been trained at the end of a step."""
        return min(plan.end_image // self.schedule.dataset_images, self.config.epochs)

    def unended_epoch(self) -> StepPlan | None:
        """Return the last step of a resumed run if a stop request ended the validation after it, else None."""
        state, progress = self.state, self.state.progress
        if not progress.epoch_images or state.step == progress.closed_step:
            return None
        plan = self.schedule.ended_by(state.step, state.images_seen)
        is_ended = self.epochs_after(plan) > progress.epochs_done or state.step == self.schedule.last_step
        return plan if is_ended else None

    def restore_end(self) -> None:
        """Take over the end of the run from its settings and its state."""
        if self.state.progress.minutes != self.config.minutes:
            self.state.note(minutes=self.config.minutes, last_step=0)
        ends = [step for step in (self.state.progress.last_step, self.config.max_steps) if step]
        self.schedule = replace(self.schedule, last_step=min(ends, default=0))

    def is_time_up(self, clock: Clock) -> bool:
        """Return whether the run must end within the minutes that are left (``--minutes``)."""
        if not self.config.minutes or self.state.progress.last_step:
            return False
        times = clock.run_so_far()
        share = 1 - 1 / COOLDOWN if self.schedule.decay == "cooldown" else 1.0
        return times.elapsed_s - times.seconds["start"] >= 60 * self.config.minutes * share

    def end_in_time(self) -> bool:
        """Begin the cooldown now, and return True, unless it has begun. Every rank, after the same step.

        The last step follows from this one, so the result is a function of the last step.
        """
        if self.state.progress.last_step or self.state.step >= self.schedule.cooldown_start:
            return False
        self.schedule = self.schedule.cooled_from(self.state.step)
        self.state.note(last_step=self.schedule.last_step)
        return True
