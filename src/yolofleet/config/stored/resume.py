"""Find the run that ``--resume`` names, and merge its settings with those of the command line.

Data, recipe and seed decide the result of a run, so they cannot change. The devices, saved files, reports and length of
the run may change, which gives a note. Each setting says so itself (``fixed`` and ``again`` in ``schema/``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from yolofleet.config.decide import OF_IMAGES
from yolofleet.config.loggers import logger_names, servers_of
from yolofleet.config.recipe import is_listed
from yolofleet.config.resolve import COMMAND_LINE, DEFAULT, FIRST_START, Resolved, value_text
from yolofleet.config.schema import Recipe, RunSettings, TrainConfig, flag_of, may_be_in_files, rules_of
from yolofleet.config.stored.resume_options import is_address
from yolofleet.storage.foreign import check_links, read_foreign_text
from yolofleet.support.errors import ConfigError
from yolofleet.support.text import listed, quoted, shown

Work = TypeVar("Work", bound=RunSettings)
CHECKPOINTS = "checkpoints/step-*.safetensors"
MAX_WHERE_BYTES = 64 << 10
ELSEWHERE = "checkpoints/where.txt"  # if the checkpoints are not here: hosts and folders that may have them


@dataclass(frozen=True)
class Found:
    """A run to resume.

    Attributes:
        folder: the run folder, with config.yaml and checkpoints.
        resume: new value of ``--resume``: the folder, one checkpoint file in it, or the address whose mirror the folder is.
    """

    folder: Path
    resume: str

    @property
    def where(self) -> str:
        """The folder, or its address."""
        return self.resume if is_address(self.resume) else str(self.folder)

    @property
    def config(self) -> str:
        return f"{self.where}/config.yaml"


def find_run(config: TrainConfig, *, is_named: bool) -> Found | None:
    """Return the run that ``--resume`` names; None if ``auto`` found none and ``--data`` allows a new run.

    Args:
        is_named: the user set ``--name``, so ``auto`` considers only runs of that name.

    Raises:
        ConfigError: there is no such run, it has no checkpoint here, or a link leads out of its folder.
    """
    found = _run(config, is_named=is_named)
    if found is not None and not config.linked_folders:
        check_links(found.folder)
    if found is not None and not (config.hosts or config.fleet):
        _check_states_are_here(found.folder)
    return found


def _run(config: TrainConfig, *, is_named: bool) -> Found | None:
    if is_address(config.resume):
        return _stored_run(config.resume, "--resume", is_needed=True)
    if config.resume != "auto":
        return _named_run(config.resume)
    if config.checkpoint_to:  # it is at most one state behind a folder here, and this may be another machine
        return _stored_run(config.checkpoint_to, "--checkpoint-to", is_needed=not config.data)
    project = config.project or Path("runs") / "train"
    name = re.compile(re.escape(config.name) + r"\d*") if is_named else re.compile(".*", re.DOTALL)
    runs = [
        folder
        for folder in project.glob("*")
        if name.fullmatch(folder.name)
        and (folder / "config.yaml").is_file()
        and (config.linked_folders or not folder.is_symlink())
    ]
    states = [(max(map(saved_at_ns, found)), run) for run in runs if (found := _states(run))]
    if states:
        newest = max(states)[1]
        return Found(newest, str(newest))
    if config.data:
        return None
    raise ConfigError(
        f"--resume auto: no run with a checkpoint in {project}",
        hint="--resume FOLDER resumes a run in another folder",
    )


def saved_at_ns(state: Path) -> int:
    return state.lstat().st_mtime_ns  # lstat also works for a broken link


def _check_states_are_here(folder: Path) -> None:
    """Raise ConfigError if the checkpoints of the run are on another host, where a run on several hosts wrote them."""
    if not any(folder.glob(CHECKPOINTS)):
        where, *others = read_where(folder / ELSEWHERE)
        host, _, path = where.partition(":")
        copies = listed([other.partition(":")[0] for other in others])
        raise ConfigError(
            f"the checkpoints of {folder} are on {host}, in {path}"
            + (f", and perhaps on {copies}" if copies else ""),
            source=str(folder / ELSEWHERE),
            hint=f"--hosts {quoted(host)}:... (the newest checkpoint of all hosts counts); or copy them here: "
            f"scp -r {quoted(where)} {quoted(folder)}",
        )


def read_where(file: Path) -> list[str]:
    """Return the lines ``host:folder`` of ``where.txt``, at least one. Raise ConfigError if the file cannot be read."""
    try:
        text = read_foreign_text(file, limit_bytes=MAX_WHERE_BYTES, follow=False)
    except (OSError, ValueError) as problem:
        raise ConfigError(
            f"{file} cannot be read: {getattr(problem, 'strerror', None) or problem}",
            hint="it must name the hosts and folders of the checkpoints, a line host:folder for each",
        ) from None
    return text.splitlines() or [""]


def _states(folder: Path) -> list[Path]:
    """Return the checkpoints of a run, or the file that names their host."""
    return [*folder.glob(CHECKPOINTS), *folder.glob(ELSEWHERE)]


def _named_run(resume: str) -> Found:
    path = Path(resume)
    if not path.exists():
        raise ConfigError(
            f"--resume {shown(resume)} does not exist", hint="--resume auto resumes the newest run"
        )
    folder, target = (path, path) if path.is_dir() else (path.parent.parent, path)
    if path.is_file() and path.parent.name == "weights":  # as in YOLOv5: --resume runs/.../weights/last.pt
        target = folder
    if not (folder / "config.yaml").is_file():
        raise ConfigError(
            f"--resume {shown(resume)}: {folder} is not a run folder (it has no config.yaml)",
            hint="--weights FILE starts a new run from these weights",
        )
    if not _states(folder):
        raise ConfigError(
            f"--resume {shown(resume)}: {folder} has no checkpoint",
            hint="the run ended before its first one; start a new run",
        )
    return Found(folder, str(target))


def _stored_run(address: str, setting: str, *, is_needed: bool) -> Found | None:
    """Return the run at an address. If it has no checkpoint, return None, or raise ConfigError if ``is_needed``."""
    from yolofleet.storage.mirror import local_path  # only runs at an address need it

    check_writable(address, setting)
    folder = local_path(f"{address.removesuffix('/')}/", setting, may_be_empty=True, may_change=True)
    if (folder / "config.yaml").is_file() and any(folder.glob(CHECKPOINTS)):
        return Found(folder, address.removesuffix("/"))
    if is_needed:
        hint = "check the address; without --resume a new run begins"
        raise ConfigError(f"{setting} {address} has no run with a checkpoint", hint=hint)
    return None


def check_writable(address: str, setting: str) -> None:
    """Raise ConfigError if an address is not one that takes the files of a run."""
    from yolofleet.storage.object_store import check_address  # only runs at an address need it

    check_address(address, setting)
    if address.startswith(("http://", "https://")):
        raise ConfigError(
            f"{setting}: a web server takes no files",
            hint=f"{setting} s3://BUCKET/runs/NAME, or gs:// or az://",
        )


def continue_run(
    found: Found,
    stored: tuple[Resolved[TrainConfig], Resolved[Recipe]],
    asked: tuple[Resolved[TrainConfig], Resolved[Recipe]],
) -> tuple[Resolved[TrainConfig], Resolved[Recipe]]:
    """Return the stored settings of the run with the changes that ``asked`` makes.

    Raises:
        ConfigError: it changes a setting that decides the result of the run.
    """
    old, new = stored[0].value, asked[0].value
    # If the run chose its micro-batch, the checkpoint stores the size: an earlier version had another default.
    is_open = old.micro_batch < 0 or not stored[0].is_given("micro_batch")
    left_out = {"resume", "name", "project", "recipe", "set"}
    # measured when the run began
    left_out |= {"batch"} if new.batch < 0 else set()
    # as typed for the first start, which had fewer images
    is_limited = stored[0].sources["batch"].endswith(OF_IMAGES)
    left_out |= {"batch"} if is_limited and new.batch > old.batch else set()
    left_out |= {"micro_batch"} if new.micro_batch < 0 and not is_open else set()

    def is_fixed(name: str, was: Any, now: Any) -> bool:
        fixed = rules_of(TrainConfig.model_fields[name]).fixed
        return not (name == "micro_batch" and is_open) and (
            fixed(old, was, now) if callable(fixed) else fixed
        )

    usual = Owner(
        "run",
        found.config,
        f"start a new run with --weights {quoted(f'{found.where}/weights/last.safetensors')}",
    )
    merged = continued(stored[0], asked[0], usual, is_fixed, left_out)
    values, sources, notes = dict(merged.value), dict(merged.sources), list(merged.notes)
    # what a recipe chose stays, also where this version would choose another value
    sources |= {
        k: f"{FIRST_START}, {source}" for k, source in sources.items() if source.startswith("recipe ")
    }
    for name, source in asked[1].sources.items():
        chosen = asked[0].is_given("recipe") or not source.startswith((DEFAULT, "recipe "))
        now = getattr(asked[1].value, name)
        # a list may have hyperparameters of other families, which the run does not have
        was = getattr(stored[1].value, name, now if is_listed(source) else "")
        if chosen and was != now:
            raise usual.fixed(f"{name} {shown(now)}", shown(was), source)
    if old.checkpoint_to and not new.checkpoint_to and _without_slash(old.checkpoint_to) != found.resume:
        again = _again("checkpoint_to", old.checkpoint_to)
        notes.append(f"the run is no longer copied to {shown(old.checkpoint_to)}; to go on: {again}")
    if old.checkpoint_to and _without_slash(new.checkpoint_to) == _without_slash(old.checkpoint_to):
        sources["checkpoint_to"] = FIRST_START
    if is_address(found.resume):
        is_named = asked[0].is_given("name") or new.resume == "auto"
        values["name"] = new.name if is_named else found.resume.rpartition("/")[2]
        values |= {"project": new.project, "exist_ok": new.exist_ok}
        if not new.checkpoint_to:
            values["checkpoint_to"], sources["checkpoint_to"] = found.resume, asked[0].sources["resume"]
    elif new.resume != "auto":  # which looks for runs of this name and project
        folder = found.folder.resolve()
        moved = {
            "name": new.name != folder.name,
            "project": new.project is not None and new.project.resolve() != folder.parent,
        }
        for name in (name for name, is_other in moved.items() if is_other and asked[0].is_given(name)):
            notes.append(f"--{name} is ignored: a resumed run stays in its folder {found.folder}")
    values["resume"], sources["resume"] = found.resume, asked[0].sources["resume"]
    return Resolved(TrainConfig.model_validate(values), sources, tuple(notes)), replace(
        stored[1], sources=_sources_then(stored[1])
    )


@dataclass(frozen=True)
class Owner:
    """What a resume goes on with, in messages.

    Attributes:
        kind: run or study; config: the path of its ``config.yaml``.
        instead: what to do to change a setting that cannot change.
        code: settings whose code it cannot go on without.
    """

    kind: str
    config: str
    instead: str
    code: tuple[str, ...] = ("recipe_class", "optimizer")

    def fixed(self, now: str, was: str, source: str) -> ConfigError:
        return ConfigError(
            f"{now} differs from the {self.kind}'s {was}, and a resumed {self.kind} cannot change it",
            source=f"{source}; the {self.kind}'s: {self.config}",
            hint=f"leave it out, or {self.instead}",
        )


def continued(
    stored: Resolved[Work],
    asked: Resolved[Work],
    owner: Owner,
    is_fixed: Callable[[str, Any, Any], bool],
    left_out: Collection[str],
) -> Resolved[Work]:
    """Return the settings of a run or a study with those of the command that resumes it. Each change gives a note.

    Args:
        is_fixed: whether a setting cannot change, by its name, its former value and the new one.
        left_out: settings that the caller merges.

    Raises:
        ConfigError: a setting cannot change, or the command does not name the code again.
    """
    old, new = stored.value, asked.value
    values, sources = dict[str, Any](old), _sources_then(stored)
    notes = [*asked.notes, *(f"{owner.config}: {note}" for note in stored.notes)]
    for name, field in type(old).model_fields.items():
        was, now, flag = getattr(old, name), getattr(new, name), flag_of(name, field)
        if not may_be_in_files(field, was):
            if was and (lost := _not_kept(name, was, new, owner)):
                notes.append(lost)
            values[name] = tuple(logger_names(old)) if name == "log" else field.default
            sources[name] = sources[name] if name == "log" else DEFAULT
        if not asked.is_given(name) or name in left_out:
            continue
        if was != now and is_fixed(name, was, now):
            raise owner.fixed(f"{flag} {value_text(now)}", value_text(was), asked.sources[name])
        if was != now and rules_of(field).in_files is not False:
            notes.append(f"{flag} changes from {value_text(was)} to {value_text(now)}")
        values[name], sources[name] = now, asked.sources[name]
    if (new.hosts or new.fleet) and not asked.is_given("device"):  # each host has its own devices
        values["device"], sources["device"] = new.device, DEFAULT
    return Resolved(type(old).model_validate(values), sources, tuple(notes))


def _sources_then(stored: Resolved[Any]) -> dict[str, str]:
    """Return the sources of the settings of a run, whose command line is not that of the resume.

    That of the data set is never what the run folder says, because a folder of somebody else could pretend that it was typed.
    """
    return {
        name: FIRST_START if source == COMMAND_LINE or name == "data" else source
        for name, source in stored.sources.items()
    }


def _not_kept(name: str, was: Any, new: RunSettings, owner: Owner) -> str:
    """Return a note about a value that a file may not choose and the command does not repeat; "" for none.

    Raises:
        ConfigError: the run cannot go on without it.
    """
    is_named = bool(new.optimizer_class if name == "optimizer" else getattr(new, name))
    again = _again(name, was)
    if name in ("hosts", "fleet"):
        return f"{name}: {shown(was)} of {owner.config} is ignored"
    if name == "log" and not servers_of(new):
        return f"figures are not sent to the server of the run; to send them: {again}"
    if name in owner.code and not is_named:
        raise ConfigError(
            f"the {owner.kind} uses the code {value_text(was)}, and a resume loads only code that you name again",
            source=owner.config,
            hint=again,
        )
    if name == "callbacks" and not is_named:
        return f"the callbacks of the run are not loaded again; to use them: {again}"
    return ""


def _again(name: str, value: Any) -> str:
    flag = flag_of(name, TrainConfig.model_fields[name])
    return " ".join(f"{flag} {quoted(one)}" for one in (value if isinstance(value, tuple) else (value,)))


def _without_slash(address: str) -> str:
    return address.removesuffix("/")
