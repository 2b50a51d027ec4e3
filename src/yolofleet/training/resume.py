"""Continue a run at the step where a checkpoint was made, on any fleet.

``runs/checkpoint/store.py`` has the order in which it tries checkpoints, ``config/stored/resume.py`` the settings that a user may
change. This module sends the state to every rank and refuses the state of another run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, ValidationError

from yolofleet.config.schema import TrainConfig
from yolofleet.config.stored.job import load_config_yaml
from yolofleet.config.stored.resume_options import is_address
from yolofleet.config.words.earlier import fingerprint_of_today
from yolofleet.families.networks.description import ModelDescription, description_from_dict
from yolofleet.families.table import FAMILIES
from yolofleet.families.weights.format import decode_tensors, read_whole
from yolofleet.runs.checkpoint.names import EVENTS, LISTING, RESULTS, step_of
from yolofleet.runs.checkpoint.store import CheckpointStore, Snapshot, decode_snapshot, set_aside
from yolofleet.runs.report.console import NullConsole
from yolofleet.storage.atomic import write_bytes
from yolofleet.storage.foreign import read_foreign, reading
from yolofleet.support.errors import (
    CheckpointError,
    ClusterError,
    ConfigError,
    NotAsListed,
    StorageError,
    YolofleetError,
)
from yolofleet.support.text import shown
from yolofleet.training.parallel.world import World, main_does
from yolofleet.training.state import Progress
from yolofleet.training.stored_data import Amount, Count, Stored, StoredData

if TYPE_CHECKING:
    from yolofleet.runs.checkpoint.restart_store import RestartStore

SHARED_RESULTS = (RESULTS, "weights/best.safetensors", "weights/last.safetensors")
CODE = ("recipe_class", "optimizer_class", "callbacks")  # keys of the settings of a checkpoint
BROUGHT = (*SHARED_RESULTS, EVENTS, LISTING)  # from an address
MAX_RESULT_BYTES = 1 << 30


class StoredFingerprint(Stored):
    """The result of ``training.fingerprint.fingerprint``."""

    settings: dict[str, Any]
    recipe: dict[str, Any]
    data: str
    model: dict[str, Any]
    names: list[str]
    kernels: dict[str, Any]
    fleet: dict[str, Any]


class StoredTally(Stored):
    """One half of ``runs.report.clock.Clock.to_dict``."""

    seconds: dict[str, Amount]
    steps: Count
    images: Count
    rated_images: Count
    rated_s: Amount


class StoredClock(Stored):
    run: StoredTally
    epoch: StoredTally


class StoredValues(Stored, extra="ignore"):
    """The values of a training state that are not tensors; ``training.state.TrainState.snapshot`` writes them."""

    images_seen: Count
    bn_batches: Count
    ema_updates: Count
    scaler: dict[str, Amount]
    overflows: Count
    progress: Progress
    optimizer_counts: Annotated[list[dict[str, Count | Amount]], Field(max_length=1 << 16)] = []
    fingerprint: StoredFingerprint
    clock: StoredClock
    data: StoredData | None = None


def snapshot_for_all(
    world: World,
    resume: str,
    run: Path,
    memory: RestartStore | None,
    *,
    is_writer: bool,
    is_of_run: bool = True,
    copied_to: str = "",
) -> Snapshot | None:
    """Find the newest complete state on any host, and broadcast it (so hosts need no shared folder).

    A host has it in memory, if the run was started again after a failure, or on its disk. The ranks that write files also
    get the results and weights of the run.

    Args:
        resume: ``--resume``: a file of rank 0, the folder of the run on each host, or an address, which may have no state;
            "" = a run that was started again.
        is_writer: this rank writes the files of the run.
        is_of_run: False: the folder of this host has files of another run.
        copied_to: ``--checkpoint-to``, which has a state if no host has one after a restart.
    Returns:
        None for a run that was started again before it saved any state, and for an address that has none.
    Collective: every rank.

    Raises:
        CheckpointError: no checkpoint is complete, or the file is not a training state.
    """
    content, found, step, problem = b"", Path(run if is_address(resume) else resume or run), -1, None
    in_memory = memory if world.restarts and world.local_rank == 0 and memory and memory.step() >= 0 else None
    if world.is_main and world.restarts and not found.exists():
        found = run  # the run has pruned the state that --resume names
    try:
        if in_memory is not None:
            step = in_memory.step()
        elif not found.is_dir():
            step = 0 if world.is_main else -1
        elif world.local_rank == 0 and is_of_run:
            found, step = _newest(found, world.console)
    except YolofleetError as error:
        problem = None if is_address(resume) else error
    every = world.gather((step, resume if is_address(resume) else copied_to))
    steps, address, is_unreadable = [theirs for theirs, _ in every], every[0][1], False
    if address and (max(steps) < 0 or not world.restarts):
        copies: list[tuple[Path, int]] = []

        def look(there: Path) -> None:
            if _last_step(there) > max(steps):
                copies.append(_newest(there, world.console))

        try:
            main_does(world, "copying", partial(_with_copy, address, look))
        except YolofleetError as error:
            is_unreadable, problem = True, error
            if world.is_main and max(steps) >= 0:
                world.console.warn(f"{error.what}: going on from the state of step {max(steps)} here")
        if copies and copies[0][1] > max(steps):
            (found, step), in_memory = copies[0], None
        steps[0] = world.gather(step)[0]
    source = max(range(world.size), key=lambda rank: (steps[rank], -rank))
    if steps[source] < 0:
        if not is_unreadable and (not resume or is_address(resume)):
            return None
        raise problem or ClusterError("rank 0 could not read the checkpoint; its message says why")
    try:
        if world.rank == source:
            content = in_memory.newest() if in_memory is not None else read_whole(found)
    except YolofleetError as error:
        problem = error
    content = world.broadcast_bytes(content, source)
    if not content:
        raise problem or ClusterError(f"rank {source} could not read the checkpoint; its message says why")
    if is_writer and not is_of_run:
        for kept in set_aside(run):
            world.console.note(f"an earlier run in this folder: its files are in {kept}")
    if world.local_size < world.size:
        _share_results(world, run, is_writer=is_writer, is_of_run=is_of_run)
    origin = str(found) if world.rank == source else f"the checkpoint sent by rank {source}"
    snapshot = decode_snapshot(decode_tensors(content, origin), origin)
    try:
        StoredValues.model_validate(snapshot.values)
    except ValidationError as wrong:
        first = wrong.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"{origin} is not a training state: {shown(where)}: {first['msg']}") from None
    return snapshot


def _newest(run: Path, console: NullConsole) -> tuple[Path, int]:
    """Return the file and the step of the newest complete state of a run on this host."""
    found, skipped = CheckpointStore(run / "checkpoints").newest()
    for note in skipped:
        console.warn(f"passed over: {note}")
    return found, step_of(found)


def _share_results(world: World, run: Path, *, is_writer: bool, is_of_run: bool) -> None:
    """Copy results and weights of a run to all ranks that write files, from a rank with the most rows of results.

    Collective: every rank.
    """
    contents = {name: b"" for name in SHARED_RESULTS}
    if world.local_rank == 0 and is_of_run:
        for name in contents:
            with suppress(OSError):
                contents[name] = read_foreign(run / name, limit_bytes=MAX_RESULT_BYTES, follow=False)
    digests = [hashlib.sha256(content).hexdigest() for content in contents.values()]
    every = world.gather((len(contents[RESULTS]), is_writer, digests))
    source = max(range(world.size), key=lambda rank: (every[rank][0], -rank))
    if all(theirs == every[source][2] for _, writes, theirs in every if writes):
        return
    for name, mine in contents.items():
        content = world.broadcast_bytes(mine if world.rank == source else b"", source)
        if content and is_writer and world.rank != source:
            try:
                write_bytes(run / name, content)
            except StorageError:
                if world.is_main:
                    raise


def stored_description(snapshot: Snapshot) -> ModelDescription:
    """Return the description of the network of a training state.

    Raises:
        CheckpointError: the description is not valid.
    """
    try:
        return description_from_dict(snapshot.values["fingerprint"]["model"], source="the checkpoint")
    except ConfigError as problem:
        raise CheckpointError(problem.what, source=problem.source, hint=problem.hint) from None


def check_resume(
    then: dict[str, Any], now: dict[str, Any], config: TrainConfig, console: NullConsole
) -> None:
    """Compare the fingerprints of the checkpoint and of this run; print differences that are allowed.

    ``training/rank/same_data.py`` compares the data.

    Raises:
        CheckpointError: settings, recipe, model or classes differ; in exact mode, also ``kernels``.
    """
    source = f"--resume {config.resume}"
    # Hyperparameters that are newer than the checkpoint had no effect then, which their defaults must mean. Those of other
    # families, which earlier versions stored too, had none.
    then = fingerprint_of_today(then)
    usual = FAMILIES[now["model"]["family"]].hyperparameters().model_dump(mode="json")
    then = {**then, "recipe": {name: then["recipe"].get(name, value) for name, value in usual.items()}}
    for part, words in (
        ("settings", "with other settings"),
        ("recipe", "with another recipe"),
        ("model", "for another model"),
        ("names", "for other classes"),
    ):
        if then[part] != now[part]:
            hint = "a checkpoint continues only the run that made it; --weights starts a new run from weights"
            if part == "settings" and then[part] == now[part] | {"micro_batch": then[part]["micro_batch"]}:
                hint = f"--micro-batch {then[part]['micro_batch']}"  # earlier versions had another default
            if part == "settings" and any(then[part].get(code) != now[part].get(code) for code in CODE):
                hint = "--callbacks, --recipe-class and --optimizer must name the code of the run, with the same source"
            difference = first_difference(then[part], now[part])
            if part == "names" and len(then[part]) == len(now[part]):
                from yolofleet.families.networks.class_names import match_names  # only this error needs it

                difference = match_names(then[part], now[part]).text or difference
            raise CheckpointError(f"the checkpoint was made {words}: {difference}", source=source, hint=hint)
    if then["fleet"] != now["fleet"]:
        console.note(
            f"the fleet changed: {first_difference(then['fleet'], now['fleet'])}; the result does not"
        )
    if then["kernels"] != now["kernels"]:
        difference = first_difference(then["kernels"], now["kernels"])
        if config.reduce == "exact":
            raise CheckpointError(
                f"--reduce exact cannot give equal bits here: {difference}",
                source=source,
                hint="resume on the same kind of machine with the same settings, or with --reduce fast",
            )
        console.note(f"last bits may differ from the run so far: {difference}")


def first_difference(then: Any, now: Any) -> str:
    """Return the first key whose values differ, with both values."""
    if isinstance(then, dict) and isinstance(now, dict):
        for key in sorted({*then, *now}):
            if then.get(key) != now.get(key):
                return f"{key} was {shown(then.get(key))}, is {shown(now.get(key))}"
    return f"was {then}, is {now}"[:300]


# -- the copy of a run at an address -------------------------------------------------------------------------


def bring_results(address: str, run: Path, *, is_restart: bool) -> None:
    """Copy the results of the run at an address into its folder here, unless the folder has later states of that run.

    Files of another run in the folder are moved aside.

    Args:
        is_restart: the folder is that of this run, but perhaps on a machine that has none of its files.
    Raises:
        ConfigError, StorageError: the store cannot be read, or the disk cannot be written.
    """
    if is_restart:
        if missing := [name for name in BROUGHT if not (run / name).exists()]:
            _with_copy(address, lambda there: _copy(there, run, missing))
        return
    if not _is_copied_to(run, address):
        set_aside(run)
    last_here = _last_step(run)

    def bring(there: Path) -> None:
        if _last_step(there) > last_here:
            _copy(there, run, BROUGHT)

    _with_copy(address, bring)


def _with_copy(address: str, work: Callable[[Path], None]) -> None:
    """Call ``work`` with the folder that has the files at an address, and again with a new list if one was not as listed.

    A process that has lost the lease may have replaced or deleted an object after this process has listed it.

    Raises:
        ConfigError, StorageError: the store cannot be read. CheckpointError: of ``work``.
    """
    from yolofleet.storage.mirror import local_path  # only runs at an address need it

    def listed() -> Path:
        return local_path(f"{address}/", "--resume", may_change=True)

    try:
        work(listed())
    except (NotAsListed, CheckpointError):
        work(listed())


def _copy(there: Path, run: Path, names: Iterable[str]) -> None:
    for name in names:
        if (there / name).is_file():
            with reading(there / name, StorageError):
                write_bytes(run / name, read_foreign(there / name, limit_bytes=MAX_RESULT_BYTES))


def _last_step(run: Path) -> int:
    """Return the step of the newest state in a run folder by its name; -1 without any."""
    entries = CheckpointStore(run / "checkpoints").entries()
    return entries[0].step if entries else -1


def _is_copied_to(run: Path, address: str) -> bool:
    """Return whether the states in a folder are of the run at an address."""
    with suppress(ConfigError):
        return load_config_yaml(run / "config.yaml")[0].value.checkpoint_to.removesuffix("/") == address
    return False
