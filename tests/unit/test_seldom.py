"""Lines that strangers can cause are few."""

from __future__ import annotations

import logging

from bapo.seldom import Seldom


def line(text: str, *args: object) -> logging.LogRecord:
    return logging.LogRecord("uvicorn.error", logging.WARNING, __file__, 1, text, args, None)


def test_a_line_that_comes_again_within_a_second_is_left_out_whatever_its_arguments_are() -> None:
    clock = iter([10.0, 10.5, 10.9, 11.0, 11.1])
    seldom = Seldom(1.0, now=lambda: next(clock))
    said = [seldom.filter(line("bad request from %s", name)) for name in "abcde"]
    assert said == [True, False, False, True, False]


def test_other_lines_are_told_apart() -> None:
    seldom = Seldom(1.0, now=lambda: 0.0)
    assert [seldom.filter(line(text)) for text in ("one", "two", "one")] == [True, True, False]


def test_what_is_remembered_has_a_bound() -> None:
    seldom = Seldom(1.0, now=lambda: 0.0)
    assert all(seldom.filter(line(f"line {number}")) for number in range(1000))
    assert len(seldom._said_at) <= 64
