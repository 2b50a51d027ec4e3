"""Read the files of a run folder as values for its report. No torch; a file that is missing leaves its part out.

The folder may be of unknown origin, so :func:`plain` turns every value for a page into text, a number, or a list of them.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from yolofleet.config.resolve import DEFAULT, Resolved
from yolofleet.config.stored.job import load_job
from yolofleet.runs.report.clock import PHASES
from yolofleet.runs.report.folder import RunFolder
from yolofleet.runs.report.results import MAX_BYTES, MOST_COLUMNS, OF_BOXES, Judgement, number, read_rows
from yolofleet.runs.report.results import MOST_ROWS as MOST_TABLE_ROWS
from yolofleet.storage.foreign import read_foreign, read_foreign_text
from yolofleet.support.errors import ConfigError, StorageError
from yolofleet.support.text import screen_line

MOST_ROWS = 2000  # rows of results.csv; a longer table is thinned out
MOST_DEPTH = 12  # depth of nested values


class Limits(NamedTuple):
    """What a reader of run folders accepts: the largest files, and whether it follows symbolic links."""

    events_bytes: int = 256 << 20
    figures_bytes: int = 64 << 20
    table_bytes: int = MAX_BYTES
    table_rows: int = MOST_TABLE_ROWS
    follow: bool = True


REPORT = Limits()


def read_run(folder: RunFolder, limits: Limits = REPORT) -> dict[str, Any]:
    """Return all values of a run folder for its report.

    Raises:
        ConfigError: it is not the folder of a training or a validation.
    """
    run = read_progress(folder, limits) | {"figures": read_figures(folder, limits)}
    if not (folder.config.is_file() or run["curves"] or run["curves_problem"] or run["figures"]):
        raise ConfigError(
            f"{screen_line(folder.path)} is not the folder of a run",
            hint="name the folder of a training or a validation, such as runs/train/exp",
        )
    return run


def read_progress(
    folder: RunFolder, limits: Limits = REPORT, settings: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the values of :func:`read_run` that change while a run goes on: all but the figures of a validation.

    Args:
        settings: of :func:`read_settings`, if they are known.
    """
    rows, problem = list[dict[str, str]](), ""
    try:
        rows = results_rows(folder, limits)
    except StorageError as damage:
        problem = damage.what
    events = _of_this_run(read_events(folder.events(0), limits))
    # a run that was resumed after its end still has the earlier results
    kinds = [kind for event in events if (kind := event.get("kind")) in ("start", "end")]
    is_open = bool(events) and kinds[-1:] != ["end"]
    finished = {} if is_open else read_json(folder.results_json, limits)
    task = judgement_of(folder, limits)
    best = best_of(rows, task)
    results = finished or _results_so_far(rows, events, best, task)
    settings = settings or read_settings(folder, limits)
    return {
        "name": folder.name,
        "folder": folder.shown if "://" in folder.shown else str(folder.path.absolute()),
        "verb": settings["verb"] or "train",
        "finished": bool(finished),
        "best": best,
        "task": {**task.stored(), "main": task.main},
        "results": {name: results[name] for name in _RESULTS if name in results},
        "curves": _curves(rows),
        "curves_problem": problem,
        "settings": settings,
        "inputs": inputs_of(events),
        "timeline": timeline_of(events, read_events(folder.launcher_events, limits)),
    }


