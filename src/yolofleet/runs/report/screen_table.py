"""Tables of text, for a screen and for a log."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len, set_cell_size
from rich.console import Console as RichConsole
from rich.table import Table
from rich.text import Text

from yolofleet.support.text import can_redraw, screen_line

SHORTEST_NAME = 8  # cells of the first column of a table


def aligned(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int = 0) -> list[str]:
    """Return the lines of a table, with the first column aligned left and the others right.

    Args:
        width: of the screen, in cells: a first column that is too long is cut; 0: no limit.
    """
    table = [[screen_line(cell) for cell in row] for row in (columns, *rows)]
    widths = [max(cell_len(row[i]) for row in table) for i in range(len(columns))]
    if width and widths[0] > (room := max(width - sum(widths[1:]) - 2 * len(widths[1:]), SHORTEST_NAME)):
        for row in table:
            if cell_len(row[0]) > room:
                row[0] = set_cell_size(row[0], room - 2) + ".."
        widths[0] = room
    return [
        "  ".join(
            cell + space if i == 0 else space + cell
            for i, (cell, cells) in enumerate(zip(row, widths, strict=True))
            for space in [" " * (cells - cell_len(cell))]
        ).rstrip()
        for row in table
    ]


class ScreenTable(Table):
    """A table on standard output, of untrusted text; the columns ``numbers`` are aligned right."""

    def __init__(self, *columns: str, numbers: Sequence[str] = ()) -> None:
        super().__init__(box=SIMPLE_HEAD, title_justify="left")
        for column in columns:
            justify: Literal["left", "right"] = "right" if column in numbers else "left"
            self.add_column(column, justify=justify, overflow="fold")

    def add_row(self, *cells: Any, **more: Any) -> None:
        super().add_row(*(Text(screen_line(cell)) for cell in cells), **more)

    def show(self) -> None:
        """Print it, without colours where lines cannot be drawn."""
        RichConsole(markup=False, force_terminal=None if can_redraw(sys.stdout) else False).print(self)


def figure_text(value: float, labels: int = 1) -> str:
    """Return a figure as text: "no labels" if there are no ``labels`` or the figure is -1, as files and pycocotools write it."""
    return f"{value:.3f}" if labels and value != -1 else "no labels"
