"""The validations of a run: at once or in a thread beside the training (``--val-overlap``), and what follows from them.

From their figures follow the best weights, early stopping (``--patience``) and the draws of ``--sampler weights``.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from yolofleet.data.datasets.index import DataIndex
from yolofleet.data.input.cache import ImageCache
from yolofleet.data.input.order import ClassAP
from yolofleet.families.losses.loss import DetectionLoss
from yolofleet.families.networks.detector import Detector, fuse
from yolofleet.inference.evaluate.gather import Evaluation
from yolofleet.inference.evaluate.run import EvaluationSettings, OnBatch, Validation, ValidationStopped
from yolofleet.support import devices
from yolofleet.training.parallel.process import loader_processes
from yolofleet.training.report import TrainReport
from yolofleet.training.schedule import StepPlan
from yolofleet.training.state import TrainState

WAIT_S = 1.0


@dataclass
class Validations:
    """The validations of one rank's run. All ranks call its methods alike.

    Without images nothing is validated, and the newest weights are the best.

    Attributes:
        averaged: a network whose tensors are those of the moving average.
        cache: of the decoded images of ``index``.
        overlapped: the validation of the last epoch that goes on beside the training.
        is_other_data: the images or labels are others than those whose figures the state to go on from has.
    """

    state: TrainState
    report: TrainReport
    averaged: Detector
    index: DataIndex
    settings: EvaluationSettings
    cache: ImageCache
    overlapped: OverlappedValidation | None = None
    is_other_data: bool = False

    def forget_best(self) -> None:
        """Begin the search for the best weights anew if figures on other data decided it so far."""
        if self.is_other_data and self.state.progress.best_epoch >= 0:
            self.report.world.console.note(
                "the validation data has changed, and figures on different data cannot be compared: best.safetensors and "
                "--patience follow only the validations from here on"
            )
            self.state.note(best_fitness=-1.0, best_epoch=-1)

    @property
    def has_images(self) -> bool:
        return len(self.index) > 0

    def _prepared(
        self, on_batch: OnBatch, loss: DetectionLoss, *, may_stop: bool = True, beside_training: bool = False
    ) -> Validation:
        """Prepare a validation of the averaged weights as they are now.

        Args:
            may_stop: a stop request ends it.
            beside_training: the training goes on meanwhile.
        """
        world, config = self.report.world, self.report.config
        return Validation(
            fuse(self.averaged),
            self.index,
            self.settings,
            world=world,
            device=world.device,
            workers=loader_processes(config.workers, world, beside_training=beside_training),
            cache=self.cache,
            loss=loss,
            on_batch=on_batch,
            stops=lambda: may_stop and world.activity.stop_requested,
        )

    def validate(self, epoch: int, loss: DetectionLoss, *, in_period: bool) -> Evaluation | None:
        """Validate the averaged weights after ``epoch`` epochs, and compare them with the best. Collective: every rank.

        Args:
            in_period: the validation is one of ``--val-period``.
        Raises:
            ValidationStopped: a rank got a stop request.
        """
        evaluation = self.evaluate(loss)
        if evaluation is None:
            return None
        self._compare_with_best(epoch, evaluation, self.state.weights())
        if self.follows_accuracy and in_period:
            self._keep_class_ap(epoch, _class_ap_of(evaluation))
        return evaluation

    @property
    def follows_accuracy(self) -> bool:
        return self.report.config.sampler == "weights"

    def class_ap(self, epoch: int) -> ClassAP | None:
        """Return the AP of each class that decides the draws of ``epoch`` (from 0); None before the first validation.

        The newest validation after at most ``epoch`` - 1 epochs counts. It has ended when loader processes begin with ``epoch``.
        """
        figures = self.state.progress.class_ap
        known = [int(done) for done in figures if int(done) < epoch]
        return tuple(figures[str(max(known))]) if known else None

    def can_draw(self, plan: StepPlan) -> bool:
        """Return whether the validations have ended that decide the samples of a step; equal on every rank at its start."""
        if not self.follows_accuracy:
            return True
        images, overlapped = self.report.dataset_images, self.overlapped
        ended = self.state.progress.epochs_done if overlapped is None else overlapped.epoch - 1
        return min((plan.end_image - 1) // images - 1, plan.first_image // images) <= ended

    def _keep_class_ap(self, epoch: int, figures: list[float]) -> None:
        """Put the figures of the validation after ``epoch`` epochs into the state, and keep those of the one before."""
        kept = {int(done): ap for done, ap in self.state.progress.class_ap.items()} | {epoch: figures}
        newest = {str(done): kept[done] for done in sorted(kept)[-2:]}
        self.state.note(class_ap=newest)

    def write_last(self, epoch: int) -> None:
        """Write the averaged weights after ``epoch`` epochs as ``last``, and as ``best`` if nothing is validated."""
        self.report.files.write_weights("last", self.state, epoch)
        if not self.has_images:
            self.state.note(best_epoch=epoch)
            self.report.files.write_weights("best", self.state, epoch)

    def evaluate(self, loss: DetectionLoss) -> Evaluation | None:
        """Validate the averaged weights now; None without images. Collective: every rank.

        Raises:
            ValidationStopped: a rank got a stop request.
        """
        if not self.has_images:
            return None
        with self.report.clock("evaluate"), devices.untimed_kernels():
            return self._prepared(self.report.world.tell_validated, loss).evaluate()

    def start(self, epoch: int, loss: DetectionLoss) -> None:
        """Start a validation of the weights after ``epoch`` epochs that overlaps with training."""
        weights = {name: t.detach().clone() for name, t in self.state.weights().items()}
        may_stop = not self.follows_accuracy
        prepare = partial(self._prepared, loss=loss, may_stop=may_stop, beside_training=True)
        self.overlapped = OverlappedValidation(epoch, weights, prepare, self.report.world.device)
        if self.follows_accuracy:
            self._keep_class_ap(epoch, [])

    def end(self) -> None:
        """Wait for the validation that overlaps with training, if there is one, and report it. Collective: every rank."""
        overlapped, self.overlapped = self.overlapped, None
        if overlapped is None:
            return
        try:
            with self.report.clock("evaluate"):
                evaluation = overlapped.result(self.report.world.activity.tick)
        except ValidationStopped:
            return  # the row of that epoch has no figures
        self._compare_with_best(overlapped.epoch, evaluation, overlapped.weights)
        if self.follows_accuracy:
            self._keep_class_ap(overlapped.epoch, _class_ap_of(evaluation))
        self.report.validated(overlapped.epoch, evaluation)

    def _compare_with_best(self, epoch: int, evaluation: Evaluation, weights: dict[str, Tensor]) -> None:
        """Keep the weights of ``epoch`` as ``best`` if their fitness is the highest so far.

        As long as the fitness is 0, the newest weights are the best: they have learned most.
        """
        fitness, best = evaluation.task.judgement.fitness(evaluation.metrics.figures), self.state.progress
        if fitness > best.best_fitness or fitness == best.best_fitness == 0:
            self.state.note(best_fitness=fitness, best_epoch=epoch)
            self.report.files.write_weights("best", self.state, epoch, weights)

    def out_of_patience(self, epochs_done: int = 0) -> bool:
        """Return whether early stopping is due after ``epochs_done`` epochs (0: those that the state counts).

        Only a validation can find that nothing was better, so a run goes on to the next one after the best.
        """
        progress, patience, period = (
            self.state.progress,
            self.report.config.patience,
            self.report.config.val_period,
        )
        done, best = epochs_done or progress.epochs_done, progress.best_epoch
        if progress.best_fitness == 0:
            best = min(best, period)  # the first validation: no later one was better
        is_due = done - best >= max(patience, period)
        return bool(self.has_images and patience and progress.best_epoch >= 0 and is_due)


def _class_ap_of(evaluation: Evaluation) -> list[float]:
    """Return the last figure of the screen for each class; for boxes AP, -1 for a class without labels."""
    name = list(evaluation.task.of_class.values())[-1]
    return [figures[name] for figures in evaluation.metrics.per_class.values()]


class OverlappedValidation:
    """Starts a validation in a thread.

    The thread runs no collective. :meth:`result` runs the only one, in the main thread, so all ranks run their collectives
    in the same order.

    Args:
        weights: a copy of the averaged weights.
        prepare: makes the validation of these weights, on ``device``.
    """

    def __init__(
        self,
        epoch: int,
        weights: dict[str, Tensor],
        prepare: Callable[[OnBatch], Validation],
        device: torch.device,
    ) -> None:
        self.epoch, self.weights = epoch, weights
        self._batches = 0
        self._validation = prepare(self._on_batch)
        self._pool = ThreadPoolExecutor(1, "validation")
        self._run = self._pool.submit(self._in_thread, device)

    def _in_thread(self, device: torch.device) -> None:
        with devices.side_stream(device):
            self._validation.run()

    def _on_batch(self, done: int, _batches: int) -> None:
        self._batches = done

    def result(self, tick: Callable[[], None]) -> Evaluation:
        """Wait for the thread, and return the figures of all ranks. Collective: every rank.

        Args:
            tick: called while the thread makes progress.
        Raises:
            ValidationStopped: a rank left out batches.
        """
        seen = 0
        while wait([self._run], WAIT_S).not_done:
            if self._batches > seen:
                seen = self._batches
                tick()
        self._pool.shutdown()
        self._run.result()
        return self._validation.gathered()

    def abandon(self) -> None:
        """Leave out the rest, and wait for the thread. No collective."""
        self._validation.leave_out_rest()
        self._pool.shutdown()
