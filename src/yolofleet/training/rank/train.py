"""Build the parts of a training run from its settings, and train.

Four stages return frozen values: inputs (``inputs.py``), network and state (``network.py``), and the run
(:func:`built_run`). Every rank builds the same parts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from yolofleet.config.decide import FEW_IMAGES
from yolofleet.config.resolve import Resolved
from yolofleet.config.schema import Recipe, TrainConfig
from yolofleet.data.input.cache import ImageCache
from yolofleet.families.weights.value import WeightsHeader
from yolofleet.runs.checkpoint.store import CheckpointStore
from yolofleet.runs.report.clock import Clock
from yolofleet.runs.report.folder import RunFolder
from yolofleet.runs.report.results import EventLog
from yolofleet.support.errors import Stopped
from yolofleet.tasks.table import task_of
from yolofleet.training.advice import show_advice
from yolofleet.training.agreement import have_equal_kernels
from yolofleet.training.fingerprint import fingerprint
from yolofleet.training.loop import TrainingRun
from yolofleet.training.parallel.world import World
from yolofleet.training.rank.folder import file_writers, open_console
from yolofleet.training.rank.inputs import Data, Inputs, open_caches, read_inputs
from yolofleet.training.rank.network import (
    Network,
    Prepared,
    built_network,
    header_lines,
    micro_batch_loader,
    prepared_state,
    read_start,
    with_batch_by_memory,
    with_recipe,
)
from yolofleet.training.rank.stored import FilesBesideStates, taken_up
from yolofleet.training.report import TrainReport
from yolofleet.training.requests import preempt_notices
from yolofleet.training.run_steps import RunSteps
from yolofleet.training.status import RunStatus, published_status
from yolofleet.training.validations import Validations

if TYPE_CHECKING:
    from yolofleet.runs.loggers.running import Loggers


def train(
    resolved: Resolved[TrainConfig], recipe: Resolved[Recipe], world: World, clock: Clock, folder: RunFolder
) -> None:
    """Do one rank's part of a training run. Collective: every rank.

    Args:
        clock: of this rank; its watchdog reads it.
    """
    config = resolved.value
    with ExitStack() as lock, open_console(config, world, folder) as console, preempt_notices(config, world):
        is_writer = world.rank in file_writers(world, folder, config.checkpoint_copies, lock, console.warn)
        with (
            _copies(resolved, world, folder),  # they may bring the events so far
            EventLog(folder.events(world.rank), rank=world.rank, warn=console.warn) as events,
            published_status(folder, clock, world) if world.is_main else nullcontext() as status,
            built_run(
                resolved, recipe, world, clock, folder, events, is_writer=is_writer, status=status
            ) as run,
        ):
            run.begin()
            callbacks = run.training.report.callbacks
            with callbacks.ending(run.training.state) if callbacks else nullcontext():
                run.training.train()
                try:
                    run.training.report.finish()
                except KeyboardInterrupt as problem:
                    what = "stopped on request after the last step; the state is saved, the report is not"
                    raise Stopped(what, source=f"{problem}" or "Ctrl-C", hint=folder.resume_command) from None


def _copies(resolved: Resolved[TrainConfig], world: World, folder: RunFolder) -> AbstractContextManager[None]:
    """Copy the run to a store while the context lasts, if the settings ask for it. Collective: every rank."""
    # the folder of rank 0 is copied, and each machine has its own command
    if not world.gather(bool(resolved.value.checkpoint_to))[0]:
        return nullcontext()
    from yolofleet.training.rank.copies import copied_run

    return copied_run(resolved, world, folder)


@dataclass(frozen=True)
class BuiltRun:
    """All parts of one rank's run. :meth:`begin` comes before ``training.train()``."""

    inputs: Inputs
    data_notes: Sequence[str]
    network: Network
    prepared: Prepared
    cache: ImageCache
    training: TrainingRun

    @property
    def data(self) -> Data:
        return self.inputs.data

    def begin(self) -> None:
        """Print the header, and start the clock of the training."""
        prepared, training, resolved = self.prepared, self.training, self.inputs.resolved
        schedule, world, is_new = prepared.schedule, training.world, self.inputs.snapshot is None
        given = {name: getattr(resolved.value, name) for name in resolved.sources if resolved.is_given(name)}
        training.report.begin(
            data_notes=self.data_notes,
            facts=header_lines(self.network, prepared, training.precision, self.cache.note, world),
            settings=[
                (name, " ".join(value) if isinstance(value, tuple) else str(value), resolved.sources[name])
                for name, value in given.items()
            ],
            resumed=not is_new,
        )
        problem, instead = prepared.splitter.idle(schedule.step_images)
        if problem:
            world.console.warn(f"{problem}; {instead}")
        model, recipe = self.network.model, self.network.recipe
        show_advice(world.console, resolved, recipe, schedule, model, self.data.train, is_new=is_new)


