"""Output of a run for users: header, progress, a table after each validation, summary.

On a terminal the progress is a bar. Elsewhere (files, pipes, CI) it is plain lines without control characters, one every
``every_s`` seconds and one per epoch. All output also goes to ``logs/rank-N.log``. Rank 0 has a :class:`Console`; other
ranks have a :class:`NullConsole`, which only writes its log.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Literal, TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console as RichConsole
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Column, Table
from rich.text import Text

from yolofleet.files.atomic import open_append
from yolofleet.report.clock import Times
from yolofleet.text import screen_line, screen_text


@dataclass(frozen=True)
class StepView:
    """The figures beside the bar.

    Attributes:
        losses: mean of the epoch so far, by name ("box", "obj", "cls").
        times: of the epoch so far.
        lr: learning rate of weights.
        memory_gib: peak on the device in the epoch; 0: unknown.
    """

    losses: Mapping[str, float]
    times: Times
    lr: float
    memory_gib: float = 0.0

    def text(self) -> str:
        parts = [f"{name} {value:.4f}" for name, value in self.losses.items()]
        rate = self.times.rate_img_s
        parts.append("? img/s" if math.isnan(rate) else f"{rate:.4g} img/s")
        parts.append(shares_text(self.times))
        parts.append(f"lr {self.lr:.2g}")
        if self.memory_gib:
            parts.append(f"{self.memory_gib:.1f} GiB")
        return "  ".join(parts)


def shares_text(times: Times) -> str:
    return (
        f"data {times.share('data'):.0%} compute {times.share('compute'):.0%} comm {times.share('comm'):.0%}"
    )


def duration(seconds: float) -> str:
    """Return a duration as ``3.4 s``, ``2:05`` or ``1:02:05``."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def aligned(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table, with the first column aligned left and the others right."""
    table = [[screen_line(cell) for cell in row] for row in (columns, *rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(columns))]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]


class ScreenTable(Table):
    """A table on standard output whose cells may contain untrusted text."""

    def __init__(self, *columns: str, numbers: Sequence[str] = ()) -> None:
        """
        Args:
            numbers: columns aligned right.
        """
        super().__init__(box=SIMPLE_HEAD, title_justify="left")
        for column in columns:
            justify: Literal["left", "right"] = "right" if column in numbers else "left"
            self.add_column(column, justify=justify, overflow="fold")

    def add_row(self, *cells: Any, **more: Any) -> None:
        super().add_row(*(Text(screen_line(cell)) for cell in cells), **more)

    def show(self) -> None:
        """Print it."""
        RichConsole(markup=False).print(self)


