"""What a worker or a model wrote does nothing to a terminal and makes no line of a log of its own."""

from __future__ import annotations

import pytest

from bapo.cli.buffer.target import shown
from bapo.core.text import plain
from buffer_service.http.schemas import MOST_DETAIL_CHARS, FailBody


@pytest.mark.parametrize(
    ("text", "shown_as"),
    [
        ("killed after 10 s", "killed after 10 s"),
        ("größer – 例", "größer – 例"),
        ("\x1b[2J\x1b]0;owned\x07", "\\x1b[2J\\x1b]0;owned\\x07"),
        ("one\n2026-11-23 ERROR forged", "one\\n2026-11-23 ERROR forged"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("\x9b31m", "\\x9b31m"),
    ],
    ids=["plain", "other scripts", "escape sequences", "a line", "right to left", "C1"],
)
def test_what_a_terminal_obeys_is_shown_as_an_escape(text: str, shown_as: str) -> None:
    assert plain(text) == shown_as


def test_a_cell_of_a_table_is_one_line() -> None:
    assert shown("Solve:\n1 + \x1b[31m2") == "Solve: 1 + \\x1b[31m2"


def test_the_detail_of_a_failure_is_cut_and_plain() -> None:
    given = {"worker_id": "w", "request_id": "r", "reason": "engine_error"}
    assert FailBody(**given, detail="\x1bc\nforged").detail == "\\x1bc\\nforged"
    assert FailBody(**given, detail="x" * 20_000_000).detail == "x" * MOST_DETAIL_CHARS
