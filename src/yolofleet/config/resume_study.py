"""Find the study that ``yolofleet tune --resume`` names, and merge its settings with those of the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from yolofleet.config.loggers import logger_names, servers_of
from yolofleet.config.resolve import DEFAULT, Resolved
from yolofleet.config.resume import saved_at_ns, server_note
from yolofleet.config.schema import flag_of, may_be_in_files
from yolofleet.config.schema.measure import TuneConfig
from yolofleet.storage.foreign import check_links
from yolofleet.support.errors import ConfigError
from yolofleet.support.text import shown

STUDY = "study.journal"  # in the folder of `yolofleet tune`: the trials and their results
STUDY_MAY_CHANGE = (  # none of them is in the result of a trial or in the choice of the next one
    *("trials", "failures", "device", "hosts", "fleet", "sync_code", "devices_per_trial", "threads"),
    *("workers", "timeout_s", "stall_s", "preempt_notice", "restarts"),
    *("log", "quiet"),
)


def _names_code(name: str, value: Any) -> bool:
    return bool(value) and not may_be_in_files(TuneConfig.model_fields[name], value)


def find_study(config: TuneConfig) -> Path:
    """Return the folder of the study that ``--resume`` names. Raise ConfigError if there is none, or a link leads out of it."""
    project = config.project or Path("runs") / "tune"
    if config.resume == "auto":
        files = [file for file in project.glob(f"*/{STUDY}") if not file.parent.is_symlink()]
        found = [(saved_at_ns(file), file.parent) for file in files]
        if not found:
            raise ConfigError(
                f"--resume auto: no study in {project}", hint="--resume FOLDER goes on with a study elsewhere"
            )
        folder = max(found)[1]
    else:
        folder = Path(config.resume)
    if not (folder / STUDY).is_file() or not (folder / "config.yaml").is_file():
        raise ConfigError(
            f"--resume {shown(config.resume)} is not the folder of a study (it has no config.yaml or no {STUDY})",
            hint="--resume auto goes on with the newest study; without --resume a new one begins",
        )
    check_links(folder)
    return folder


def continue_study(
    folder: Path, stored: Resolved[TuneConfig], asked: Resolved[TuneConfig]
) -> Resolved[TuneConfig]:
    """Return the stored settings of a study with the changes that ``asked`` makes.

    Raises:
        ConfigError: it changes a setting that decides the trials or their results.
    """
    values: dict[str, Any] = {name: getattr(stored.value, name) for name in TuneConfig.model_fields}
    sources, notes = dict(stored.sources), [f"{folder / 'config.yaml'}: {note}" for note in stored.notes]
    code = [name for name in ("recipe_class", "optimizer", "callbacks") if _names_code(name, values[name])]
    for name in code:
        was, flag = values[name], flag_of(name, TuneConfig.model_fields[name])
        if was != getattr(asked.value, name):
            names = [shown(one) for one in (was if isinstance(was, tuple) else (was,))]
            raise ConfigError(
                f"the study uses the code {', '.join(names)}, and a resume loads only code that you name again",
                source=str(folder / "config.yaml"),
                hint=" ".join(f"{flag} {one}" for one in names),
            )
    for name, field in TuneConfig.model_fields.items():
        if name in code:
            continue
        if not may_be_in_files(field, values[name]):
            if name in ("hosts", "fleet") and values[name]:
                notes.append(f"{name}: {shown(values[name])} of {folder / 'config.yaml'} is ignored")
            if name == "log" and not servers_of(asked.value):
                notes.append(server_note(values[name]))
            values[name] = tuple(logger_names(stored.value)) if name == "log" else field.default
            sources[name] = sources[name] if name == "log" else DEFAULT
        if not asked.is_given(name) or name in ("resume", "project"):
            continue
        was, now = values[name], getattr(asked.value, name)
        if was != now and name not in STUDY_MAY_CHANGE:
            raise ConfigError(
                f"{flag_of(name, field)} {shown(now)} differs from the study's {shown(was)}, and a resumed study cannot "
                "change it",
                source=f"{asked.sources[name]}; the study's: {folder / 'config.yaml'}",
                hint="leave it out, or start a new study",
            )
        values[name], sources[name] = now, asked.sources[name]
    if (values["hosts"] or values["fleet"]) and not asked.is_given("device"):  # each host has its own devices
        values["device"], sources["device"] = asked.value.device, DEFAULT
    values["resume"], sources["resume"] = str(folder), asked.sources["resume"]
    return Resolved(TuneConfig.model_validate(values), sources, tuple(notes))
