"""The runs of a board: where they are, a row for each, and the values of its page. Everything is read when a file has changed.

The folders may be of unknown origin. Only files of known names are read, up to a size, and no symbolic link is followed.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any

from yolofleet.runs.rank_status import RankStatus, parsed_status
from yolofleet.runs.report.fleet_screen import COLUMNS, hangs, most_urgent, rest_line, run_line, slowest_rank
from yolofleet.runs.report.folder import REQUESTS, RunFolder
from yolofleet.runs.report.history import (
    Limits,
    best_of,
    judgement_of,
    plain,
    read_events,
    read_figures,
    read_json,
    read_progress,
    read_settings,
    results_rows,
)
from yolofleet.runs.report.page import with_pictures
from yolofleet.runs.report.results import MOST_WHOLE, number
from yolofleet.storage.atomic import open_append
from yolofleet.storage.foreign import open_foreign, read_foreign
from yolofleet.support.errors import ConfigError, Stopped, StorageError
from yolofleet.support.text import screen_line

LIMITS = Limits(
    events_bytes=32 << 20, figures_bytes=16 << 20, table_bytes=4 << 20, table_rows=20_000, follow=False
)
MOST_RUNS = 200  # the newest ones
MOST_ENTRIES = 100_000  # of all folders that are searched for runs
MOST_IN_FOLDER = 5_000  # entries: a folder of pictures must not use up the search
DEPTH = 4  # runs/tune/exp/trials/001 below runs
SILENT_S = 30.0  # rank 0 writes its status every two seconds
STORED_SILENT_S = 120.0  # the same for a run in a store, whose files are copied now and then
RESTART_S = 180.0  # until another attempt must give a sign of life
QUIET_S = 120.0  # the same for a run without a status: of an older version, or a validation
LINE_BYTES, LINE_LETTERS = 4096, 240
CACHE_BYTES = 128 << 20  # of the values of pages
MOST_RANKS = 64  # whose failures are looked for, and that the page of a run shows
RANKS_BYTES = 8 << 20  # of ranks.json; a rank takes about 300 bytes

PROGRESS = ("config.yaml", "results.csv", "results.json", "events.jsonl", "logs/launcher.events.jsonl")
FIGURES = ("report.json", "plots/train_step0.jpg")
Signature = tuple[tuple[int, int, int] | None, ...]


def signature(folder: Path, names: Sequence[str]) -> Signature:
    """Return a value that changes with the files ``names``; missing files and symbolic links count as None."""
    found: list[tuple[int, int, int] | None] = []
    for name in names:
        kept = None
        with suppress(OSError, ValueError):
            state = (folder / name).lstat()
            if stat.S_ISREG(state.st_mode):
                kept = (state.st_mtime_ns, state.st_size, state.st_ino)
        found.append(kept)
    return tuple(found)


def version(value: Signature) -> str:
    """Return a short text for a signature."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