def inputs_of(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the starts of a run say of its start weights (``weights``), which the first one has read, and of its data and kernels."""
    found: dict[str, Any] = {}
    for event in events:
        if event.get("kind") == "start":
            found |= {"weights": None, **event, **({"weights": found["weights"]} if found else {})}
    known = {name: found.get(name) for name in ("weights", "data", "data_images", "kernels")}
    return {name: value for name, value in known.items() if isinstance(value, dict)}


def judgement_of(folder: RunFolder, limits: Limits = REPORT) -> Judgement:
    """Return the figures of the task of a run; those of boxes if it says none, as runs of older versions."""
    for path in (folder.status, folder.results_json):
        with suppress(LookupError, TypeError, ValueError, AttributeError):
            task = read_json(path, limits)["task"]
            columns, of_class = (
                {str(column): str(figure) for column, figure in task[name].items()}
                for name in ("columns", "of_class")
            )
            fitness_of = {str(figure): float(weight) for figure, weight in task["fitness_of"].items()}
            if fitness_of and len(columns) <= MOST_COLUMNS:
                return Judgement(columns, of_class, fitness_of)
    return OF_BOXES


def metrics_of(row: Mapping[str, str], task: Judgement) -> dict[str, float | None]:
    """Return the figures of a validation in a row, by their names in results.json; empty without a validation."""
    found = {figure: number(row.get(column)) for column, figure in task.columns.items()}
    return found if any(value is not None for value in found.values()) else {}


def best_of(rows: Sequence[Mapping[str, str]], task: Judgement) -> dict[str, float]:
    """Return epoch, main figure and fitness of the best weights, chosen as the training does; empty without a validation."""
    best: dict[str, float] = {}
    for row in rows:
        epoch, figures = number(row.get("epoch")), metrics_of(row, task)
        main = figures.get(task.main)
        if epoch is None or main is None:
            continue
        fitness = task.fitness(figures)
        if not best or fitness > best["fitness"] or fitness == best["fitness"] == 0:
            best = {"epoch": int(epoch), "main": main, "fitness": fitness}
    return best


def _results_so_far(
    rows: Sequence[Mapping[str, str]],
    events: Sequence[Mapping[str, Any]],
    best: Mapping[str, float],
    task: Judgement,
) -> dict[str, Any]:
    """Return the values of results.json for a run that has not written it: from results.csv and the events."""
    found: dict[str, Any] = {"best": best} if best else {}
    if validated := [figures for row in rows if (figures := metrics_of(row, task))]:
        found["metrics"] = validated[-1]
    if rows:
        found |= {"steps": number(rows[-1].get("step")), "images_seen": number(rows[-1].get("images"))}
        found["seconds"] = {"epochs": sum(number(row.get("seconds")) or 0.0 for row in rows)}
    starts = [event for event in events if event.get("kind") == "start"]
    if starts:
        known = [event["versions"] for event in starts if isinstance(event.get("versions"), dict)]
        hosts = [event["hosts"] for event in events if isinstance(event.get("hosts"), list)]
        kernels = starts[-1].get("kernels")
        found["versions"] = next((one for one in reversed(known) if one), {})
        found["fleet"] = {
            "processes": starts[-1].get("world"),
            "device": kernels.get("device") if isinstance(kernels, dict) else None,
            "hosts": sorted({str(host) for host in (hosts[-1] if hosts else [starts[-1].get("host", "")])}),
        }
    return found


_RESULTS = (
    *("metrics", "weights_sha256", "best", "steps", "images_seen", "fleet"),
    *("versions", "seconds", "images"),
)


def mapping(value: Any) -> Mapping[str, Any]:
    """Return a value of unknown origin if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def plain(value: Any, depth: int = 0) -> Any:
    """Return ``value`` as JSON types without control characters; NaN, infinity and whatever is too deep become None."""
    if depth > MOST_DEPTH:
        return None
    if isinstance(value, Mapping):
        return {screen_line(key): plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, depth + 1) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int)):
        return value
    return screen_line(value)


def _loads(text: str) -> Any:
    """Return parsed JSON; numbers that are not finite, or too large to calculate with, become None."""
    return json.loads(text, parse_int=number, parse_float=number, parse_constant=lambda _: None)


def read_json(path: Path, limits: Limits = REPORT) -> dict[str, Any]:
    """Return the object in a file; empty if the file is missing or is not JSON."""
    if path.parent.is_symlink() and not limits.follow:
        return {}
    with suppress(OSError, ValueError, RecursionError):
        found = _loads(read_foreign_text(path, limit_bytes=limits.figures_bytes, follow=limits.follow))
        if isinstance(found, dict):
            return found
    return {}


def read_figures(folder: RunFolder, limits: Limits = REPORT) -> dict[str, Any]:
    """Return ``report.json`` without parts that are no list or mapping as :mod:`figures` writes them."""
    found = read_json(folder.report_json, limits)
    kept = {name: found[name] for name in _LISTS if isinstance(found.get(name), list)}
    kept |= {name: found[name] for name in _MAPPINGS if isinstance(found.get(name), dict)}
    kept["images"] = [image for image in kept.get("images", ()) if isinstance(image, dict)]
    return kept if found else {}


_LISTS = ("names", "notes", "images", "worst", "others")
_MAPPINGS = ("labels", "metrics", "per_class", "losses", "curves", "confusion", "errors")


