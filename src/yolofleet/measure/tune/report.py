"""The files of a study: the table of its trials, the best recipe, the figures and the picture."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from yolofleet.config.resume_study import STUDY
from yolofleet.config.schema import Recipe
from yolofleet.config.yaml_lines import write_yaml
from yolofleet.measure.tune.study import Study, Trial, best_of
from yolofleet.runs.report.folder import Inside, RunFolder
from yolofleet.runs.report.results import read_rows
from yolofleet.support.files.atomic import write_csv, write_json, write_text


@dataclass(frozen=True)
class TuneFolder:
    """The folder of a study, and the paths in it.

    Attributes:
        resume_options: options that the command which resumes the study must repeat, because its files do not store them.
    """

    path: Path
    resume_options: tuple[str, ...] = ()

    config = Inside("config.yaml")
    journal = Inside(STUDY)
    space = Inside("space.yaml")
    recipe = Inside("recipe.yaml")  # the recipe that the trials change
    best = Inside("best.yaml")
    table = Inside("trials.csv")
    picture = Inside("tune.png")
    results = Inside("results.json")
    logs = Inside("logs")

    def trial(self, number: int) -> RunFolder:
        return RunFolder(self.path / "trials" / f"{number:04}")

    @property
    def resume_command(self) -> str:
        return shlex.join(["yolofleet", "tune", "--resume", str(self.path), *self.resume_options])


def write_figures(folder: TuneFolder, trials: Sequence[Trial], recipe: Recipe, study: Study) -> None:
    """Write ``trials.csv``, ``results.json`` and, when a trial is complete, ``best.yaml``.

    Args:
        recipe: the one that the trials change.
    Raises:
        StorageError: a file cannot be written.
    """
    names = list(study.space)
    rows: list[list[object]] = [["trial", "state", "fitness", "epochs", "seconds", "reason", *names]]
    for trial in trials:
        result, curve = trial.result, trial.result.curve
        values = {**recipe.model_dump(), **trial.values}
        rows.append(
            [
                trial.number,
                result.state,
                "" if result.fitness is None else f"{result.fitness:.6g}",
                max(curve, default=0),
                f"{_seconds(folder, trial):.1f}",
                result.reason,
                *(values[name] for name in names),
            ]
        )
    write_csv(folder.table, rows)
    best, default = best_of(trials), trials[0].result.fitness
    if best is None:
        return
    own = "failed" if default is None else f"{default:.6g}"
    heading = (
        f"# The best recipe of {len(trials)} trials of yolofleet tune: trial {best.number}, fitness {best.result.fitness:.6g}.\n"
        f"# Fitness of the recipe that the search began with: {own}.\n"
    )
    write_text(folder.best, heading + write_yaml({**recipe.model_dump(mode="json"), **best.values}))
    write_json(
        folder.results,
        {
            "trials": len(trials),
            "best": {"trial": best.number, "fitness": best.result.fitness, "values": dict(best.values)},
            "recipe_fitness": default,
            "importances": study.importances(),
        },
    )


def _seconds(folder: TuneFolder, trial: Trial) -> float:
    """Return the seconds of the epochs of a trial, on its devices."""
    rows = read_rows(folder.trial(trial.number).results_csv)
    return sum(float(row["seconds"]) for row in rows if row.get("seconds"))


def write_picture(
    folder: TuneFolder,
    trials: Sequence[Trial],
    importances: Mapping[str, float],
    note: Callable[[str], None],
) -> None:
    """Draw the fitness of the trials, the importances, and the fitness over each of the most important values."""
    from yolofleet.runs.report.plots import or_note, plot_tune

    ended = [(trial, trial.result.fitness) for trial in trials if trial.result.fitness is not None]
    names = list(importances) or (list(trials[0].values) if trials else [])
    columns = {
        name: [float(trial.values.get(name, float("nan"))) for trial, _ in ended]
        for name in names
        if not isinstance(ended[0][0].values.get(name), (str, bool))
    }
    fitness = [fitness for _, fitness in ended]
    numbers = [trial.number for trial, _ in ended]
    or_note(note, folder.picture, plot_tune, numbers, fitness, importances, columns, folder.picture)
