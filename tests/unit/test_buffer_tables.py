"""Tables of `bapo buffer` at two widths: ids whole, text clipped, nothing wider than the terminal."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from bapo.commands.buffer_where import more, shown, size, table

ROW: dict[str, Any] = {
    "group_id": "fresh-00000482", "prompt_id": "0202063caba46b4e", "mu": 0.25, "birth": 59, "age": 3, "attempts": 12,
    "text": "Find x.\n" + "word " * 80, "where": "high, batch 61 62 63",
}  # fmt: skip


def drawn(width: int, *columns: str, **options: Any) -> list[str]:
    console = Console(width=width, file=io.StringIO(), highlight=False)
    console.print(table(columns, [ROW], **options, width=width))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


@pytest.mark.parametrize("width", [80, 200])
def test_text_gets_the_room_that_numbers_and_ids_leave(width: int) -> None:
    columns = ("prompt_id", "mu", "birth", "age", "attempts", "text")
    head, row = drawn(width, *columns, ids=("prompt_id",), clipped="text")
    assert head.split() == list(columns)
    assert row.startswith("0202063caba46b4e  0.250     59    3        12  Find x. word word")
    assert (row[-1], len(row)) == ("…", width)


def test_ids_stay_whole_and_words_are_folded() -> None:
    lines = drawn(60, "group_id", "prompt_id", "mu", "where", ids=("group_id", "prompt_id"), folded=("where",))
    assert lines[1:] == [
        "fresh-00000482  0202063caba46b4e  0.250  high, batch 61 62",
        "                                         63",
    ]


def test_a_very_long_id_is_folded_and_never_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROW, "group_id", "x" * 100)
    lines = drawn(80, "group_id", "mu", ids=("group_id",))
    assert sum(line.count("x") for line in lines) == 100
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(("value", "text"), [(None, "-"), (0.125, "0.125"), (3, "3"), ("x", "x"), (1.0, "1.000")])
def test_values_are_shown_short(value: Any, text: str) -> None:
    assert shown(value) == text


def test_sizes_and_pages_are_read_at_a_glance() -> None:
    assert [size(n) for n in (0, 999, 1200, 34_500_000, 2.5e9)] == ["0 B", "999 B", "1.2 kB", "34.5 MB", "2.5 GB"]
    assert more(50, 20, 20) == "21-40 of 50; go on with --offset 40"
    assert more(50, 40, 10) == "41-50 of 50"
    assert more(5, 9, 0) == "none of 5 after the first 9"
