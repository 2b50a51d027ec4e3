"""What the ranks of a run do, as a few lines that fit a terminal: below the bar of rank 0, and in `fleet status`."""

from __future__ import annotations

import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from yolofleet.runs.rank_status import RankStatus
from yolofleet.storage.atomic import emit_json
from yolofleet.support.errors import ConfigError
from yolofleet.support.terminal import LINE_S, LiveLines, duration, encodable
from yolofleet.support.text import can_redraw, echo, inform, screen_line, shown

FOLLOW_S = 1.0
MOST_ROWS = 16  # ranks that are shown one by one
OTHER_ROWS = 6  # of the terminal, which the table leaves to the bar, its head, the counts and the text above
STILL_S = 5.0  # without progress; then the phase shows for how long
SLOWEST_BY = 0.05  # share of the time that the slowest rank waits less than the median
WORDS = {
    "data": "loading",
    "compute": "computing",
    "comm": "exchanging",
    "exchange": "exchanging",
    "evaluate": "validating",
    "checkpoint": "saving",
    "start": "starting",
}
# title, order in which narrow terminals leave it out (the largest first, 0: never), text
Column = tuple[str, int, Callable[[RankStatus], str]]


def phase_text(rank: RankStatus) -> str:
    """Return what a rank does, and how long it has made no progress."""
    still = f" {duration(rank.quiet_s)}" if rank.quiet_s >= STILL_S else ""
    return WORDS.get(rank.phase, rank.phase) + still


COLUMNS: tuple[Column, ...] = (
    ("rank", 0, lambda rank: str(rank.rank)),
    ("host", 2, lambda rank: rank.host),
    ("device", 6, lambda rank: rank.device),
    ("phase", 0, phase_text),
    ("img/s", 1, lambda rank: f"{rank.rate_img_s:.4g}" if rank.rate_img_s else ""),
    ("waits", 3, lambda rank: f"{rank.waits:.0%}" if rank.rate_img_s else ""),
    ("memory", 5, lambda rank: f"{rank.memory_gib:.1f} GiB" if rank.memory_gib else ""),
    ("temp", 4, lambda rank: f"{rank.temperature_c:.0f} C" if rank.temperature_c else ""),
)
LEFT = ("rank", "host", "device", "phase")  # columns aligned left
LONGEST = {"host": 24, "device": 12, "phase": 24}  # cells


def hangs(rank: RankStatus) -> bool:
    """Return whether a rank has made no progress for a while, and does not wait for others."""
    return rank.quiet_s >= STILL_S and WORDS.get(rank.phase) != "exchanging"


