"""Compare the prediction for a run with what happened, from the files of its folder: ``yolofleet plan compare``."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from yolofleet.config.load import load_config_yaml
from yolofleet.errors import DataError
from yolofleet.files.foreign import read_foreign_text
from yolofleet.plan.candidates import Planned, data_facts, probe_of_host, probe_path
from yolofleet.plan.forecast import Forecast
from yolofleet.plan.library import network_of, network_of_weights
from yolofleet.plan.probe import MOST_ERRORS, PastError, Probe, read_probe
from yolofleet.report.console import duration
from yolofleet.report.folder import RunFolder
from yolofleet.report.results import MAX_BYTES, ResultsTable

COLUMNS = ("", "predicted", "likely", "happened", "error")
WAITS = 0.1  # share of a step: if ranks wait less for the loader, it does not bind, as in the formula


@dataclass(frozen=True)
class Comparison:
    """A prediction, and the figures of the run.

    Attributes:
        happened: images_per_s, val_s and run_s; NaN = unknown.
        binds: what limited the run, by the shares in results.csv.
        sources: origins of the probes; kept: files in which the error is now stored.
    """

    forecast: Forecast
    happened: Mapping[str, float]
    binds: str
    sources: Sequence[str]
    kept: Sequence[str]

    @property
    def predicted_binds(self) -> str:
        return self.forecast.binds

    def _predicted(self) -> dict[str, tuple[float, float, float]]:
        """Return (fast, likely, slow) by name."""
        every = (self.forecast.fast, self.forecast.likely, self.forecast.slow)
        return {
            "images_per_s": (every[0].rate_img_s, every[1].rate_img_s, every[2].rate_img_s),
            "val_s": (every[0].validation, every[1].validation, every[2].validation),
            "run_s": (every[0].run, every[1].run, every[2].run),
        }

    def rows(self) -> list[list[str]]:
        """Return the rows under ``COLUMNS``."""
        found = []
        for name, (fast, likely, slow) in self._predicted().items():
            show = (lambda value: f"{value:.4g}") if name == "images_per_s" else duration
            real = self.happened[name]
            known = not math.isnan(real)
            found.append(
                [
                    {"images_per_s": "images/s", "val_s": "a validation", "run_s": "the run"}[name],
                    f"{show(min(fast, slow))} to {show(max(fast, slow))}",
                    show(likely),
                    show(real) if known else "-",
                    f"{likely / real - 1:+.0%}" if known else "-",
                ]
            )
        return found

    def figures(self) -> dict[str, Any]:
        """Return values for JSON."""
        return {
            "predicted": {name: likely for name, (_, likely, _) in self._predicted().items()},
            "happened": {name: None if math.isnan(value) else value for name, value in self.happened.items()},
            "predicted_binds": self.predicted_binds,
            "binds": self.binds,
            "kept": list(self.kept),
        }


def compare(run: Path, probes: Sequence[Path], *, keep: bool) -> Comparison:
    """Return the comparison for a finished run, and keep its error in the probes if ``keep``.

    Raises:
        ConfigError: no configuration, no probe. DataError: the run has no figures yet.
        CheckpointError: the run began from weights alone, and its own weights cannot be read.
        StorageError: a probe cannot be written.
    """
    folder = RunFolder(run)
    config = load_config_yaml(folder.config)[0].value
    rows = ResultsTable(folder.results_csv, []).rows()
    fleet = _fleet(folder)
    rates = _column(rows[1:] or rows, "images_per_s")
    if not rates:
        raise DataError(
            f"{run} has no rate to compare with: {len(rows)} epochs in results.csv",
            source=str(folder.results_csv),
            hint="compare a run of more steps: its first five do not count",
        )
    files = {path: read_probe(path) for path in probes}
    measured: list[tuple[Probe, int]] = []
    used: dict[Path, Probe] = {}
    for host in fleet.hosts:
        probe = probe_of_host(host, list(files.values()))
        path = next((path for path, given in files.items() if given is probe), probe_path(host))
        used[path] = probe
        measured.append((probe, max(fleet.processes // len(fleet.hosts), 1)))
    named = (
        config.cfg or config.model
    )  # a run from weights alone has the network of the weights that it wrote
    network = network_of(named) if named else network_of_weights(folder.weights / "last.safetensors")
    planned = Planned(config, data_facts(config), network)
    forecast = planned.measured(run.name, measured)
    validations = _column(rows[1:] or rows, "val_seconds")
    happened = {
        "images_per_s": statistics.median(rates),
        "val_s": statistics.median(validations) if validations else math.nan,
        "run_s": fleet.run_s,
    }
    if keep:
        error = PastError(
            run=run.name, predicted=forecast.likely.rate_img_s, happened=happened["images_per_s"]
        )
        for path, probe in used.items():
            probe.model_copy(update={"errors": (*probe.errors, error)[-MOST_ERRORS:]}).write(path)
    return Comparison(
        forecast,
        happened,
        _binds(rows[1:] or rows),
        [probe.host for probe, _ in measured],
        [str(p) for p in used] * keep,
    )


@dataclass(frozen=True)
class _Fleet:
    hosts: Sequence[str]
    processes: int
    run_s: float


def _fleet(folder: RunFolder) -> _Fleet:
    """Return the hosts and processes of a finished run, and its seconds.

    Raises:
        DataError: ``results.json`` is missing or has another form.
    """
    try:
        found = json.loads(read_foreign_text(folder.results_json, limit_bytes=MAX_BYTES))
        hosts, processes = found["fleet"]["hosts"], found["fleet"]["processes"]
        seconds = float(sum(found["seconds"].values()))
        if not (isinstance(hosts, list) and hosts and isinstance(processes, int) and processes > 0):
            raise ValueError("no hosts or processes")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as problem:
        raise DataError(
            f"{folder.results_json} cannot be used: {type(problem).__name__}: {problem}",
            hint="name the folder of a training that has ended",
        ) from None
    return _Fleet([str(host) for host in hosts], processes, seconds)


def _column(rows: Sequence[Mapping[str, str]], name: str) -> list[float]:
    found = []
    for row in rows:
        try:
            found.append(float(row.get(name) or "nan"))
        except ValueError:
            continue
    return [value for value in found if math.isfinite(value) and value > 0]


def _binds(rows: Sequence[Mapping[str, str]]) -> str:
    """Return the part with the largest share of the training time; the loader if it took a tenth."""
    shares = {
        name: statistics.median(_column(rows, column) or [0.0])
        for name, column in (
            ("loader", "data_share"),
            ("network", "compute_share"),
            ("all-reduce", "comm_share"),
        )
    }
    return "loader" if shares["loader"] >= WAITS else max(shares, key=lambda name: shares[name])
