"""Text for a terminal: sanitized text and formatted numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def plain(text: str) -> str:
    r"""The text with escapes in place of what a terminal obeys and a log file breaks at: `\x1b`, `\n`, `\u202e`."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def plain_lines(text: str) -> str:
    """The same for text of several lines."""
    return "\n".join(map(plain, text.split("\n")))


ORIGINS = ("x1", "x2", "x3")
ORIGIN_COLORS = {"x1": "blue", "x2": "orange3", "x3": "green"}
"""In a terminal, as on the page and in Grafana. Terminals of 16 colors show orange3 as yellow, and a brighter orange as
red, which means an error."""


def duration(seconds: float) -> str:
    """9 s, 1:05, 1:02:03."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def count(value: float) -> str:
    """950, 3.9k, 1.2M."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f}{letter}"
    return f"{value:.0f}"


def percent(share: float) -> str:
    """.3421 -> 34.2 %."""
    return f"{100 * share:.1f} %"


def with_interval(row: Mapping[str, Any]) -> str:
    """The mean of a row of evaluations.jsonl with its 95 % interval: "34.2 % [31.1, 37.4]"."""
    return f"{percent(row['accuracy'])} [{100 * row['low']:.1f}, {100 * row['high']:.1f}]"


def staleness(row: Mapping[str, Any], origin: str) -> int | None:
    """Most steps between sampling and training of a step's groups of one origin; None: it has none."""
    value = row.get(f"staleness_{origin}_max") if row.get(origin) else None
    return None if value is None else int(value)


def num_groups(row: Mapping[str, Any]) -> int:
    """Groups that a step trained."""
    return sum(int(row.get(origin, 0)) for origin in ORIGINS)
