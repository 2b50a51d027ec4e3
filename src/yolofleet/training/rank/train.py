"""Build the parts of a training run from its settings, and train.

Four stages return frozen values: inputs (``inputs.py``), network and state (``network.py``), and the run
(:func:`built_run`). Every rank builds the same parts.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from yolofleet.config.resolve import Resolved
from yolofleet.config.schema import Recipe, TrainConfig, flag_of
from yolofleet.data.datasets.listing import Listing, reading_contents
from yolofleet.data.input.cache import ImageCache
from yolofleet.data.input.loader import Loader
from yolofleet.data.input.sample import MicroBatch, MicroBatchKey, train_loader
from yolofleet.families.losses.loss import DetectionLoss
from yolofleet.families.networks.detector import fuse
from yolofleet.families.weights.value import WeightsHeader
from yolofleet.inference.evaluate.run import OnBatch, Validation
from yolofleet.runs.checkpoint.store import CheckpointStore, Snapshot, set_aside
from yolofleet.runs.report.clock import Clock
from yolofleet.runs.report.console import NullConsole
from yolofleet.runs.report.folder import RunFolder
from yolofleet.runs.report.results import EventLog
from yolofleet.support import devices
from yolofleet.support.errors import StorageError
from yolofleet.support.files.atomic import write_text
from yolofleet.support.system.signals import request_stop
from yolofleet.training.advice import idle_notes, rate_notes
from yolofleet.training.agreement import have_equal_kernels
from yolofleet.training.fingerprint import fingerprint
from yolofleet.training.loop import TrainingRun
from yolofleet.training.parallel.process import check_equal, loader_processes, versions
from yolofleet.training.parallel.world import World
from yolofleet.training.rank.folder import file_writers, run_console, validation_progress, write_config
from yolofleet.training.rank.inputs import Data, Inputs, open_caches, read_inputs, training_samples
from yolofleet.training.rank.network import (
    Network,
    Prepared,
    built_network,
    header_lines,
    prepared_state,
    read_start,
    with_batch_by_memory,
    with_recipe,
)
from yolofleet.training.report import TrainReport
from yolofleet.training.requests import NOTICE
from yolofleet.training.status import RunStatus, published_status
from yolofleet.training.stored_data import LISTING, StoredData, data_of_new_run
from yolofleet.training.validations import PrepareValidation, Validations

if TYPE_CHECKING:
    from yolofleet.runs.loggers.running import Loggers
    from yolofleet.training.callbacks import Callbacks


def train(
    resolved: Resolved[TrainConfig], recipe: Resolved[Recipe], world: World, clock: Clock, folder: RunFolder
) -> None:
    """Do one rank's part of a training run. Collective: every rank.

    Args:
        clock: of this rank; its watchdog reads it.
    Raises:
        YolofleetError: any expected failure.
    """
    with (
        ExitStack() as lock,
        run_console(resolved.value, world, folder) as console,
        _preempt_notices(resolved.value, world, console),
    ):
        copies = resolved.value.checkpoint_copies
        is_writer = world.rank in file_writers(world, folder, copies, lock, console.warn)
        with (
            _copies(resolved, world, folder, console),  # they may bring the events so far
            EventLog(folder.events(world.rank), rank=world.rank, warn=console.warn) as events,
            _status(folder, clock, world) as status,
            built_run(
                resolved, recipe, world, clock, folder, console, events, is_writer=is_writer, status=status
            ) as run,
        ):
            run.begin()
            with run.callbacks.ending(run.training.state) if run.callbacks else nullcontext():
                run.training.train()
                run.training.report.finish(run.training.state)


def _copies(
    resolved: Resolved[TrainConfig], world: World, folder: RunFolder, console: NullConsole
) -> AbstractContextManager[None]:
    """Copy the run to a store while the context lasts, if the settings ask for it. Collective: every rank."""
    is_asked = bool(resolved.value.checkpoint_to or resolved.value.results_to)
    if not world.gather(is_asked)[0]:  # the folder of rank 0 is copied, and each machine has its own command
        return nullcontext()
    from yolofleet.training.rank.copies import copied_run

    return copied_run(resolved, world, folder, console)


def _preempt_notices(config: TrainConfig, world: World, console: NullConsole) -> AbstractContextManager[None]:
    """Watch for the notice that this machine will be taken away, in one process of each machine."""
    if not config.preempt_notice or world.local_rank:
        return nullcontext()
    from yolofleet.support.system.preempt_notice import preempt_notices

    return preempt_notices(
        config.preempt_notice,
        notice=lambda: request_stop(f"{NOTICE}{world.host}"),
        log=lambda text: console.to_log(f"note: {text}"),
        warn=console.warn,
    )


def _status(
    folder: RunFolder, clock: Clock, world: World
) -> AbstractContextManager[RunStatus] | AbstractContextManager[None]:
    """Return the status of the run on rank 0, else a context of None."""
    if not world.is_main:
        return nullcontext()
    values = {"host": world.host, "ranks": world.size, "restarts": world.restarts}
    return published_status(folder, clock, values, lambda: request_stop("a request in the run folder"))


@dataclass(frozen=True)
class BuiltRun:
    """All parts of one rank's run. :meth:`begin` comes before ``training.train()``.

    Attributes:
        callbacks: of this rank; None without --callbacks.
        data: the index of each split.
        cache: of the training images.
    """

    inputs: Inputs
    stored_data: StoredData
    network: Network
    prepared: Prepared
    cache: ImageCache
    callbacks: Callbacks | None
    training: TrainingRun

    @property
    def data(self) -> Data:
        return self.inputs.data

    def begin(self) -> None:
        """Print the header, and start the clock of the training."""
        prepared, training, resolved = self.prepared, self.training, self.inputs.resolved
        schedule, console = prepared.schedule, training.report.console
        given = {name: getattr(resolved.value, name) for name in resolved.sources if resolved.is_given(name)}
        training.report.begin(
            prepared.state,
            self.data.train,
            self.data.val,
            data_notes=[*self.data.notes, *self.stored_data.accepted_notes()],
            facts=header_lines(self.network, prepared, training.precision, self.cache.note, training.world),
            settings=[
                (name, " ".join(value) if isinstance(value, tuple) else str(value), resolved.sources[name])
                for name, value in given.items()
            ],
            versions=versions(),
            resumed=self.inputs.snapshot is not None,
        )
        problem, instead = prepared.splitter.idle(schedule.step_images)
        if problem:  # of a run that goes on; a new one is refused
            console.warn(f"{problem}; {instead}")
        if crowded := _crowded(self.network, self.data):
            console.warn(crowded)
        if self.inputs.snapshot is None:
            recipe = self.network.recipe
            if resolved.is_given("recipe"):
                from yolofleet.config.recipe_family import family_warnings

                for warning in family_warnings(recipe, self.network.model.description):
                    console.warn(warning)
            for note in [*idle_notes(resolved, recipe), *rate_notes(prepared.config, recipe, schedule)]:
                console.note(note)


@contextmanager
def built_run(
    resolved: Resolved[TrainConfig],
    recipe: Resolved[Recipe],
    world: World,
    clock: Clock,
    folder: RunFolder,
    console: NullConsole,
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
    inputs = read_inputs(resolved, recipe, world, folder, console, is_writer=is_writer)
    start = read_start(inputs, world, console)
    inputs = with_batch_by_memory(with_recipe(inputs, start, console), start, world, console)
    network = built_network(inputs, start, world, console)
    prepared = prepared_state(inputs, network, world)
    config, data = prepared.config, inputs.data

    callbacks = _callbacks(config, world)
    # a run that goes on from another host must not fail here
    if world.is_main and not world.restarts and (config.log or config.tensorboard or config.log_server):
        from yolofleet.config.loggers import check_usable

        check_usable(config)
    identity = _identity(inputs, network, config, callbacks, world)
    _check_polygons(network, data, identity, world, console)
    stored_data = _taken_up(inputs, prepared, identity, world, clock, folder, console, events)
    listing, refusal = None, ""
    if is_writer:
        try:
            listing = _prepare_folder(folder, inputs, network, console)
        except StorageError as problem:  # this rank writes nothing then
            if world.is_main:
                raise
            refusal = f"{world.host}: {problem.what}"

    with ExitStack() as opened:
        if listing is not None:
            opened.enter_context(reading_contents(listing, folder.checkpoints / LISTING, data.splits))
        if inputs.memory is not None:
            opened.callback(inputs.memory.close)
        cache, val_cache = open_caches(config, data, network.img, world, opened, console)
        loggers = opened.enter_context(_loggers(config, folder, console, world, bool(inputs.snapshot)))
        report = TrainReport(
            world=world,
            config=config,
            terms=network.loss.terms,
            dataset_images=len(data.train),
            folder=folder,
            console=console,
            events=events,
            clock=clock,
            callbacks=callbacks,
            loggers=loggers,
            status=status,
            header=WeightsHeader.of(network.model, img=network.img),
            is_writer=listing is not None,
        )
        if listing is not None:
            report.files.describe = partial(_describe, folder, inputs, network, listing)
        report.files.problem = refusal
        store = CheckpointStore(folder.checkpoints, keep=config.keep_last)
        world.activity.finish_writing = store.finish_writing
        is_new = inputs.snapshot is None and not world.restarts
        prepared.splitter.check(prepared.schedule.step_images if is_new else 0)
        training = TrainingRun(
            config=config,
            state=prepared.state,
            schedule=prepared.schedule,
            splitter=prepared.splitter,
            loader=_loader(prepared, network, data, cache, world),
            loss=network.loss,
            clip_norm=network.recipe.value.clip_norm,
            precision=inputs.precision,
            world=world,
            report=report,
            store=store,
            memory=inputs.memory if world.local_rank == 0 else None,
            validations=_validations(inputs, prepared, network, val_cache, report, world, console),
            fingerprint=identity,
            data=stored_data.model_dump(),
            newest_state=_newest_state(folder, world, console, is_writer=listing is not None),
            equal_kernels=have_equal_kernels(world),
        )
        yield BuiltRun(inputs, stored_data, network, prepared, cache, callbacks, training)


def _callbacks(config: TrainConfig, world: World) -> Callbacks | None:
    if not config.callbacks:
        return None
    from yolofleet.training.callbacks import Callbacks

    return Callbacks(config.callbacks, world)


def _taken_up(
    inputs: Inputs,
    prepared: Prepared,
    identity: dict[str, Any],
    world: World,
    clock: Clock,
    folder: RunFolder,
    console: NullConsole,
    events: EventLog,
) -> StoredData:
    """Restore the stored state if it is of this run; return what checkpoints say of the data. Collective: every rank."""
    data, snapshot = inputs.data, inputs.snapshot
    if snapshot is None:
        return data_of_new_run(data.splits, len(data.train), world, console)
    from yolofleet.training.rank.same_data import check_same_data
    from yolofleet.training.resume import check_resume

    config = prepared.config
    check_resume(snapshot.values["fingerprint"], identity, config, console)
    stored = check_same_data(data, snapshot, identity["data"], config, world, folder, console, events)
    prepared.state.restore(snapshot)
    clock.restore(snapshot.values["clock"])
    return stored


def _newest_state(
    folder: RunFolder, world: World, console: NullConsole, *, is_writer: bool
) -> Callable[[], Snapshot | None]:
    """Return the function that finds the newest state of the run for all ranks."""

    def newest() -> Snapshot | None:
        from yolofleet.training.resume import snapshot_for_all  # only a rollback needs it

        return snapshot_for_all(world, str(folder.path), folder.path, None, console, is_writer=is_writer)

    return newest


def _validations(
    inputs: Inputs,
    prepared: Prepared,
    network: Network,
    cache: ImageCache,
    report: TrainReport,
    world: World,
    console: NullConsole,
) -> Validations:
    """Return the validations of the run; they prepare nothing before the first one."""
    prepare = _validation(prepared, network, inputs.data, cache, inputs.precision, world, console)
    return Validations(prepared.state, prepare, report, has_images=len(inputs.data.val) > 0)


def _identity(
    inputs: Inputs, network: Network, config: TrainConfig, callbacks: Callbacks | None, world: World
) -> dict[str, Any]:
    """Return what identifies the run in its checkpoints, with the code of the user that decides its result."""
    code = {"callbacks": callbacks.identity()} if callbacks else {}
    for name in ("recipe_class", "optimizer_class"):
        if value := getattr(config, name):
            from yolofleet.config.user_code import identity_of

            code[name] = identity_of(value, flag_of(name, TrainConfig.model_fields[name]))
    return fingerprint(config, network.recipe.value, inputs.data.train, network.model, world, code)


def _crowded(network: Network, data: Data) -> str:
    """Return a warning if images have more labels than a network with a fixed number of predictions has; else ""."""
    queries = getattr(network.model, "queries", sys.maxsize)
    labels = np.diff(data.train.offsets)
    crowded = labels > queries
    if not crowded.any():
        return ""
    return (
        f"{crowded.sum()} of {len(labels)} train images have more labels (up to {labels.max()}) than the {queries} predictions "
        f"that {network.model.description.name} makes: in each step the labels that fit worst are left out; divide such images, or "
        "use a family without a limit, such as yolov5"
    )


def _check_polygons(
    network: Network, data: Data, identity: dict[str, Any], world: World, console: NullConsole
) -> None:
    """Check that all ranks augment with equal polygons and packages. Collective: every rank."""
    recipe = network.recipe.value
    if recipe.copy_paste or recipe.albumentations:
        versions_here = f"{identity['data']} {identity['kernels'].get('albumentations')}"
        check_equal(world, "the polygons, or the version of albumentations,", versions_here)
    if recipe.copy_paste and not len(data.train.points):
        console.note("copy_paste has no effect: no training label is a polygon")


def _prepare_folder(folder: RunFolder, inputs: Inputs, network: Network, console: NullConsole) -> Listing:
    """Move the files of an earlier run in the folder aside; write ``config.yaml`` and the listing of the data set.

    Raises:
        StorageError: the disk refuses.
    """
    for kept in set_aside(folder.path) if inputs.snapshot is None else ():
        console.note(f"an earlier run in this folder: its files are in {kept}")
    listing = Listing.of(inputs.data.splits, inputs.data.root, folder.checkpoints / LISTING)
    _describe(folder, inputs, network, listing)
    return listing


def _describe(folder: RunFolder, inputs: Inputs, network: Network, listing: Listing) -> None:
    """Write what a resume needs beside a state: ``config.yaml`` and the listing of the data set. Raise StorageError."""
    write_config(folder, inputs.resolved, network.recipe)
    write_text(folder.checkpoints / LISTING, listing.text())


# -- parts -----------------------------------------------------------------------------------------------------


def _loggers(
    config: TrainConfig, folder: RunFolder, console: NullConsole, world: World, resumed: bool
) -> AbstractContextManager[Loggers | None]:
    """Return the loggers of rank 0 as a context; without ``--log`` a context of None, and nothing is imported."""
    if not world.is_main or not (config.log or config.tensorboard):
        return nullcontext()
    from yolofleet.runs.loggers.running import started_loggers

    return started_loggers(config, folder, console, world.activity.doing("loggers"), resumed=resumed)


def _loader(
    prepared: Prepared, network: Network, data: Data, cache: ImageCache, world: World
) -> Callable[[Iterable[MicroBatchKey]], Loader[MicroBatchKey, MicroBatch]]:
    """Return the function that loads the images of a rank's keys."""
    config, recipe = prepared.config, network.recipe.value
    return partial(
        train_loader,
        training_samples(config, recipe, data.train, cache, img=network.img, stride=network.stride),
        match=network.loss.match,
        workers=loader_processes(config.workers, world),
        prefetch=-(-config.prefetch // prepared.splitter.per_pass),
        pin_memory=config.pin_memory and devices.can_pin(world.device),
    )


def _validation(
    prepared: Prepared,
    network: Network,
    data: Data,
    cache: ImageCache,
    precision: str,
    world: World,
    console: NullConsole,
) -> PrepareValidation:
    """Return the function that prepares a validation of the averaged network as it is then."""
    settings = network.evaluation_settings(prepared.config, precision)
    progress = validation_progress(world, console)

    def prepared_validation(
        loss: DetectionLoss,
        on_batch: OnBatch = progress,
        *,
        may_stop: bool = True,
        beside_training: bool = False,
    ) -> Validation:
        return Validation(
            fuse(prepared.averaged),
            data.val,
            settings,
            world=world,
            device=world.device,
            workers=loader_processes(prepared.config.workers, world, beside_training=beside_training),
            cache=cache,
            loss=loss,
            on_batch=on_batch,
            stops=lambda: may_stop and world.activity.stop_requested,
        )

    return prepared_validation
