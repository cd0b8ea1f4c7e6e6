"""Tables in a terminal: nothing of a cell is lost, and words are broken only where they do not fit."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from bapo.commands.terminal_tables import column_widths, print_table
from bapo.comparison.cells import Table

ROWS = (("method", "difference"), ("GRPO (v=5)", "+0.6 [-24.1, +25.2]"))


@pytest.mark.parametrize(
    ("width", "want"),
    [
        (17, None),  # "method", a gap of 2 and "difference" are 18
        (18, [6, 10]),
        (20, [6, 12]),  # 19 in 10 is tighter than 10 in 6, and 19 in 11 still is
        (31, [10, 19]),
        (200, [10, 19]),
    ],
)
def test_columns_have_room_for_their_longest_word_and_then_for_their_longest_cell(
    width: int, want: list[int] | None
) -> None:
    assert column_widths(ROWS, width) == want


def shown(width: int) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    print_table(console, Table(key="t", title="[T]", header=ROWS[0], rows=ROWS[1:], note="see [x0.1, x2]"))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_square_brackets_are_text_and_no_markup() -> None:
    text = shown(80)
    assert "GRPO (v=5)  +0.6 [-24.1, +25.2]" in text
    assert text.startswith("[T]")
    assert "see [x0.1, x2]" in text


def test_an_interval_of_factors_is_not_taken_for_a_style() -> None:
    console = Console(file=io.StringIO(), width=80)
    print_table(console, Table(key="t", title="T", header=("factor",), rows=(("x1.41 [x0.017, x116]",),)))
    assert isinstance(console.file, io.StringIO)
    assert "x1.41 [x0.017, x116]" in console.file.getvalue()


def test_a_narrow_terminal_breaks_between_words_and_a_very_narrow_one_within_them() -> None:
    assert {"method", "difference", "(v=5)", "[-24.1,", "+25.2]"} <= set(shown(20).split())
    assert max(map(len, shown(14).splitlines())) <= 14
