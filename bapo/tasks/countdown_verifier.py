"""Verify a Countdown answer: uses each given number once, + - * / only, equals the target.

    response := (expr | term op term ...)        read by one tokenizer and one recursive descent
    expr     := term (("+" | "-") term)*
    term     := factor (("*" | "/") factor)*
    factor   := number | "(" expr ")"

Covers: parentheses, exact fractions, spaces, the last <answer> tag only. Never evaluates text.
Does not cover: partial credit, unary minus, answers over 100 characters or nested deeper than 16 (all reward 0.0).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

ANSWER_START, ANSWER_END = "<answer>", "</answer>"
MAX_CHARS = 100
"""Four numbers, three operators and all useful parentheses need about 25."""
MAX_DEPTH = 16

# [0-9], not \d: \d also matches digits of other scripts, which `int` would accept.
_TOKEN = re.compile(r"[0-9]+|[-+*/()]")
# One class, repeated: nested repeats would take exponential time on a long number before a bad character.
_TEXT = re.compile(r"[-+*/() 0-9]*")


def is_right(text: str, numbers: Sequence[int], target: int) -> bool:
    """Whether the last answer in `text` is an expression over exactly `numbers` that equals `target`.

    Never raises, whatever the text: what cannot be read is wrong.
    """
    answer = last_answer(text)
    if answer is None or len(answer) > MAX_CHARS or not _TEXT.fullmatch(answer):
        return False
    tokens = _TOKEN.findall(answer)
    # Compared before anything is computed: a number that was not given never enters the arithmetic.
    used = sorted(int(token) for token in tokens if token.isdigit())
    if used != sorted(numbers):
        return False
    try:
        return _Parser(tokens).value() == target
    except (_SyntaxError, ZeroDivisionError):
        return False


def last_answer(text: str) -> str | None:
    """What stands between the last </answer> and the nearest <answer> before it; None if there is no such pair."""
    end = text.rfind(ANSWER_END)
    start = text.rfind(ANSWER_START, 0, max(end, 0))
    if start < 0:
        return None
    return text[start + len(ANSWER_START) : end]


class _SyntaxError(Exception):
    """The tokens are no expression; never leaves this module."""


class _Parser:
    """Recursive descent over the grammar at the top; consumes `tokens` from the left."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._next = 0
        self._depth = 0

    def value(self) -> Fraction:
        """The value of all tokens. Raises: _SyntaxError, ZeroDivisionError."""
        result = self._expr()
        if self._next != len(self._tokens):
            raise _SyntaxError
        return result

    def _expr(self) -> Fraction:
        result = self._term()
        while (op := self._peek()) in ("+", "-"):
            self._next += 1
            term = self._term()
            result = result + term if op == "+" else result - term
        return result

    def _term(self) -> Fraction:
        result = self._factor()
        while (op := self._peek()) in ("*", "/"):
            self._next += 1
            factor = self._factor()
            result = result * factor if op == "*" else result / factor
        return result

    def _factor(self) -> Fraction:
        first = self._peek()
        self._next += 1
        if first.isdigit():
            return Fraction(int(first))
        if first != "(" or self._depth >= MAX_DEPTH:
            raise _SyntaxError
        self._depth += 1
        result = self._expr()
        self._depth -= 1
        if self._peek() != ")":
            raise _SyntaxError
        self._next += 1
        return result

    def _peek(self) -> str:
        """The next token, or an empty string at the end."""
        return self._tokens[self._next] if self._next < len(self._tokens) else ""
