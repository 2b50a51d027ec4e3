"""The training loop: steps, epochs, validation and checkpoints.

An epoch ends at the first step border at or after its last sample. There the loop validates, writes the row of
results.csv and saves a checkpoint; no gradient is pending. A request to stop ends a validation early: the state is saved
without the end of its epoch, and a resumed run first repeats that. All ranks take every decision (save, stop) together: the
reduction of loss counts carries the request, or the decision follows from figures that are equal on every rank.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from yolofleet.config.schema import TrainConfig
from yolofleet.data.input.sample import MicroBatch, MicroBatchKey
from yolofleet.families.losses.loss import DetectionLoss
from yolofleet.inference.evaluate.gather import Evaluation
from yolofleet.inference.evaluate.run import ValidationStopped
from yolofleet.runs.checkpoint.store import CheckpointStore, Snapshot
from yolofleet.support.errors import CheckpointError, ClusterError, DataError, NumericsError, Stopped
from yolofleet.support.text import listed, quoted
from yolofleet.training.agreement import check_agreement
from yolofleet.training.parallel.world import World
from yolofleet.training.report import TrainReport
from yolofleet.training.requests import AUTO, NOTHING, Asked, SaveTimer, StopRequest, stop_requests
from yolofleet.training.run_files import CHECKPOINT
from yolofleet.training.schedule import COOLDOWN, Schedule, SpeedProbe, StepPlan, StepSplitter
from yolofleet.training.state import TrainState
from yolofleet.training.step import NanRule, StepAbandoned, train_step, watch_numerics
from yolofleet.training.step_end import EndedStep, EndRules, Validate, actions_after, crosses_period
from yolofleet.training.validations import Validations

if TYPE_CHECKING:
    from yolofleet.runs.checkpoint.restart_store import RestartStore

KEEP_S = 5.0  # at least, between states in memory
KEEP_SHARE, WRITE_SHARE = 0.01, 0.2  # at most, of the time: training stands still, a thread writes
SHOWN = 10  # images that an error names
MOST_UNREADABLE = 100  # images; at most 1 % of the data set, but always UNREADABLE_ALLOWED
UNREADABLE_ALLOWED = 3
MOST_ROLLBACKS = 3  # for the steps of one epoch; more are a sign of a run that diverges


@dataclass
class TrainingRun:
    """All parts of one rank's run; ``training/rank/train.py`` builds it."""

    config: TrainConfig
    state: TrainState
    schedule: Schedule
    splitter: StepSplitter
    loader: Callable[[Iterable[MicroBatchKey]], Any]  # keys -> closable iterator of micro-batches
    loss: DetectionLoss
    clip_norm: float
    precision: str
    world: World
    report: TrainReport
    store: CheckpointStore
    memory: RestartStore | None  # of this host, if this rank writes there
    validations: Validations
    fingerprint: dict[str, Any]  # identifies the run in its checkpoints
    data: dict[str, Any]  # ``stored_data.StoredData``, for the checkpoints
    newest_state: Callable[[], Snapshot | None]  # on any host; collective: every rank
    equal_kernels: bool = True  # on all ranks
    tally: Tensor = field(init=False)  # [T] loss terms x images of the current epoch, this rank's part
    tally_images: int = 0
    tally_own_images: int = 0  # those of ``tally``
    unreadable: dict[int, str] = field(default_factory=dict)  # replaced images and why; equal on every rank
    micro_batches: Any = field(init=False)  # closable iterator, from the next step on
    saves: SaveTimer = field(init=False)
    kept_at_s: float = field(default_factory=time.monotonic)  # the last state in memory
    keep_s: float = 0.0  # what training stood still for it

    def plans(self) -> Iterator[StepPlan]:
        """Yield the remaining steps of the run."""
        if self.is_over():
            return
        step, image = self.state.step, self.state.images_seen
        while True:
            plan = self.schedule.plan(step, image)  # the end of the run may have changed after the last step
            yield plan
            if self.is_last(plan):
                return
            step, image = step + 1, plan.end_image

    def is_last(self, plan: StepPlan) -> bool:
        return self._is_end(plan.step + 1, plan.end_image)

    def is_over(self) -> bool:
        """Return whether the state is the final one."""
        return self._is_end(self.state.step, self.state.images_seen) or self.validations.out_of_patience()

    def _is_end(self, steps: int, images: int) -> bool:
        last = self.schedule.last_step
        return images >= self.config.epochs * self.schedule.dataset_images or bool(last and steps >= last)

    def _limits_reached(self) -> list[str]:
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

    def _restore_end(self) -> None:
        """Let the schedule end with ``--max-steps``, or where the state says that the minutes of this run end."""
        progress, most = self.state.progress, self.config.max_steps
        if progress.minutes != self.config.minutes:
            progress = replace(progress, minutes=self.config.minutes, last_step=0)
        self.state.progress = progress
        ends = [step for step in (progress.last_step, most) if step]
        self.schedule = replace(self.schedule, last_step=min(ends, default=0))

    def _end_is_due(self) -> bool:
        """Return whether rank 0 asks to end the run within the minutes that are left (``--minutes``)."""
        if not self.config.minutes or not self.world.is_main or self.state.progress.last_step:
            return False
        times = self.report.clock.run_so_far()
        share = 1 - 1 / COOLDOWN if self.schedule.decay == "cooldown" else 1.0
        return times.elapsed_s - times.seconds["start"] >= 60 * self.config.minutes * share

    def _end_in_time(self) -> None:
        """Begin the cooldown now, unless it has begun. Every rank, after the same step.

        The last step follows from this one, so the result is a function of the last step.
        """
        if self.state.progress.last_step or self.state.step >= self.schedule.cooldown_start:
            return
        self.schedule = self.schedule.cooled_from(self.state.step)
        self.state.progress = replace(self.state.progress, last_step=self.schedule.last_step)
        self.report.ends_in_time(self.state.step, self.schedule.last_step)

    def train(self) -> None:
        """Train from the current state to the end of the run.

        Collective: every rank.

        Raises:
            Stopped: a rank got a stop request; the state is saved.
        """
        self._restore_tally()
        self._restore_end()
        # A resumed run may have crashed after training, before it wrote its results.
        if self.is_over() and self._unended_epoch() is None:
            self.report.ended_before(self.validations.evaluate(self.loss.at(1)), self._limits_reached())
            return
        self.state.replicas.time_kernels_of(self.splitter.largest_pass(self.schedule.step_images))
        self.state.replicas.timed = self.config.shares == "auto"
        self.splitter = replace(self.splitter, rotates=self.state.replicas.timed)
        self._open_loader()
        hosts = len(set(self.world.gather(self.world.host)))
        self.saves = SaveTimer(self.config.save_minutes, self.config.save_period, hosts)
        try:
            with stop_requests(self.world.activity) as stop:
                while True:
                    try:
                        self._train_steps(stop)
                        break
                    except NumericsError as problem:
                        try:
                            self._roll_back(problem)
                        except NumericsError:
                            self._name_last_state(problem)
                            raise
            if self.config.minutes and not self.state.progress.last_step:
                self.report.console.note(f"the run ended before --minutes {self.config.minutes:g} were over")
            with self.report.files.saving(CHECKPOINT, is_last=True):
                self.store.flush()
        finally:
            with ExitStack() as ends:  # one that fails must not prevent the others
                ends.callback(self.store.finish_writing)
                ends.callback(self.micro_batches.close)
                if self.validations.overlapped is not None:
                    ends.callback(self.validations.overlapped.abandon)

    def _train_steps(self, stop: StopRequest) -> None:
        """Train from the current state to the end of the run. Collective: every rank.

        Raises:
            NumericsError: see ``watch_numerics``; the state may be between two steps.
            Stopped: a rank got a stop request; the state is saved.
        """
        probe = SpeedProbe() if self.state.replicas.timed else None
        unended = self._unended_epoch()
        if unended is not None:
            self._end_step(unended, stop, Asked(save=True))
        if (epochs := self.state.progress.open_validation) is not None:
            # The state was saved when this validation began, so its weights are those to validate.
            self.validations.start(epochs, self.loss.at((epochs - 1) / self.config.epochs))
        for plan in self.plans():
            if not self.validations.can_draw(plan):
                self.validations.end()
            try:
                asked = self._step(plan, stop)
            except StepAbandoned:
                self.validations.end()
                self._save(ends_epoch=False)
                self._stop(stop)
            if probe and probe.is_done(plan, self.splitter, self.report.clock):
                self._share_by_speed(probe)
                probe = None
            if crosses_period(self.config.check_steps, plan.step, plan.step + 1):
                with self.report.clock("comm"):
                    check_agreement(
                        self.state, self.world, self.report.console, equal_kernels=self.equal_kernels
                    )
            if self._end_step(plan, stop, asked):
                return

    def _end_step(self, plan: StepPlan, stop: StopRequest, asked: Asked = NOTHING) -> bool:
        """End the epoch if the step did, then save or stop if that is due; return whether the run is at its end.

        Collective: every rank, with equal arguments except for ``stop``.

        Raises:
            Stopped: a rank got a stop request, and the run is not at its end; the state is saved.
        """
        ended = self._facts(plan, asked)
        actions = actions_after(ended, self._end_rules)
        evaluation, loss = None, self.loss.at(self.schedule.progress(plan.first_image))
        if actions.validate is Validate.NOW:
            try:
                evaluation = self.validations.validate(ended.epoch, loss, in_period=actions.in_period)
            except ValidationStopped:
                ended = replace(ended, is_interrupted=True)
            ended = replace(ended, is_out_of_patience=self.validations.out_of_patience(ended.epochs))
            actions = actions_after(ended, self._end_rules)
        if actions.closes_epoch:
            self._close_epoch(plan, ended, evaluation, writes_weights=actions.writes_weights)
        if actions.validate is Validate.BESIDE_TRAINING:
            self.validations.start(ended.epoch, loss)
        if actions.awaits_validation:
            self.validations.end()
        if actions.saves:
            self._save(ends_epoch=ended.ends_epoch)
        elif actions.keeps:
            self._sum_tally()
            self._keep()
        if actions.stops:
            self._stop(stop)
        if actions.ends and not ended.is_last:
            self.report.out_of_patience(ended.epoch)
        return actions.ends

    def _facts(self, plan: StepPlan, asked: Asked) -> EndedStep:
        """Return what decides the end of the step. Collective at the end of an epoch: every rank."""
        ended = EndedStep(
            plan.step + 1, self.state.progress.epochs_done, self._epochs_at(plan), self.is_last(plan), asked
        )
        if ended.ends_epoch or ended.is_last:
            self._watch_numerics()
            self.validations.end()
        return replace(
            ended,
            is_out_of_patience=self.validations.out_of_patience(ended.epochs),
            is_validating=self.validations.overlapped is not None,
        )

    @property
    def _end_rules(self) -> EndRules:
        config = self.config
        return EndRules(
            val_period=config.val_period,
            save_period=None if config.save_period == AUTO else int(config.save_period),
            save_steps=config.save_steps,
            overlaps=config.val_overlap and self.validations.has_images,
            follows_accuracy=self.validations.follows_accuracy,
        )

    def _unended_epoch(self) -> StepPlan | None:
        """Return the last step of a resumed run if a stop request ended the validation after it, else None."""
        if not self.tally_images or self.state.step == self.state.progress.closed_step:
            return None
        done = min(self.state.images_seen // self.schedule.dataset_images, self.config.epochs)
        if done <= self.state.progress.epochs_done and self.state.step != self.schedule.last_step:
            return None
        return next(plan for plan in self.schedule.steps() if plan.step + 1 == self.state.step)

    def _roll_back(self, problem: NumericsError) -> None:
        """Go back to the newest checkpoint, and leave out the step of ``problem`` from now on.

        The state records the step, so that a resumed run leaves it out too. Collective: every rank, at the same step.

        Raises:
            NumericsError: ``problem``, if ``--on-nan`` is not rollback, this epoch had too many, or no checkpoint exists.
        """
        if not self.nan_rule.rolls_back or problem.first_image is None:
            raise problem
        epoch = problem.first_image // self.schedule.dataset_images
        left_out = [*self.state.progress.left_out, problem.first_image]
        if sum(image // self.schedule.dataset_images == epoch for image in left_out) > MOST_ROLLBACKS:
            problem.what += f"; epoch {epoch + 1} has already had {MOST_ROLLBACKS} rollbacks"
            raise problem
        self.validations.end()
        self.micro_batches.close()
        self.store.finish_writing()
        try:
            with self.world.activity.doing("rollback"):
                snapshot = self.newest_state()
        except (CheckpointError, ClusterError):
            snapshot = None
        if snapshot is None or snapshot.step > self.state.step:  # of a later state than --resume named
            problem.what += "; --on-nan rollback found no checkpoint of this run to go back to"
            raise problem
        self.state.restore(snapshot)
        merged = sorted({*left_out, *self.state.progress.left_out})
        self.state.progress = replace(self.state.progress, left_out=merged)
        self.report.rolled_back(problem.what, self.state)
        self._restore_tally()
        self._restore_end()
        self._open_loader()

    def _name_last_state(self, problem: NumericsError) -> None:
        """Add to the hint of ``problem`` from which state the run can be resumed; all states on the disk are finite."""
        self.store.finish_writing()
        try:
            path, _ = self.store.newest()
        except CheckpointError:
            if self.report.is_writer:
                problem.hint = f"{problem.hint}; this run has saved no state yet"
        else:
            problem.hint = f"{problem.hint}; {self.report.folder.resume_command} continues from the last finite state, {path}"

    @property
    def nan_rule(self) -> NanRule:
        return NanRule.parse(self.config.on_nan)

    def _watch_numerics(self) -> None:
        """Read all norms and check the state, before a validation or a save.

        Raises:
            NumericsError: see ``watch_numerics``; or a weight, average, statistic or slot of the optimizer is not finite.
        """
        self._leave_out(watch_numerics(self.state, self.precision, self.nan_rule))
        self.state.check_finite()

    def _leave_out(self, plans: Sequence[StepPlan]) -> None:
        """Take steps that changed nothing out of the mean loss of the epoch, and report them."""
        for plan in plans:
            self.tally_images -= plan.images
            self.tally_own_images -= sum(len(key.samples) for key in self.splitter.keys(plan))
            self.report.left_out(plan, self.config.on_nan, is_search=self.precision == "fp16")

    def _restore_tally(self) -> None:
        stored = self.state.progress
        self.tally = torch.zeros(len(self.loss.terms), device=self.world.device)
        self.tally_images = stored.epoch_images
        self.tally_own_images = stored.epoch_images if self.world.is_main else 0
        # they are the sum over all ranks, so one rank adds them
        if stored.epoch_terms and self.world.is_main:
            self.tally += torch.tensor(stored.epoch_terms, device=self.world.device)

    def _open_loader(self) -> None:
        """Start loading this rank's micro-batches, from the next step to the end of the run."""
        self.micro_batches = self.loader(self._keys())

    def _keys(self) -> Iterator[MicroBatchKey]:
        """Yield the keys of this rank, up to the first step that needs the figures of a validation that has not ended."""
        left_out = frozenset(self.state.progress.left_out)
        for plan in self.plans():
            if not self.validations.can_draw(plan):
                return
            if plan.first_image not in left_out:
                for key in self.splitter.keys(plan):
                    epochs = sorted({epoch for epoch, _ in key.samples})
                    known = [
                        (epoch, ap)
                        for epoch in epochs
                        if (ap := self.validations.class_ap(epoch)) is not None
                    ]
                    yield replace(key, class_ap=tuple(known)) if known else key

    def _step(self, plan: StepPlan, stop: StopRequest) -> Asked:
        """Load, train and report one step; return what a rank asks for.

        Raises:
            StepAbandoned: a rank was asked to stop. The step has changed nothing.
        """
        if plan.first_image in self.state.progress.left_out:
            self.state.step, self.state.images_seen = plan.step + 1, plan.end_image
            return NOTHING
        keys = self.splitter.keys(plan)
        with self.report.clock("data"):
            count = len(keys)
            mine = self._load(count, stop)
            if len(mine) < count:  # the loader ended before this step, see _keys
                self._open_loader()
                mine = self._load(count, stop)
            assert len(mine) == count, f"{len(mine)} of {count} micro-batches of step {plan.step}"
        ends_epoch = self._epochs_at(plan) > self.state.progress.epochs_done
        save_due = self.world.is_main and self.saves.is_due(ends_epoch=ends_epoch)
        save_due |= self.report.takes_save_request()
        broken = {n: why for mb in mine for n, why in mb.unreadable.items() if n not in self.unreadable}
        done = train_step(
            self.state,
            plan,
            self.splitter.by_replica(plan, mine),
            self.loss.at(self.schedule.progress(plan.first_image)),
            self.world,
            self.report.clock,
            total_micro_batches=self.splitter.statistics_total(plan),
            precision=self.precision,
            clip_norm=self.clip_norm,
            asked=Asked(
                save=save_due, keep=self._keep_is_due(), end=self._end_is_due(), unreadable=bool(broken)
            ),
            nan_rule=self.nan_rule,
            stop=lambda: stop,
        )
        if self.memory is not None:
            self.memory.done(self.state.step)
        self.tally += done.terms * plan.images
        self.tally_images += plan.images
        own_images = sum(len(key.samples) for key in keys)
        self.tally_own_images += own_images
        self._leave_out(done.left_out)
        self.report.step(plan, mine, self.tally, self.tally_images, own_images, self.tally_own_images)
        if done.asked.unreadable:
            self._share_unreadable(broken)
        if done.asked.end:
            self._end_in_time()
        return done.asked

    def _load(self, count: int, stop: StopRequest) -> list[MicroBatch]:
        """Return the next ``count`` micro-batches of this rank, or fewer at the end of the loader.

        Raises:
            StepAbandoned: this run of one process was asked to stop. Other ranks would wait for this one's counts.
        """
        loaded = []
        for micro_batch in islice(self.micro_batches, count):
            if stop and self.world.size == 1:
                raise StepAbandoned
            loaded.append(micro_batch)
        return loaded

    def _share_unreadable(self, broken: dict[int, str]) -> None:
        """Report images that were replaced, each once. Collective: every rank, if any has a new one.

        Args:
            broken: numbers of the images that are new to this rank, and why.
        Raises:
            DataError: there are too many.
        """
        with self.report.clock("comm"):
            found = {
                number: why for theirs in self.world.gather(list(broken.items())) for number, why in theirs
            }
        images = self.schedule.dataset_images
        most = max(min(images // 100, MOST_UNREADABLE), UNREADABLE_ALLOWED)
        for number, why in sorted(found.items()):
            self.unreadable[number] = why
            self.report.unreadable(why, len(self.unreadable), most)
        if len(self.unreadable) > most:
            reasons = list(self.unreadable.values())
            more = f"; and {len(reasons) - SHOWN} more, see the log" if len(reasons) > SHOWN else ""
            raise DataError(
                f"{len(reasons)} images of {images} cannot be read, and at most {most} may be replaced: "
                + "; ".join(reasons[:SHOWN])
                + more,
                hint=f"yolofleet data check {quoted(self.config.data)} --decode finds all of them; --resume continues from "
                "the last checkpoint",
            )

    def _keep_is_due(self) -> bool:
        """Return whether rank 0 asks for a state in memory: seldom enough that it costs little time."""
        if self.memory is None or not self.world.is_main or self.memory.is_busy:
            return False
        interval_s = max(KEEP_S, self.keep_s / KEEP_SHARE, self.memory.write_s / WRITE_SHARE)
        return time.monotonic() - self.kept_at_s > interval_s

    def _stop(self, stop: StopRequest) -> None:
        """Wait until the state is written, and raise. Collective: every rank."""
        with self.report.files.saving(CHECKPOINT, is_last=True):
            self.store.flush()
        if stop.source:
            self.report.console.note(stop.saved_note())
        self.report.stopped()
        # this also keeps every rank from exiting before the state is written
        sources = self.world.gather(stop.source)
        stopped = Stopped(
            f"stopped on request after step {self.state.step}; the state is saved",
            source=next(filter(None, sources), None),
            hint=self.report.folder.resume_command,
        )
        stopped.machine_goes = stop.machine_goes
        raise stopped

    def _share_by_speed(self, probe: SpeedProbe) -> None:
        """Give each rank micro-batches in proportion to its measured speed (``--shares auto``).

        This changes which rank computes which micro-batch, not the result. Collective: every rank, once.
        """
        measured = self.world.gather(probe.images / max(probe.compute_s, 1e-9))
        known = [speed for speed in measured if speed > 0] or [1.0]
        speeds = [speed or sum(known) / len(known) for speed in measured]
        step_images = self.schedule.step_images
        self.splitter = self.splitter.with_speeds(speeds)
        self.state.replicas.time_kernels_of(self.splitter.largest_pass(step_images))
        parts = ", ".join(f"{speed / sum(speeds):.0%}" for speed in speeds)
        self.state.replicas.timed = False
        self.report.console.note(f"shares of the ranks by measured speed: {parts}")
        if idle := self.splitter.idle_ranks(step_images):
            count = self.splitter.divided(step_images)
            self.report.console.warn(
                f"no more work for rank{'s' if len(idle) > 1 else ''} {listed([*map(str, idle)])}: too slow for one of "
                f"the {count} micro-batches of a step; a smaller --micro-batch, or --shares as numbers, gives it some"
            )
        self.micro_batches.close()
        self._open_loader()

    def _epochs_at(self, plan: StepPlan) -> int:
        """Return the number of epochs whose last image has been trained at the end of a step."""
        return min(plan.end_image // self.schedule.dataset_images, self.config.epochs)

    def _close_epoch(
        self, plan: StepPlan, ended: EndedStep, evaluation: Evaluation | None, *, writes_weights: bool
    ) -> None:
        """Count the epoch that the step ended, write its weights if that is due, and report it. Collective: every rank."""
        self.state.progress = replace(self.state.progress, epochs_done=ended.epochs)
        images = self.tally_images or math.nan  # 0 if all steps were left out
        terms = [t / images for t in self.world.sum_rows(self.tally.tolist())]
        if ended.ends_epoch:
            self.tally.zero_()
            self.tally_images = self.tally_own_images = 0
        else:  # a resumed run goes on in this epoch
            self.state.progress = replace(self.state.progress, closed_step=ended.steps)
        if writes_weights:
            with self.saves.spending():
                self.validations.write_last(ended.epoch)
        self.report.epoch(ended.epoch, plan, terms, evaluation)

    def _save(self, *, ends_epoch: bool) -> None:
        """Pass a copy of the state to the writer thread of each rank that writes; no rank waits for the disk.

        Collective: every rank.
        """
        self._sum_tally()
        self.report.files.renew(self.state)
        with self.saves.spending(), self.report.files.saving(CHECKPOINT):
            snapshot = self._keep()
            if self.report.is_writer and snapshot is not None:
                self.store.save(snapshot)
                self.report.checkpoint(self.state.step)
        self.saves.saved(ends_epoch=ends_epoch)

    def _sum_tally(self) -> None:
        """Put the losses of this epoch so far, of all ranks, into the state. Collective: every rank."""
        self._watch_numerics()
        self.state.progress = replace(
            self.state.progress,
            epoch_terms=self.world.sum_rows(self.tally.tolist()),
            epoch_images=self.tally_images,
        )

    def _keep(self) -> Snapshot | None:
        """Pass a copy of the state to the memory of this host, for ranks that are started again; return it.

        None on a rank that writes nowhere.
        """
        if not self.report.is_writer and self.memory is None:
            return None
        began_s = time.monotonic()
        snapshot = self.state.snapshot(
            {"fingerprint": self.fingerprint, "data": self.data, "clock": self.report.clock.to_dict()}
        )
        if self.memory is not None and not self.memory.is_busy:
            self.memory.save(snapshot)
        self.kept_at_s = time.monotonic()
        self.keep_s = self.kept_at_s - began_s
        return snapshot