def slowest_rank(ranks: Sequence[RankStatus]) -> int:
    """Return the rank that the others wait for, or -1 if none stands out.

    It is the one that waits least itself, as in ``clock.slowest``, because ranks with ``--shares`` have unequal rates.
    """
    measured = sorted((rank.waits, rank.rank) for rank in ranks if rank.rate_img_s)
    if len(measured) < 2 or len(measured) < len(ranks):
        return -1
    median = measured[len(measured) // 2][0]
    return measured[0][1] if median - measured[0][0] >= SLOWEST_BY else -1


def title_line(ranks: Sequence[RankStatus], name: str, age_s: float) -> str:
    """Return a line about the whole run, whose status rank 0 wrote ``age_s`` seconds ago."""
    age = f", as of {duration(age_s)} ago" if age_s >= STILL_S else ""
    return f"{name}: {run_line(ranks)}{age}"


def run_line(ranks: Sequence[RankStatus]) -> str:
    """Return the ranks, the hosts, the step and the rate of the whole run."""
    hosts = len({rank.host for rank in ranks})
    # the divisor of a rank's rate has no waiting
    rate = sum(rank.rate_img_s * (1 - rank.waits) for rank in ranks)
    step, plural = max(rank.step for rank in ranks), "s" if hosts != 1 else ""
    return f"{len(ranks)} ranks on {hosts} host{plural}, step {step}, {rate:.4g} img/s"


def fleet_lines(
    ranks: Sequence[RankStatus], columns: int, rows: int, encoding: str | None = None, most: int = MOST_ROWS
) -> list[Text]:
    """Return a line for each rank, or for the slowest ones and the counts of the others.

    Args:
        columns, rows: size of the terminal; the lines leave ``OTHER_ROWS`` of the rows free.
        encoding: of the stream; None: UTF-8.
        most: ranks that are shown one by one.
    """
    room = max(min(most, rows - OTHER_ROWS), 0)
    slowest = slowest_rank(ranks)
    first = most_urgent(ranks, room)
    lines = _table(first, slowest, columns, encoding) if first else []
    if rest := rest_line(ranks, len(ranks) - len(first)):
        line = Text(encodable(f"  {rest}", encoding), style="dim")
        line.truncate(columns)
        lines.append(line)
    return lines


def most_urgent(ranks: Sequence[RankStatus], most: int) -> Sequence[RankStatus]:
    """Return at most ``most`` ranks in their order: those without progress, and those that wait least."""
    if len(ranks) <= most:
        return ranks
    urgent = sorted(ranks, key=lambda rank: (-rank.quiet_s if hangs(rank) else 0.0, rank.waits))
    return sorted(urgent[:most], key=lambda rank: rank.rank)


def rest_line(ranks: Sequence[RankStatus], rest: int) -> str:
    """Return a line about all ranks if ``rest`` of them are not shown one by one; else ""."""
    if not rest:
        return ""
    counts = Counter(WORDS.get(rank.phase, screen_line(rank.phase, limit=20)) for rank in ranks)
    told = ", ".join(f"{count} {phase}" for phase, count in counts.most_common(4))
    warmest = max(rank.temperature_c for rank in ranks)
    return f"{rest} more; of {len(ranks)}: {told}" + (f", up to {warmest:.0f} C" if warmest else "")


def _table(ranks: Sequence[RankStatus], slowest: int, columns: int, encoding: str | None) -> list[Text]:
    marks = [" slowest" if rank.rank == slowest else "" for rank in ranks]
    table = []
    for title, order, text_of in COLUMNS:
        texts = [encodable(screen_line(text_of(rank)), encoding) for rank in ranks]
        longest = LONGEST.get(title, columns)
        texts = [
            text if cell_len(text) <= longest else set_cell_size(text, longest - 2) + ".." for text in texts
        ]
        if any(texts):
            table.append((title, order, max(map(cell_len, (title, *texts))), texts))
    while sum(2 + width for _, _, width, _ in table) + max(map(len, marks)) > columns and any(
        order for _, order, _, _ in table
    ):
        table.remove(max(table, key=lambda column: column[1]))

    def line(cells: Sequence[str], mark: str, style: str) -> Text:
        parts = []
        for cell, (title, _, width, _) in zip(cells, table, strict=True):
            space = " " * (width - cell_len(cell))
            parts.append(cell + space if title in LEFT else space + cell)
        text = Text("  " + "  ".join(parts).rstrip() + mark, style=style)
        text.truncate(columns)
        return text

    lines = [line([title for title, _, _, _ in table], "", "dim")]
    for n, (rank, mark) in enumerate(zip(ranks, marks, strict=True)):
        style = "red" if hangs(rank) else "yellow" if mark else ""
        lines.append(line([texts[n] for _, _, _, texts in table], mark, style))
    return lines


def show_status(
    read: Callable[[], tuple[float, list[RankStatus]] | None], name: str, watch: bool, json_out: str
) -> int:
    """Show what the ranks do, once or until the run ends or you press Ctrl-C. Return 0.

    Args:
        read: returns how many seconds ago rank 0 wrote what the ranks do, and the ranks; None: the run has ended.
        json_out: file for the same as JSON; "-": standard output.
    Raises:
        ConfigError: no rank reports.
    """
    found = read()
    if found is None:
        raise ConfigError(
            f"{shown(name)} has no ranks that report",
            source="the run has ended or not begun, has one process, or was started with --stall-s 0",
            hint="a run of several processes reports every few seconds",
        )
    lines, screen = [], LiveLines(sys.stdout) if watch and can_redraw(sys.stdout) else None
    try:
        while found is not None:
            age_s, ranks = found
            columns, rows = screen.size() if screen else shutil.get_terminal_size()
            room = rows if sys.stdout.isatty() else len(ranks) + OTHER_ROWS  # a file gets all ranks
            lines = fleet_lines(ranks, columns - 1, room, most=len(ranks))
            title = Text(screen_line(title_line(ranks, name, age_s)))
            title.truncate(columns - 1)
            if screen:
                screen.draw([title, *lines])
            elif json_out != "-":
                for line in (title, *lines):
                    echo(line.plain)
            emit_json({"age_s": age_s, "ranks": [asdict(rank) for rank in ranks]}, json_out)
            if not watch:
                return 0
            time.sleep(FOLLOW_S if screen else LINE_S)
            found = read()
        inform(f"note: {name} has ended")
    except KeyboardInterrupt:
        pass
    finally:
        if screen:
            screen.close()
            for line in (title, *lines):
                echo(line.plain)
    return 0
