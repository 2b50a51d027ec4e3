"""The training loop: steps, epochs, validation and checkpoints.

An epoch ends at the first step border at or after its last sample. There the loop validates, writes the row of
results.csv and saves a checkpoint; no gradient is pending. A request to stop ends a validation early: the state is saved
without the end of its epoch, and a resumed run first repeats that. All ranks take every decision (save, stop) together: the
reduction of loss counts carries the request, or the decision follows from figures that are equal on every rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from yolofleet.config.schema import TrainConfig
from yolofleet.data.input.sample import MicroBatch, MicroBatchKey
from yolofleet.families.losses.loss import DetectionLoss
from yolofleet.inference.evaluate.gather import Evaluation
from yolofleet.inference.evaluate.run import ValidationStopped
from yolofleet.runs.checkpoint.store import CheckpointStore, Snapshot
from yolofleet.support.errors import CheckpointError, ClusterError, NumericsError, Stopped
from yolofleet.training.agreement import CHECK_STEPS, check_agreement
from yolofleet.training.parallel.world import World
from yolofleet.training.report import TrainReport
from yolofleet.training.requests import NOTHING, Asked, SaveTimer, StopRequest, stop_requests
from yolofleet.training.run_files import CHECKPOINT
from yolofleet.training.run_steps import RunSteps
from yolofleet.training.schedule import StepPlan, StepSplitter
from yolofleet.training.state import Tally, TrainState
from yolofleet.training.step import NanRule, StepAbandoned, train_step, watch_numerics
from yolofleet.training.step_end import EndedStep, EndRules, Validate, actions_after, crosses_period
from yolofleet.training.unreadable import UnreadableImages
from yolofleet.training.validations import Validations

if TYPE_CHECKING:
    from yolofleet.runs.checkpoint.restart_store import RestartStore
    from yolofleet.training.shares import SpeedShares

MOST_ROLLBACKS = 3  # for the steps of one epoch; more are a sign of a run that diverges


@dataclass
class TrainingRun:
    """All parts of one rank's run; ``training/rank/train.py`` builds it."""

    config: TrainConfig
    state: TrainState
    steps: RunSteps
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
    stored: dict[str, Any]  # what checkpoints say of the run (``fingerprint``) and of its data set (``data``)
    equal_kernels: bool = True  # on all ranks
    tally: Tally = field(init=False)
    micro_batches: Any = field(init=False)  # closable iterator, from the next step on
    saves: SaveTimer = field(init=False)
    shares: SpeedShares | None = field(init=False, default=None)  # with --shares auto

    def __post_init__(self) -> None:
        config = self.config
        self.nan_rule = NanRule.parse(config.on_nan)
        self.unreadable = UnreadableImages(self.report)
        self.end_rules = EndRules(
            val_period=config.val_period,
            save_period=config.save_period,
            save_steps=config.save_steps,
            overlaps=config.val_overlap and self.validations.has_images,
            follows_accuracy=self.validations.follows_accuracy,
        )

    def train(self) -> None:
        """Train from the current state to the end of the run.

        Collective: every rank.

        Raises:
            Stopped: a rank got a stop request; the state is saved.
        """
        self.tally = Tally(len(self.loss.terms), self.state.progress, self.world)
        self.steps.restore_end()
        # A resumed run may have crashed after training, before it wrote its results.
        if self.steps.is_over() and self.steps.unended_epoch() is None:
            self.report.ended_before(self.validations.evaluate(self.loss.at(1)), self.steps.reached_limits())
            return
        self.validations.forget_best()
        self.state.replicas.time_kernels_of(self.splitter.largest_pass(self.steps.schedule.step_images))
        if self.config.shares == "auto" and self.world.size > 1:
            from yolofleet.training.shares import SpeedShares

            step_images, events = self.steps.schedule.step_images, self.report.events
            self.shares = SpeedShares(self.world, self.state.replicas, step_images, events)
            self.splitter = replace(self.splitter, rotates=True)
        self.micro_batches = self.loader(self.steps.keys(self.splitter))
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
                self.world.console.note(f"the run ended before --minutes {self.config.minutes:g} were over")
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
        unended = self.steps.unended_epoch()
        if unended is not None:
            self._end_step(unended, stop, Asked(save=True))
        if (epochs := self.state.progress.open_validation) is not None:
            # The state was saved when this validation began, so its weights are those to validate.
            self.validations.start(epochs, self.loss.at((epochs - 1) / self.config.epochs))
        for plan in self.steps.left():
            if not self.validations.can_draw(plan):
                self.validations.end()
            try:
                asked = self._step(plan, stop)
            except StepAbandoned:
                self.validations.end()
                self._save(ends_epoch=False)
                self._stop(stop)
            is_last = plan.step + 1 == self.steps.schedule.steps_of_run
            if self.shares is not None and not is_last:
                ends_epoch = self.steps.epochs_after(plan) > self.state.progress.epochs_done
                with self.report.clock("comm"):
                    splitter = self.shares.after(
                        plan, self.splitter, ends_epoch=ends_epoch, is_asked=asked.compare
                    )
                if splitter is not None:
                    with self.report.clock("data"):
                        self._divide_by(splitter)
            if is_last or crosses_period(CHECK_STEPS, plan.step, plan.step + 1):
                with self.report.clock("comm"):
                    check_agreement(self.state, self.world, equal_kernels=self.equal_kernels)
            if self._end_step(plan, stop, asked):
                return

    def _end_step(self, plan: StepPlan, stop: StopRequest, asked: Asked = NOTHING) -> bool:
        """End the epoch if the step did, then save or stop if that is due; return whether the run is at its end.

        Collective: every rank, with equal arguments except for ``stop``.

        Raises:
            Stopped: a rank got a stop request, and the run is not at its end; the state is saved.
        """
        ended = self._facts(plan, asked)
        actions = actions_after(ended, self.end_rules)
        evaluation, loss = None, self.loss.at(self.steps.schedule.progress(plan.first_image))
        if actions.validate is Validate.NOW:
            try:
                evaluation = self.validations.validate(ended.epoch, loss, in_period=actions.in_period)
            except ValidationStopped:
                ended = replace(ended, is_interrupted=True)
            ended = replace(ended, is_out_of_patience=self.validations.out_of_patience(ended.epochs))
            actions = actions_after(ended, self.end_rules)
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
            plan.step + 1,
            self.state.progress.epochs_done,
            self.steps.epochs_after(plan),
            self.steps.is_last(plan),
            asked,
        )
        if ended.ends_epoch or ended.is_last:
            self._watch_numerics()
            self.validations.end()
        return replace(
            ended,
            is_out_of_patience=self.validations.out_of_patience(ended.epochs),
            is_validating=self.validations.overlapped is not None,
        )

    def _roll_back(self, problem: NumericsError) -> None:
        """Go back to the newest checkpoint, and leave out the step of ``problem`` from now on.

        The state records the step, so that a resumed run leaves it out too. Collective: every rank, at the same step.

        Raises:
            NumericsError: ``problem``, if ``--on-nan`` is not rollback, this epoch had too many, or no checkpoint exists.
        """
        if not self.nan_rule.rolls_back or problem.first_image is None:
            raise problem
        epoch = problem.first_image // self.steps.schedule.dataset_images
        left_out = [*self.state.progress.left_out, problem.first_image]
        if sum(image // self.steps.schedule.dataset_images == epoch for image in left_out) > MOST_ROLLBACKS:
            problem.what += f"; epoch {epoch + 1} has already had {MOST_ROLLBACKS} rollbacks"
            raise problem
        from yolofleet.training.resume import snapshot_for_all  # only a rollback needs it

        self.validations.end()
        self.micro_batches.close()
        self.store.finish_writing()
        folder = self.report.folder
        try:
            with self.world.activity.doing("rollback"):
                snapshot = snapshot_for_all(
                    self.world, str(folder.path), folder.path, None, is_writer=self.report.is_writer
                )
        except (CheckpointError, ClusterError):
            snapshot = None
        if snapshot is None or snapshot.step > self.state.step:  # of a later state than --resume named
            problem.what += "; --on-nan rollback found no checkpoint of this run to go back to"
            raise problem
        self.state.restore(snapshot)
        merged = sorted({*left_out, *self.state.progress.left_out})
        self.state.note(left_out=merged)
        self.report.rolled_back(problem.what)
        self.tally = Tally(len(self.loss.terms), self.state.progress, self.world)
        self.steps.restore_end()
        self.micro_batches = self.loader(self.steps.keys(self.splitter))

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
            self.tally.leave_out(plan, sum(len(key.samples) for key in self.splitter.keys(plan)))
            self.report.left_out(plan, self.config.on_nan, is_search=self.precision == "fp16")

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
            if len(mine) < count:  # the loader ended before this step, see RunSteps.keys
                self.micro_batches = self.loader(self.steps.keys(self.splitter))
                mine = self._load(count, stop)
            assert len(mine) == count, f"{len(mine)} of {count} micro-batches of step {plan.step}"
        broken = self.unreadable.new_in(mine)
        done = train_step(
            self.state,
            plan,
            self.splitter.by_replica(plan, mine),
            self.loss.at(self.steps.schedule.progress(plan.first_image)),
            self.world,
            self.report.clock,
            total_micro_batches=self.splitter.statistics_total(plan),
            precision=self.precision,
            clip_norm=self.clip_norm,
            asked=self._asks(plan)._replace(unreadable=bool(broken)),
            nan_rule=self.nan_rule,
            stop=lambda: stop,
        )
        if self.memory is not None:
            self.memory.done(self.state.step)
        own_images = sum(len(key.samples) for key in keys)
        self.tally.add(plan, done.terms, own_images)
        self._leave_out(done.left_out)
        self.report.step(plan, mine, self.tally, own_images)
        if done.asked.unreadable:
            self.unreadable.share(broken)
        if done.asked.end and self.steps.end_in_time():
            self.report.ends_in_time(self.state.step, self.steps.schedule.last_step)
        return done.asked

    def _asks(self, plan: StepPlan) -> Asked:
        """Return what is due after a step. Rank 0 decides it: clocks of ranks differ."""
        if not self.world.is_main:
            return NOTHING
        ends_epoch = self.steps.epochs_after(plan) > self.state.progress.epochs_done
        is_requested = self.report.status is not None and self.report.status.take_save()
        return Asked(
            save=is_requested or self.saves.is_due(ends_epoch=ends_epoch),
            keep=self.memory is not None and self.memory.is_due(),
            end=self.steps.is_time_up(self.report.clock),
            compare=self.shares is not None and self.shares.is_due(),
        )

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

    def _stop(self, stop: StopRequest) -> None:
        """Wait until the state is written, and raise. Collective: every rank."""
        with self.report.files.saving(CHECKPOINT, is_last=True):
            self.store.flush()
        if stop.source:
            self.world.console.note(stop.saved_note())
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

    def _divide_by(self, splitter: StepSplitter) -> None:
        """Divide the next steps by ``splitter``. This changes which rank computes which micro-batch, not the result."""
        self.splitter = splitter
        self.state.replicas.time_kernels_of(splitter.largest_pass(self.steps.schedule.step_images))
        # what the loader has read ahead belongs to the old parts
        self.micro_batches.close()
        self.micro_batches = self.loader(self.steps.keys(self.splitter))

    def _close_epoch(
        self, plan: StepPlan, ended: EndedStep, evaluation: Evaluation | None, *, writes_weights: bool
    ) -> None:
        """Count the epoch that the step ended, write its weights if that is due, and report it. Collective: every rank."""
        self.state.note(epochs_done=ended.epochs)
        terms = self.tally.means()
        if ended.ends_epoch:
            self.tally.clear()
        else:  # a resumed run goes on in this epoch
            self.state.note(closed_step=ended.steps)
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
        self.state.note(epoch_terms=self.tally.sums(), epoch_images=self.tally.images)

    def _keep(self) -> Snapshot | None:
        """Pass a copy of the state to the memory of this host, for ranks that are started again; return it.

        None on a rank that writes nowhere.
        """
        if not self.report.is_writer and self.memory is None:
            return None
        began_s = time.monotonic()
        snapshot = self.state.snapshot({**self.stored, "clock": self.report.clock.to_dict()})
        if self.memory is not None:
            self.memory.keep(snapshot, began_s)
        return snapshot