class Run:
    """One run: its row, and what is known of its files."""

    def __init__(self, path: Path, name: str) -> None:
        self.folder, self.name = RunFolder(path), name
        self._is_stored = "://" in self.folder.shown
        # names the run in addresses, none of which holds a path then
        self.id = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
        self.row: dict[str, Any] = {}  # values of the list
        # versions of the parts of its page; `ranks` is "" if no rank reports now
        self.progress = self.figures = self.ranks = ""
        self.reading = Lock()  # one request at a time reads the values of a page
        self._read = dict[tuple[str, ...], tuple[Signature, Any]]()
        self._status_changed_at_s = 0.0

    def look(self) -> None:
        """Bring the row and the versions up to date."""
        path = self.folder.path
        self.progress, self.figures = version(signature(path, PROGRESS)), version(signature(path, FIGURES))
        status = self._status()
        state, sign = self._state(status)
        table = (
            self._renewed(self._table, "results.csv") or self._renewed(self._results, "results.json") or {}
        )
        runs = state == "running"
        self.ranks = self._ranks_version() if runs else ""
        rate = number(status.get("rate_img_s"), MOST_WHOLE) if runs else None
        values = {
            "id": self.id,
            "name": self.name,
            "folder": self.folder.shown,
            "state": state,
            "sign": sign,
            "phase": status.get("phase") if runs else None,
            "share": 1.0 if state == "ended" else number(status.get("share"), MOST_WHOLE),
            "epoch": number(status.get("epoch"), MOST_WHOLE) or table.get("epoch"),
            "epochs": number(status.get("epochs"), MOST_WHOLE),
            "step": number(status.get("step"), MOST_WHOLE),
            "rate_img_s": table.get("rate") if rate is None else rate,
            "ends_at_s": number(status.get("ends_at_s"), MOST_WHOLE) if runs else None,
            "saved_step": number(status.get("saved_step"), MOST_WHOLE),
            "ranks": number(status.get("ranks"), MOST_WHOLE),
            "best": table.get("best"),
            "best_epoch": table.get("best_epoch"),
            "figure": table.get("figure"),
            "line": self._renewed(self._last_line, "logs/rank-0.log") or "",
            "asked": [kind for kind in REQUESTS if signature(path, [f"logs/{kind}.request"])[0]],
            "may_ask": runs and bool(status) and not self._is_stored,
            "changed_s": round(self._changed_s(), 1),
        }
        self.row = plain(values)

    def ask(self, kind: str) -> None:
        """Ask the run to ``stop`` or to ``save``.

        Raises:
            ConfigError: the run takes no requests. StorageError: the disk refuses.
        """
        self.look()
        if not self.row["may_ask"]:
            raise ConfigError(f"this run takes no requests: {self.row['state']}, {self.row['sign']}")
        try:
            if self.folder.logs.is_symlink():
                raise OSError("logs is a symbolic link")
            open_append(self.folder.request(kind)).close()
        except OSError as problem:
            raise StorageError(f"the disk refuses the request: {problem.strerror or problem}") from None

    def progress_values(self) -> dict[str, Any]:
        """Return the values of the page that change while the run goes on."""
        settings = self._renewed(lambda: read_settings(self.folder, LIMITS), "config.yaml")
        return read_progress(self.folder, LIMITS, settings)

    def figure_values(self) -> dict[str, Any]:
        """Return the figures of the last validation, and pictures."""
        return with_pictures(self.folder, read_figures(self.folder, LIMITS), follow=False)

    def rank_values(self) -> dict[str, Any]:
        """Return what the ranks of a running run do now: a line, a table of the most urgent ranks, a line about the others."""
        ranks: list[RankStatus] = []
        with suppress(OSError, ValueError):
            if self.ranks:
                content = read_foreign(self.folder.ranks, limit_bytes=RANKS_BYTES, follow=False)
                _, ranks = parsed_status(content)
        if not ranks:
            return {"ranks": {}}
        shown, slowest = most_urgent(ranks, MOST_RANKS), slowest_rank(ranks)
        rows = [
            [
                *(screen_line(text_of(rank), limit=80) for _, _, text_of in COLUMNS),
                "no progress" if hangs(rank) else "slowest" if rank.rank == slowest else "",
            ]
            for rank in shown
        ]
        rest = rest_line(ranks, len(ranks) - len(shown))
        columns = [*(title for title, _, _ in COLUMNS), "note"]
        return {"ranks": {"title": run_line(ranks), "columns": columns, "rows": rows, "rest": rest}}

    # -- the row -----------------------------------------------------------------------------------

    def _renewed(self, read: Callable[[], Any], *names: str) -> Any:
        """Return what ``read`` returns, from an earlier call if the files ``names`` have not changed.

        None without the file, if it is one, and for files below a symbolic link.
        """
        now = signature(self.folder.path, names)
        if "/" in names[0] and (self.folder.path / names[0]).parent.is_symlink():
            now = (None,)
        if self._read.get(names, ((), None))[0] != now:
            self._read[names] = (now, None if now == (None,) else read())
        return self._read[names][1]

    def _status(self) -> dict[str, Any]:
        name = "logs/status.json"
        before = self._read.get((name,))
        found: dict[str, Any] = self._renewed(lambda: read_json(self.folder.status, LIMITS), name) or {}
        if before is None:  # the clock of a file server may differ from ours, so later looks do not use it
            changed = signature(self.folder.path, [name])[0]
            age_s = time.time() - changed[0] / 1e9 if changed else 0.0
            self._status_changed_at_s = time.monotonic() - age_s
        elif before[0] != self._read[(name,)][0]:
            self._status_changed_at_s = time.monotonic()
        return found

    def _state(self, status: dict[str, Any]) -> tuple[str, str]:
        """Return ``running``, ``ended``, ``stopped`` or ``failed``, and the sign of it."""
        state, at_s = status.get("state"), number(status.get("time"), MOST_WHOLE) or 0.0
        restart = self._renewed(self._last_restart, "logs/launcher.events.jsonl")
        if state != "ended" and restart and restart[0] > at_s and time.time() - restart[0] < RESTART_S:
            return "running", f"starts again: {restart[1]}"
        if state in ("ended", "stopped", "failed"):
            why = str(status.get("why") or "")
            return state, f"{_clock(at_s)}{f': {why}' if why else ''}"
        if state == "running":
            silent_s = time.monotonic() - self._status_changed_at_s
            if silent_s < (STORED_SILENT_S if self._is_stored else SILENT_S):
                return "running", "rank 0 writes its status"
            return self._failure() or ("failed", f"no sign of life since {_clock(at_s)}")
        if signature(self.folder.path, ["results.json"])[0]:
            return "ended", "has results.json"
        changed_s = self._changed_s()
        if time.time() - changed_s < QUIET_S:
            return "running", f"a file changed at {_clock(changed_s)}"
        return self._failure() or ("stopped", f"no results, and no file changed since {_clock(changed_s)}")

    def _failure(self) -> tuple[str, str] | None:
        """Return the state and the message that a process of our launcher has left, for a run that is silent."""
        names = ("logs/status.json", "logs/rank-0.log")
        found: tuple[str, str] | None = self._renewed(self._failure_on_disk, *names)
        return found

    def _failure_on_disk(self) -> tuple[str, str] | None:
        for rank in range(MOST_RANKS):
            words = read_json(self.folder.failure(rank), LIMITS)
            if words and not words.get("secondary"):
                first = (str(words.get("message")).strip().splitlines() or [""])[0]
                is_stop = words.get("exit_code") == Stopped.exit_code
                return "stopped" if is_stop else "failed", screen_line(f"rank {rank}: {first}", limit=300)
        return None

    def _changed_s(self) -> float:
        found = signature(self.folder.path, (*PROGRESS, "logs/rank-0.log", "logs/status.json"))
        return max((entry[0] / 1e9 for entry in found if entry), default=0.0)

    def _ranks_version(self) -> str:
        """Return the version of ranks.json; "" without one, or if an earlier start of the run has left it."""
        found = signature(self.folder.path, ["logs/ranks.json", "logs/status.json"])
        ranks, status = found
        if ranks is None or self.folder.logs.is_symlink():
            return ""
        is_old = status is not None and status[0] - ranks[0] > SILENT_S * 1e9  # rank 0 writes both
        return "" if is_old else version(found[:1])

    def _last_restart(self) -> tuple[float, str] | None:
        events = read_events(self.folder.launcher_events, LIMITS)
        found = [event for event in events if event.get("kind") == "restart"]
        return (float(found[-1]["time"]), screen_line(found[-1].get("why"), limit=300)) if found else None

    def _table(self) -> dict[str, Any]:
        """Return the best and the last figures of results.csv."""
        try:
            rows = results_rows(self.folder, LIMITS)
        except StorageError:
            return {}
        task = judgement_of(self.folder, LIMITS)
        best, last = best_of(rows, task), rows[-1] if rows else {}
        return {
            "best": number(best.get("main"), MOST_WHOLE),
            "figure": task.main,
            "best_epoch": number(best.get("epoch"), MOST_WHOLE),
            "epoch": number(last.get("epoch"), MOST_WHOLE),
            "rate": number(last.get("images_per_s"), MOST_WHOLE),
        }

    def _results(self) -> dict[str, Any]:
        metrics = read_json(self.folder.results_json, LIMITS).get("metrics")
        figure = judgement_of(self.folder, LIMITS).main
        best = number(metrics.get(figure), MOST_WHOLE) if isinstance(metrics, dict) else None
        return {"best": best, "figure": figure}

    def _last_line(self) -> str:
        try:
            with open_foreign(self.folder.log(0), follow=False) as file:
                file.seek(max(os.fstat(file.fileno()).st_size - LINE_BYTES, 0))
                lines = file.read(LINE_BYTES).decode("utf-8", "replace").split("\n")
        except OSError:
            return ""
        return next(
            (screen_line(line.strip(), limit=LINE_LETTERS) for line in reversed(lines) if line.strip()), ""
        )