class NullConsole:
    """Prints nothing; writes the output to a log file.

    It ignores a log that cannot be written, because :mod:`events` and results report the disk.

    Args:
        log: file to append to; None: no log.
    """

    def __init__(self, log: Path | None = None) -> None:
        self._log: TextIO | None = None
        if log is not None:
            try:
                log.parent.mkdir(parents=True, exist_ok=True)
                self._log = TextIOWrapper(
                    open_append(log), encoding="utf-8", errors="backslashreplace", newline="\n"
                )
            except OSError:
                pass

    # -- calls of the run ---------------------------------------------------------------------------

    def header(
        self, title: str, facts: Mapping[str, str], settings: Sequence[tuple[str, str, str]] = ()
    ) -> None:
        """Print the header of the run.

        Args:
            facts: label -> text: model, data, devices, images per step, results folder, ...
            settings: (name, value, source) of each setting that is not a default.
        """
        self._write(title, *(f"  {line}" for line in _fact_lines(facts)))
        if settings:
            self._write("  settings:", *(f"    {line}" for line in _setting_lines(settings)))

    def fact(self, text: str) -> None:
        """Print a plain line."""
        self._write(text)

    def note(self, text: str) -> None:
        """Print information that may explain the result."""
        self._write(f"note: {text}")

    def warn(self, text: str) -> None:
        """Print a warning that needs an action."""
        self._write(f"warning: {text}")

    def begin_epoch(self, epoch: int, epochs: int, images: int) -> None:
        """Start the progress of an epoch of ``images`` images; ``epoch`` counts from 1."""
        self._epoch_label = f"epoch {epoch}/{epochs}"

    def step(self, images: int, view: Callable[[], StepView]) -> None:
        """Show that ``images`` of the epoch are done.

        It calls ``view`` only to print, a few times a second at most, because ``view`` may read losses from the device,
        which waits for the step.
        """

    def validating(self, done: int, batches: int) -> None:
        """Show that ``done`` of this rank's validation batches are evaluated."""

    def end_epoch(self, view: StepView) -> None:
        """Print the line of a finished epoch."""
        self._write(f"{self._epoch_label}: {view.text()}  {duration(view.times.elapsed_s)}")

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print the table of a validation; its first row is for all classes together."""
        self._write(title, *(f"  {line}" for line in aligned(columns, rows)))

    def summary(self, title: str, facts: Mapping[str, str]) -> None:
        """Print the summary: figures and paths."""
        self._write(title, *(f"  {line}" for line in _fact_lines(facts)))

    def close(self) -> None:
        """Close the bar and the log; later output is lost."""
        log, self._log = self._log, None
        if log is not None:
            try:
                log.close()
            except OSError:
                pass

    # -- outputs ------------------------------------------------------------------------------------

    _epoch_label = "epoch"

    def _write(self, *lines: str) -> None:
        if self._log is None:
            return
        try:
            stamp = time.strftime("%Y-%m-%d %H:%M:%S")
            self._log.writelines(f"{stamp} {screen_text(line)}\n" for line in lines)
            self._log.flush()
        except OSError:
            self.close()

    def __enter__(self) -> NullConsole:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _fact_lines(facts: Mapping[str, str]) -> list[str]:
    width = max((len(label) for label in facts), default=0)
    return [f"{label.ljust(width)}  {screen_line(text)}" for label, text in facts.items()]


def _setting_lines(settings: Sequence[tuple[str, str, str]]) -> list[str]:
    width = max(len(f"{name} = {value}") for name, value, _ in settings)
    return [
        screen_line(f"{f'{name} = {value}'.ljust(width)}  ({source})") for name, value, source in settings
    ]


@dataclass
class _Epoch:
    label: str
    images: int
    began_at_s: float = field(default_factory=time.monotonic)
    spoke_at_s: float = field(default_factory=time.monotonic)


class Console(NullConsole):
    """The console of rank 0.

    Args:
        log: see :class:`NullConsole`.
        stream: None: standard output.
        every_s: seconds between progress lines without a terminal; a bar updates four times a second.
        bar: None: a bar if ``stream`` is a terminal that supports it.
    """

    def __init__(
        self,
        log: Path | None = None,
        *,
        stream: TextIO | None = None,
        every_s: float = 30.0,
        bar: bool | None = None,
    ) -> None:
        super().__init__(log)
        self._stream = stream if stream is not None else sys.stdout
        self._every_s = every_s
        self._epoch: _Epoch | None = None
        self._rich: RichConsole | None = None
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._validated_at_s = 0.0
        utf8 = (getattr(self._stream, "encoding", None) or "").lower().startswith("utf")
        if bar if bar is not None else (self._stream.isatty() and utf8):
            rich = RichConsole(file=self._stream, highlight=False, force_terminal=bar)
            self._rich = None if rich.is_dumb_terminal else rich

    def _print(self, *lines: str) -> None:
        """Print plain lines, with escapes for letters that the stream cannot encode; ignore a closed stream."""
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        try:
            for line in lines:
                self._stream.write(
                    screen_text(line).encode(encoding, "backslashreplace").decode(encoding) + "\n"
                )
            self._stream.flush()
        except (OSError, ValueError):  # a closed pipe or stream
            pass

    def _say(self, text: str, style: str = "") -> None:
        if self._rich is None:
            self._print(text)
        else:
            self._rich.print(Text(screen_text(text), style=style))

    def header(
        self, title: str, facts: Mapping[str, str], settings: Sequence[tuple[str, str, str]] = ()
    ) -> None:
        super().header(title, facts, settings)
        if self._rich is None:
            self._print(title, *(f"  {line}" for line in _fact_lines(facts)))
            if settings:
                self._print("  settings:", *(f"    {line}" for line in _setting_lines(settings)))
            return
        grid = Table.grid(padding=(0, 2))
        for label, text in facts.items():
            grid.add_row(Text(label, style="cyan"), Text(screen_text(text)))
        for i, source in enumerate(dict.fromkeys(source for _, _, source in settings)):
            line = Text()
            for name, value, _ in (entry for entry in settings if entry[2] == source):
                line.append(f"{name} ").append(screen_line(value), "bold").append(", ")
            line.append(screen_line(f"from {source}"), "dim")
            grid.add_row(Text("settings" if i == 0 else "", style="cyan"), line)
        self._rich.print(
            Panel(
                grid,
                title=f"[bold]{escape(screen_line(title))}[/bold]",
                title_align="left",
                border_style="cyan",
                expand=False,
            )
        )

    def fact(self, text: str) -> None:
        super().fact(text)
        self._say(text)

    def note(self, text: str) -> None:
        super().note(text)
        self._say(f"note: {text}", "cyan")

    def warn(self, text: str) -> None:
        super().warn(text)
        self._say(f"warning: {text}", "yellow")

    def begin_epoch(self, epoch: int, epochs: int, images: int) -> None:
        super().begin_epoch(epoch, epochs, images)
        self._stop_bar()
        self._epoch = _Epoch(self._epoch_label, images)
        if self._rich is None:
            return
        self._start_bar(self._epoch_label, images)

    def _start_bar(self, label: str, total: int) -> None:
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}", style="dim"),
            TextColumn(
                "{task.fields[figures]}",
                markup=False,
                table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
            ),
            console=self._rich,
            auto_refresh=False,  # `step` draws it, without another thread
            transient=True,
            expand=True,
        )
        self._bar.start()
        self._task = self._bar.add_task(label, total=total, figures="", left="")

    def step(self, images: int, view: Callable[[], StepView]) -> None:
        epoch = self._epoch
        if epoch is None:
            return
        now = time.monotonic()
        if now - epoch.spoke_at_s < (self._every_s if self._bar is None else min(self._every_s, 0.25)):
            return
        epoch.spoke_at_s = now
        done = min(images, epoch.images)
        left = duration((now - epoch.began_at_s) * (epoch.images - done) / done) if done else "?"
        if self._bar is None:
            self._print(f"{epoch.label} {done}/{epoch.images}  {view().text()}  {left} left")
        else:
            self._bar.update(
                self._task, completed=done, figures=view().text(), left=f"{left} left", refresh=True
            )

    def validating(self, done: int, batches: int) -> None:
        """Show the progress on a terminal only; the table or the next epoch removes the bar."""
        now = time.monotonic()
        if self._rich is None or now - self._validated_at_s < 0.25:
            return
        self._validated_at_s = now
        if self._bar is None:
            self._start_bar("validation", batches)
        assert self._bar is not None
        self._bar.update(
            self._task,
            description="validation",
            completed=done,
            total=batches,
            figures="batches",
            left="",
            refresh=True,
        )

    def end_epoch(self, view: StepView) -> None:
        self._stop_bar()
        super().end_epoch(view)
        self._say(f"{self._epoch_label}: {view.text()}  {duration(view.times.elapsed_s)}")
        self._epoch = None

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        super().table(title, columns, rows)
        self._stop_bar()
        lines = aligned(columns, rows)
        if self._rich is None:
            self._print(title, *(f"  {line}" for line in lines))
            return
        self._say(title)
        self._say(f"  {lines[0]}", "dim")
        for i, line in enumerate(lines[1:]):
            self._say(f"  {line}", "bold" if i == 0 else "")

    def summary(self, title: str, facts: Mapping[str, str]) -> None:
        super().summary(title, facts)
        self._say(title, "bold green")
        for line in _fact_lines(facts):
            self._say(f"  {line}")

    def _stop_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def close(self) -> None:
        self._stop_bar()
        super().close()
