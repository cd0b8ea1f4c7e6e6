"""Tables of text in a terminal: cells as they are written, and columns that break between words as long as they can."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table as Shown
from rich.text import Text

from bapo.comparison.cells import Table
from bapo.plain_text import plain_lines

GAP = 2
"""Blanks between two columns."""


def print_table(console: Console, table: Table) -> None:
    """Title, rows and note, as wide as the console."""
    shown = Shown(
        title=Text(plain_lines(table.title)),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    # Names and commits of runs are what their files say.
    header, *rows = [[plain_lines(cell) for cell in row] for row in (table.header, *table.rows)]
    widths = column_widths([header, *rows], console.width)
    for place, name in enumerate(header):
        shown.add_column(Text(name), overflow="fold", width=widths[place] if widths else None)
    for row in rows:
        # Not plain strings: in them an interval in square brackets would be read as markup, and vanish.
        shown.add_row(*map(Text, row))
    console.print(shown)
    console.print(Text(f"\n{plain_lines(table.note)}\n", "bright_black"))


def column_widths(rows: Sequence[Sequence[str]], width: int) -> list[int] | None:
    """Widths in which no word is broken and the tallest cells are as low as they can be; None if words are too wide."""
    columns = list(zip(*rows, strict=True))
    widths = [max(len(word) for cell in column for word in cell.split() or [""]) for column in columns]
    most = [max(map(len, column)) for column in columns]
    room = width - GAP * (len(columns) - 1) - sum(widths)
    if room < 0:
        return None
    while room and (growing := [place for place in range(len(columns)) if widths[place] < most[place]]):
        widths[max(growing, key=lambda place: most[place] / widths[place])] += 1
        room -= 1
    return widths
