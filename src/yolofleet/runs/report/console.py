"""Output of a run for users: header, progress, a table after each validation, summary.

On a terminal the progress is a bar, with a table of the ranks below it if there are several. Elsewhere (files, pipes, CI)
it is plain lines without control characters, one every ``every_s`` seconds and one per epoch. With ``--quiet`` only the
result is printed. All output also goes to ``logs/rank-N.log``. Rank 0 has a :class:`Console`; other ranks have a
:class:`NullConsole`, which only writes its log.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import TextIOWrapper
from itertools import zip_longest
from pathlib import Path
from typing import Any, TextIO

from rich.cells import cell_len
from rich.console import Console as RichConsole
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from yolofleet.runs.rank_status import RankStatus
from yolofleet.runs.report.clock import Times
from yolofleet.runs.report.screen_table import ScreenTable, aligned
from yolofleet.storage.atomic import open_append
from yolofleet.support.closing import Closing
from yolofleet.support.terminal import LINE_S, Forms, Progress, duration, encodable, end_text, fitted
from yolofleet.support.text import is_quiet, screen_line, screen_text

REDRAW_S = 1.0  # the ranks change also while this one waits


@dataclass(frozen=True)
class StepView:
    """The figures beside the bar."""

    # mean of the epoch so far, by name ("box", "obj", "cls"); empty if this rank has had no image
    losses: Mapping[str, float]
    times: Times  # times of the epoch so far
    lr: float  # learning rate of weights
    memory_gib: float = 0.0  # peak on the device in the epoch; 0: unknown
    left_s: float = 0.0  # predicted seconds to the end of the run; 0: unknown

    def text(self) -> str:
        losses, rate, shares, lr, memory = self._forms()
        return "  ".join(part[0] for part in (losses, rate, shares, lr, memory) if part[0])

    def parts(self, left: str = "") -> list[Forms]:
        """Return the figures by importance, with the time ``left`` of the epoch, for a line that must fit."""
        losses, rate, shares, lr, memory = self._forms()
        ends = f"ends {end_text(self.left_s)}" if left and self.left_s else ""
        return [rate, (left,), (ends,), losses, memory, shares, lr]

    def _forms(self) -> tuple[Forms, Forms, Forms, Forms, Forms]:
        losses, rate = self.losses, self.times.rate_img_s
        data, compute, comm = (f"{self.times.share(part):.0%}" for part in ("data", "compute", "comm"))
        return (
            ("  ".join(f"{name} {value:.4f}" for name, value in losses.items()), f"loss {sum(losses.values()):.4g}")
            if losses
            else ("",),
            ("- img/s", "") if math.isnan(rate) else (f"{rate:.4g} img/s", f"{rate:.3g}/s"),
            (f"data {data} compute {compute} comm {comm}", f"data {data} comm {comm}", ""),
            (f"lr {self.lr:.2g}", ""),
            (f"{self.memory_gib:.1f} GiB", f"{self.memory_gib:.1f}G") if self.memory_gib else ("",),
        )  # fmt: skip


class NullConsole(Closing):
    """Prints nothing; writes the output to a log file.

    It ignores a log that cannot be written, because :mod:`events` and results report the disk.

    Args:
        log: file to append to; None: no log.
    """

    def __init__(self, log: Path | None = None) -> None:
        self._log: TextIO | None = None
        if log is not None:
            with suppress(OSError):
                log.parent.mkdir(parents=True, exist_ok=True)
                self._log = TextIOWrapper(
                    open_append(log), encoding="utf-8", errors="backslashreplace", newline="\n"
                )

    # -- calls of the run ---------------------------------------------------------------------------

    def header(
        self, title: str, facts: Mapping[str, str], settings: Sequence[tuple[str, str, str]] = ()
    ) -> None:
        """Print the header of the run.

        Args:
            facts: label -> text: model, data, devices, images per step, results folder, ...
            settings: (name, value, source) of each setting that is not a default.
        """
        self._show(*_header_lines(title, facts, settings))

    def fact(self, text: str) -> None:
        """Print a plain line."""
        self._show(text)

    def note(self, text: str) -> None:
        """Print information that may explain the result."""
        self._show(f"note: {text}", style="cyan")

    def warn(self, text: str) -> None:
        """Print a warning that needs an action."""
        self._show(f"warning: {text}", style="yellow")

    def begin_epoch(self, epoch: int, epochs: int, images: int) -> None:
        """Start the progress of an epoch of ``images`` images; ``epoch`` counts from 1."""
        self._epoch_label = f"epoch {epoch}/{epochs}"

    def step(self, images: int, view: Callable[[], StepView]) -> None:
        """Show that ``images`` of the epoch are done.

        It calls ``view`` only to print, a few times a second at most, because ``view`` may read losses from the device,
        which waits for the step.
        """

    def progress(self, what: str, done: float = 0, total: float = 0, unit: str = "") -> None:
        """Show that ``done`` of ``total`` are done of ``what``, long work between other output; total 0: unknown."""

    def validating(self, done: int, batches: int) -> None:
        """Show that ``done`` of this rank's validation batches are evaluated."""
        self.progress("validation", done, batches, "batches")

    def end_epoch(self, view: StepView) -> None:
        """Print the line of a finished epoch."""
        self._show(f"{self._epoch_label}: {view.text()}  {duration(view.times.elapsed_s)}")

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print the table of a validation; its first row is for all classes together."""
        self._show(title, *(f"  {line}" for line in aligned(columns, rows)))

    def summary(self, title: str, facts: Mapping[str, str]) -> None:
        """Print the summary: figures and paths."""
        self._show(title, style="bold green")
        self._show(*(f"  {line}" for line in _fact_lines(facts)))

    def close(self) -> None:
        """Close the bar and the log; later output is lost."""
        log, self._log = self._log, None
        if log is not None:
            with suppress(OSError):
                log.close()

    # -- outputs ------------------------------------------------------------------------------------

    _epoch_label = "epoch"

    def _show(self, *lines: str, style: str = "") -> None:
        self.to_log(*lines)

    def to_log(self, *lines: str) -> None:
        """Write lines to the log alone."""
        if self._log is None:
            return
        try:
            stamp = time.strftime("%Y-%m-%d %H:%M:%S")
            self._log.writelines(f"{stamp} {screen_text(line)}\n" for line in lines)
            self._log.flush()
        except OSError:
            self.close()


def _fact_lines(facts: Mapping[str, str]) -> list[str]:
    width = max((len(label) for label in facts), default=0)
    return [screen_line(f"{label.ljust(width)}  {text}") for label, text in facts.items()]


def _header_lines(
    title: str, facts: Mapping[str, str], settings: Sequence[tuple[str, str, str]]
) -> list[str]:
    values = _fact_lines({f"{name} = {value}": f"({source})" for name, value, source in settings})
    lines = [*_fact_lines(facts), *(["settings:"] if values else []), *(f"  {line}" for line in values)]
    return [title, *(f"  {line}" for line in lines)]


class Console(NullConsole):
    """The console of rank 0.

    Args:
        log: see :class:`NullConsole`.
        stream: None: standard output.
        every_s: seconds between progress lines without a terminal; a bar updates four times a second.
        bar: None: a bar if ``stream`` is a terminal that supports it.
        quiet: print only the result; so does ``--quiet``.
        fleet: returns what the ranks do, for the table below the bar.
    """

    def __init__(
        self,
        log: Path | None = None,
        *,
        stream: TextIO | None = None,
        every_s: float = LINE_S,
        bar: bool | None = None,
        quiet: bool = False,
        fleet: Callable[[], Sequence[RankStatus]] = tuple,
    ) -> None:
        super().__init__(log)
        self._stream = stream if stream is not None else sys.stdout
        self._quiet = quiet or is_quiet()
        self._fleet = fleet
        self._progress = Progress(
            self._stream, every_s=every_s, live=bar, shown=not self._quiet, below=self._ranks
        )
        self._epoch_images = 0  # 0: between epochs
        self._rich: RichConsole | None = None
        if self._progress.lines is not None:
            self._rich = RichConsole(file=self._stream, highlight=False, force_terminal=True)
        self._table: list[Text] = []  # of a terminal of that size, until then
        self._table_size, self._table_until_s = (0, 0), 0.0
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def _ranks(self, columns: int, rows: int) -> list[Text]:
        """Return the table of the ranks; none for one rank. It is made about once a second: 4,096 ranks take 15 ms."""
        now_s, size = time.monotonic(), (columns, rows)
        if now_s >= self._table_until_s or size != self._table_size:
            ranks, self._table = self._fleet(), []
            if len(ranks) > 1:
                from yolofleet.runs.report.fleet_screen import fleet_lines

                encoding = getattr(self._stream, "encoding", None)
                self._table = fleet_lines(ranks, columns, rows, encoding)
            self._table_until_s, self._table_size = now_s + REDRAW_S * max(0.9, len(ranks) / 256), size
        return self._table

    def _keep_drawing(self) -> None:
        """Thread: draw again while the main thread waits for other ranks."""
        while not self._closing.wait(REDRAW_S):
            self._progress.redraw()

    def _print(self, *lines: str) -> None:
        """Print plain lines, with escapes for letters that the stream cannot encode; ignore a closed stream."""
        encoding = getattr(self._stream, "encoding", None)
        with suppress(OSError, ValueError):  # a closed pipe or stream
            for line in lines:
                self._stream.write(encodable(screen_text(line), encoding) + "\n")
            self._stream.flush()

    def _show(self, *lines: str, style: str = "") -> None:
        self.to_log(*lines)
        self._say(*lines, style=style)

    def _say(self, *lines: str, style: str = "") -> None:
        """Print lines above the progress, unless ``--quiet``; not to the log."""
        if self._rich is not None:
            for line in lines:
                self._draw(Text(screen_text(line), style=style))
        elif not self._quiet:
            self._print(*lines)

    def _draw(self, what: Any) -> None:
        """Print what rich can draw, above the progress."""
        lines = self._progress.lines
        assert self._rich is not None and lines is not None
        with lines.lock, suppress(OSError, ValueError):
            lines.erase()
            self._rich.print(what, width=lines.size()[0])

    def header(
        self, title: str, facts: Mapping[str, str], settings: Sequence[tuple[str, str, str]] = ()
    ) -> None:
        self._progress.end()
        if self._rich is None:
            super().header(title, facts, settings)
            return
        self.to_log(*_header_lines(title, facts, settings))
        grid = Table.grid(padding=(0, 2))
        for label, text in facts.items():
            grid.add_row(Text(label, style="cyan"), Text(screen_text(text), overflow="fold"))
        for i, source in enumerate(dict.fromkeys(source for _, _, source in settings)):
            line = Text(overflow="fold")
            for name, value, _ in (entry for entry in settings if entry[2] == source):
                line.append(f"{name} ").append(screen_line(value), "bold").append(", ")
            line.append(screen_line(f"from {source}"), "dim")
            grid.add_row(Text("settings" if i == 0 else "", style="cyan"), line)
        panel_title = f"[bold]{escape(screen_line(title))}[/bold]"
        self._draw(Panel(grid, title=panel_title, title_align="left", border_style="cyan", expand=False))

    def begin_epoch(self, epoch: int, epochs: int, images: int) -> None:
        super().begin_epoch(epoch, epochs, images)
        self._progress.end()
        self._progress.begin(self._epoch_label)
        self._epoch_images = images

    def step(self, images: int, view: Callable[[], StepView]) -> None:
        total, label = self._epoch_images, self._epoch_label
        if not total:
            return
        done = min(images, total)
        rate = self._progress.rate(done)
        if not self._progress.is_due():
            return
        if self._table and self._thread is None:
            self._thread = threading.Thread(target=self._keep_drawing, name="screen", daemon=True)
            self._thread.start()
        figures = view()
        left = f"{duration((total - done) / rate)} left" if rate else ""
        ends = f", ends {end_text(figures.left_s)}" if left and figures.left_s else ""
        self._progress.draw(
            label,
            done / total,
            [(f"{done}/{total}", f"{done / total:.0%}"), *figures.parts(left)],
            plain=f"{label} {done}/{total}  {figures.text()}  {left or '? left'}{ends}",
        )

    def progress(self, what: str, done: float = 0, total: float = 0, unit: str = "") -> None:
        """Show the progress; the next table, summary or epoch removes it."""
        self._progress.show(what, done, total, unit)

    def end_epoch(self, view: StepView) -> None:
        self._progress.end()
        self._epoch_images = 0
        if self._progress.lines is None:
            super().end_epoch(view)
            return
        took = duration(view.times.elapsed_s)
        self.to_log(f"{self._epoch_label}: {view.text()}  {took}")
        width = self._progress.lines.size()[0]
        label, took, *figures = fitted([(self._epoch_label,), (took,), *view.parts()], width)
        self._say("  ".join(filter(None, (label, *figures, took))))

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self._progress.end()
        if self._progress.lines is None:
            super().table(title, columns, rows)
            return
        self.to_log(title, *(f"  {line}" for line in aligned(columns, rows)))
        width = self._progress.lines.size()[0] - 2
        lines = aligned(columns, rows, width)
        self._say(title)
        if max(map(cell_len, lines)) > width:  # rich divides the cells into several lines
            wide = ScreenTable(*columns, numbers=columns[1:])
            for row in rows:
                wide.add_row(*row)
            self._draw(wide)
            return
        for line, style in zip_longest(lines, ("dim", "bold"), fillvalue=""):
            self._say(f"  {line}", style=style)

    def summary(self, title: str, facts: Mapping[str, str]) -> None:
        self._progress.end()
        super().summary(title, facts)
        if self._quiet:  # this is the result
            self._print(", ".join([title, *map(screen_line, list(facts.values())[:1])]))

    def close(self) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join(REDRAW_S)
        self._progress.close()
        super().close()