def read_events(path: Path, limits: Limits = REPORT) -> list[dict[str, Any]]:
    """Return the events of rank 0 in their order; without lines that a crash has cut."""
    events = []
    if path.parent.is_symlink() and not limits.follow:
        return []
    with suppress(OSError, ValueError):
        content = read_foreign(path, limit_bytes=limits.events_bytes, follow=limits.follow)
        for line in content.split(b"\n"):
            with suppress(ValueError, RecursionError):
                event = _loads(line.decode())
                if isinstance(event, dict) and isinstance(event.get("time"), (int, float)):
                    events.append(event)
    return events


def _of_this_run(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events since the last start at step 0: ``--exist-ok`` may add a run to the file of another."""
    fresh = [at for at, event in enumerate(events) if event.get("kind") == "start" and not event.get("step")]
    return list(events[fresh[-1] if fresh else 0 :])


def results_rows(folder: RunFolder, limits: Limits = REPORT) -> list[dict[str, str]]:
    """Return the rows of results.csv as text. Raise StorageError if the file is damaged."""
    table = folder.results_csv
    return read_rows(table, limit_bytes=limits.table_bytes, most_rows=limits.table_rows, follow=limits.follow)


def _curves(rows: Sequence[dict[str, str]]) -> dict[str, list[float | None]]:
    """Return the columns of results.csv."""
    rows = [*rows[: -1 : -(-len(rows) // MOST_ROWS)], rows[-1]] if rows else []
    table = {name: [number(row.get(name)) for row in rows] for name in (rows[0] if rows else ()) if name}
    return {name: values for name, values in table.items() if any(value is not None for value in values)}


def read_settings(folder: RunFolder, limits: Limits = REPORT) -> dict[str, Any]:
    """Return the settings and the recipe as [name, value, source, is given]; ``problem`` if they cannot be read."""

    def table(resolved: Resolved[Any]) -> list[list[Any]]:
        values = resolved.value.model_dump(mode="json")
        return [
            [name, _text(values[name]), source, not source.endswith(_NOT_GIVEN)]
            for name, source in resolved.sources.items()
        ]

    try:
        job = load_job(folder.config, follow=limits.follow)
    except ConfigError as problem:  # for example, another version wrote the file
        return {"verb": "", "settings": [], "recipe": [], "problem": problem.what}
    recipe = [] if job.recipe is None else table(job.recipe)
    return {"verb": job.verb, "settings": table(job.config), "recipe": recipe, "problem": ""}


_NOT_GIVEN = (DEFAULT, f"({DEFAULT})")  # ends of sources


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value))
    return "" if value is None else str(value).lower() if isinstance(value, bool) else f"{value}"


MOST_SPANS = 120  # bars of the time line; adjacent epochs are added up to stay below it
MOST_RANKS = 64  # ranks in the time line


def timeline_of(
    events: Sequence[Mapping[str, Any]], of_launcher: Sequence[Mapping[str, Any]]
) -> dict[str, Any] | None:
    """Return the starts, the phases of every rank in each epoch, and what else happened; None without epochs.

    Times are seconds from the first start. An epoch's times are sums: the order of phases within it is not recorded.
    """
    starts = [event for event in events if event.get("kind") == "start"]
    phases = [event for event in events if event.get("kind") == "phases" and _is_table(event.get("seconds"))]
    if not starts:
        return None
    began_s = starts[0]["time"] - (number(starts[0].get("start_s")) or 0)
    events = sorted([*events, *of_launcher], key=lambda event: event["time"])
    events = [event for event in events if event["time"] >= began_s]
    attempts = [
        {
            "from_s": max(event["time"] - (number(event.get("start_s")) or 0) - began_s, 0),
            "to_s": event["time"] - began_s,
            "restarts": event.get("restarts"),
            "processes": event.get("world"),
            "step": event.get("step"),
        }
        for event in starts
    ]
    spans, ends_s = [], 0.0
    for event in phases:
        at_s = event["time"] - began_s
        latest = max((a["to_s"] for a in attempts if a["to_s"] <= at_s), default=0.0)
        from_s = max(ends_s, latest)  # a resumed epoch also counts seconds of the attempt before
        spans.append(
            {
                "from_s": from_s,
                "to_s": max(at_s, from_s),
                "epoch": event.get("epoch"),
                "seconds": event["seconds"],
            }
        )
        ends_s = spans[-1]["to_s"]
    hosts: list[Any] = next(
        (event["hosts"] for event in reversed(phases) if isinstance(event.get("hosts"), list)), []
    )
    ranks = _ranks(phases, hosts)
    shown = sorted(ranks, key=lambda rank: (-rank["slowest_epochs"], rank["seconds"]["comm"]))[:MOST_RANKS]
    order = sorted(rank["rank"] for rank in shown)
    return {
        "phases": list(PHASES),
        "attempts": attempts,
        "ends_s": max([ends_s, *(event["time"] - began_s for event in events)]),
        "ranks": [ranks[rank] for rank in order],
        "ranks_in_all": len(ranks),
        "spans": [_of_ranks(span, order) for span in _merged(spans)],
        "marks": [
            {"at_s": event["time"] - began_s, "kind": kind, "text": text.format_map(defaultdict(str, event))}
            for event in events
            if (text := _MARKS.get(kind := str(event.get("kind"))))
        ][:200],
    }


_MARKS = {
    "restart": "started again after step {step}: {why}",
    "host_left": "{host} was left out: {why}",
    "host_joined": "{host} takes part",
    "rollback": "back to the checkpoint of step {step}: {why}",
    "ends_in_time": "the minutes end after step {last_step}",
    "out_of_patience": "ended after epoch {epoch} by --patience; epoch {best_epoch} is the best",
    "end": "finished after step {step}",
    "changed_data": "the run went on with another data set: {why}",
    "unreadable": "an image was replaced: {why}",
    "shares": "{why}",
}


def _is_table(value: Any) -> bool:
    """Return whether the value has one number for each phase of each rank."""
    return isinstance(value, list) and all(
        isinstance(row, list) and len(row) == len(PHASES) and all(isinstance(v, (int, float)) for v in row)
        for row in value
    )


def _ranks(phases: Sequence[Mapping[str, Any]], hosts: Sequence[Any]) -> list[dict[str, Any]]:
    """Return for each rank its host, its seconds by phase, and in how many epochs the others waited for it.

    ``waited_s`` is how long the rank that waited most waited for it in these epochs.
    """
    count = max((len(event["seconds"]) for event in phases), default=0)
    ranks: list[dict[str, Any]] = [
        {
            "rank": rank,
            "host": str(hosts[rank]) if rank < len(hosts) else "",
            "seconds": dict.fromkeys(PHASES, 0.0),
            "slowest_epochs": 0,
            "waited_s": 0.0,
        }
        for rank in range(count)
    ]
    comm = PHASES.index("comm")
    for event in phases:
        table = event["seconds"]
        for rank, row in enumerate(table):
            for phase, seconds in zip(PHASES, row, strict=True):
                ranks[rank]["seconds"][phase] += seconds
        if len(table) > 1:
            waits = [row[comm] for row in table]
            slowest = min(range(len(table)), key=waits.__getitem__)
            ranks[slowest]["slowest_epochs"] += 1
            ranks[slowest]["waited_s"] += max(waits) - waits[slowest]
    return ranks


def _merged(spans: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return at most about ``MOST_SPANS`` spans: adjacent epochs without a pause between them are added up."""
    size, merged = -(-len(spans) // MOST_SPANS) or 1, list[dict[str, Any]]()
    for place, span in enumerate(spans):
        last = merged[-1] if merged else None
        if (
            last is None
            or place % size == 0
            or span["from_s"] > last["to_s"]
            or len(span["seconds"]) != len(last["seconds"])
        ):
            merged.append({**span, "epochs": 1})
            continue
        table = zip(last["seconds"], span["seconds"], strict=True)
        added = [[a + b for a, b in zip(mine, more, strict=True)] for mine, more in table]
        last |= {"to_s": span["to_s"], "epochs": last["epochs"] + 1, "seconds": added}
    return merged


def _of_ranks(span: Mapping[str, Any], order: Sequence[int]) -> dict[str, Any]:
    """Return the span with the rows of some ranks, rounded; None for a rank that did not take part."""
    table = span["seconds"]
    chosen = [[round(s, 3) for s in table[rank]] if rank < len(table) else None for rank in order]
    return {**span, "from_s": round(span["from_s"], 3), "to_s": round(span["to_s"], 3), "seconds": chosen}