@contextmanager
def built_run(
    resolved: Resolved[TrainConfig],
    recipe: Resolved[Recipe],
    world: World,
    clock: Clock,
    folder: RunFolder,
    events: EventLog,
    *,
    is_writer: bool,
    status: RunStatus | None = None,
) -> Iterator[BuiltRun]:
    """Build the parts of one rank's run; close its caches at the end. Collective: every rank.

    Args:
        status: of the run, on rank 0 of a training.
    """
    torch.manual_seed(resolved.value.seed)
    random.seed(resolved.value.seed)
    inputs = read_inputs(resolved, recipe, world, folder, is_writer=is_writer)
    start = read_start(inputs, world)
    inputs = with_batch_by_memory(with_recipe(inputs, start, world), start, world)
    network = built_network(inputs, start, world)
    prepared = prepared_state(inputs, network, world)
    config, data, state = prepared.config, inputs.data, prepared.state
    callbacks: Callbacks | None = None
    if config.callbacks:
        from yolofleet.training.callbacks import Callbacks

        callbacks = Callbacks(config.callbacks, world)
    identity = fingerprint(
        config,
        network.recipe.value,
        data.train,
        network.model,
        world,
        callbacks.identity() if callbacks else "",
    )
    stored, is_other_val = taken_up(inputs, prepared, identity, world, clock, folder, events)
    beside = FilesBesideStates(folder, inputs, network.recipe)
    refusal = beside.begin(world) if is_writer else ""
    is_writer = is_writer and not refusal
    is_new = inputs.snapshot is None and not world.restarts
    needs_work = is_new and len(data.train) >= FEW_IMAGES  # the steps of the recipes for few images are small
    prepared.splitter.check(prepared.schedule.step_images if needs_work else 0)

    with ExitStack() as opened:
        if is_writer:
            opened.enter_context(beside.reading_contents())
        if inputs.memory is not None:
            opened.callback(inputs.memory.close)
        cache, val_cache = open_caches(config, data, network.img, world, opened)
        report = TrainReport(
            world=world,
            config=config,
            state=state,
            splits=[split for split in data.splits if len(split)],
            terms=network.loss.terms,
            folder=folder,
            events=events,
            clock=clock,
            callbacks=callbacks,
            loggers=opened.enter_context(_loggers(config, folder, world, bool(inputs.snapshot))),
            status=status,
            header=WeightsHeader.of(network.model, img=network.img),
            is_writer=is_writer,
            task=task_of(network.model),
        )
        report.files.describe, report.files.problem = beside.write, refusal
        settings = network.evaluation_settings(config, inputs.precision)
        validations = Validations(state, report, prepared.averaged, data.val, settings, val_cache)
        validations.is_other_data = is_other_val
        store = CheckpointStore(folder.checkpoints, keep=config.keep_last)
        world.activity.finish_writing = store.finish_writing
        training = TrainingRun(
            config=config,
            state=state,
            steps=RunSteps(config, state, prepared.schedule, validations),
            splitter=prepared.splitter,
            loader=micro_batch_loader(prepared, network, data, cache, world),
            loss=network.loss,
            clip_norm=network.recipe.value.clip_norm,
            precision=inputs.precision,
            world=world,
            report=report,
            store=store,
            memory=inputs.memory if world.local_rank == 0 else None,
            validations=validations,
            stored={"fingerprint": identity, "data": stored.model_dump()},
            equal_kernels=have_equal_kernels(world),
        )
        notes = [*data.notes, *stored.accepted_notes()]
        yield BuiltRun(inputs, notes, network, prepared, cache, training)


def _loggers(
    config: TrainConfig, folder: RunFolder, world: World, resumed: bool
) -> AbstractContextManager[Loggers | None]:
    """Return the loggers of rank 0 as a context; without ``--log`` a context of None, and nothing is imported."""
    if not world.is_main or not config.log:
        return nullcontext()
    from yolofleet.runs.loggers.running import started_loggers

    return started_loggers(config, folder, world.console, world.activity.doing("loggers"), resumed=resumed)
