"""Cells of tables: numbers as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bapo.analysis.compare.accuracy import mean_and_range
from bapo.analysis.compare.gather import Method
from bapo.core.statistics import Estimate

DASH = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of text under a header."""

    key: str
    """Its file name."""
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    """What a reader must know."""


def name_of(method: Method) -> str:
    """Its label, with a star where it is unequal on purpose."""
    return f"{method.label} *" if method.may_differ else method.label


def interval(found: Estimate | None) -> str:
    """ "31.9 [30.5, 33.2]" in percent, cut at 0 and 100."""
    if found is None:
        return DASH
    return f"{percent(found.mean)} [{percent(max(0.0, found.low))}, {percent(min(1.0, found.high))}]"


def points(found: Estimate | None) -> str:
    """ "+7.0 [+5.4, +8.5]" in points."""
    return DASH if found is None else f"{100 * found.mean:+.1f} [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"


def percent(value: float) -> str:
    """.319 -> 31.9."""
    return f"{100 * value:.1f}"


def p(value: float) -> str:
    """A p value: "p=0.03", "p=0.0042", "p<0.0001"."""
    return "p<0.0001" if value < 0.0001 else f"p={value:.4f}" if value < 0.01 else f"p={value:.2f}"


def share(part: int, whole: int) -> str:
    """ "31.2 % (50/160)"."""
    return f"{100 * part / whole:.1f} % ({part}/{whole})" if whole else DASH


def spread(values: Sequence[float], shown: Callable[[float], str]) -> str:
    """Mean, and the least and the most where they differ from it as shown."""
    found = mean_and_range(values)
    if found is None:
        return DASH
    mean, least, most = map(shown, found)
    return mean if least == most else f"{mean} ({least} to {most})"