PARTS = {"progress": Run.progress_values, "figures": Run.figure_values, "ranks": Run.rank_values}


class Runs:
    """The runs below ``places``, folders of runs or of such folders. Any thread may call all methods."""

    def __init__(self, places: Sequence[Path]) -> None:
        self.places = [place.resolve() for place in places]
        self._runs = dict[str, Run]()
        self._pages = OrderedDict[tuple[str, str], tuple[str, bytes]]()
        self._looking, self._caching = Lock(), Lock()  # the second one is never held while a file is read

    def look(self) -> None:
        """Find new runs, forget those that are gone, and bring all rows up to date."""
        with self._looking:
            found = dict[str, Run]()
            for path, name in find_runs(self.places):
                run = Run(path, name)
                found.setdefault(run.id, self._runs.get(run.id, run))
            for run in found.values():
                run.look()
            newest = sorted(
                found.values(), key=lambda run: (run.row["state"] != "running", -run.row["changed_s"])
            )
            self._runs = {run.id: run for run in newest[:MOST_RUNS]}

    def read_newest(self) -> None:
        """Keep the values of the newest run. This loads the modules for it, so no request waits for them."""
        for run in [*self._runs.values()][:1]:
            self.values(run, "progress")
            self.values(run, "figures")

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows: first the runs that go on, then the others, the newest first."""
        return [run.row for run in list(self._runs.values())]

    def get(self, id: str) -> Run | None:
        return self._runs.get(id)

    def only(self) -> Run | None:
        """Return the run whose folder is the only place; None if there are several places, or it is a folder of runs."""
        return next((run for run in self._runs.values() if self.places == [run.folder.path]), None)

    def values(self, run: Run, part: str) -> bytes:
        """Return a part of the page of a run, of ``PARTS``, as JSON."""
        with run.reading:
            key, now = (run.id, part), getattr(run, part)
            kept = self._pages.get(key)
            if kept is None or kept[0] != now:
                kept = now, json.dumps(plain(PARTS[part](run)), separators=(",", ":")).encode()
            with self._caching:
                self._pages[key] = kept
                self._pages.move_to_end(key)
                while (
                    len(self._pages) > 1 and sum(len(text) for _, text in self._pages.values()) > CACHE_BYTES
                ):
                    self._pages.popitem(last=False)
            return kept[1]


def find_runs(places: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    """Yield path and name of each run in ``places``, without following symbolic links. Skip folders that cannot be read."""
    left = MOST_ENTRIES

    def below(folder: Path, name: str, depth: int) -> Iterator[tuple[Path, str]]:
        nonlocal left
        folders = []
        trials = str(folder / "trials")  # of `yolofleet tune`
        if os.path.isdir(trials) and not os.path.islink(trials):  # noqa: PTH112, PTH114  (these never raise)
            folders = ["trials"]
        elif any(signature(folder, PROGRESS[:3])):
            yield folder, name
            return
        elif depth:
            with suppress(OSError), os.scandir(folder) as found:
                for entry in islice(found, min(left, MOST_IN_FOLDER)):
                    left -= 1
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.name)
            folders.sort()
        if depth:
            for inner in folders:
                yield from below(folder / inner, f"{name}/{inner}" if name else inner, depth - 1)

    for place in places:
        for path, name in below(place, "", DEPTH):
            yield path, name or RunFolder(path).name


def _clock(at_s: float) -> str:
    with suppress(OverflowError, ValueError, OSError):
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))
    return "?"
