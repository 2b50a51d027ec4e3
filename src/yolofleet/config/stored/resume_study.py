"""Find the study that ``yolofleet tune --resume`` names, and merge its settings with those of the command line."""

from __future__ import annotations

from pathlib import Path

from yolofleet.config.resolve import Resolved, with_values
from yolofleet.config.schema.measure import TuneConfig
from yolofleet.config.stored.resume import Owner, continued, saved_at_ns
from yolofleet.storage.foreign import check_links
from yolofleet.support.errors import ConfigError
from yolofleet.support.text import shown

STUDY = "study.journal"  # in the folder of `yolofleet tune`: the trials and their results
STUDY_MAY_CHANGE = (  # none of them is in the result of a trial or in the choice of the next one
    *("trials", "failures", "device", "hosts", "fleet", "sync_code", "devices_per_trial", "threads"),
    *("workers", "timeout_s", "stall_s", "preempt_notice", "restarts"),
    *("log", "quiet"),
)


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
    owner = Owner(
        "study", str(folder / "config.yaml"), "start a new study", ("recipe_class", "optimizer", "callbacks")
    )
    merged = continued(
        stored, asked, owner, lambda name, _was, _now: name not in STUDY_MAY_CHANGE, ("resume", "project")
    )
    return with_values(merged, {"resume": str(folder)}, {"resume": asked.sources["resume"]})
