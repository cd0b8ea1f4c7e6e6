"""Which run comes next, and how long the rest takes. Pure: states and seconds in, decisions out."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bapo.analysis.study.state import Found, State

FEW_STEPS = 5
"""Before so many steps, the pace of a run says nothing."""


@dataclass(frozen=True, slots=True)
class Estimates:
    """Seconds of one whole run, measured."""

    by_method: Mapping[str, float]
    """Mean of its finished runs."""

    def of(self, found: Found) -> float | None:
        """Seconds that this run still takes: by its method, else by the mean of all methods; None: nothing is known."""
        if not self.by_method:
            return None
        every = sum(self.by_method.values()) / len(self.by_method)
        return self.by_method.get(found.run.method, every) * found.share_left


def mean_seconds(rows: Iterable[Mapping[str, object]]) -> Estimates:
    """From the lines of results.jsonl: only runs that one start finished have a time that says something."""
    seconds: dict[str, list[float]] = {}
    for row in rows:
        if row.get("status") == "finished" and row.get("in_one_start"):
            seconds.setdefault(str(row["method"]), []).append(float(str(row["wall_s"])))
    return Estimates({method: sum(values) / len(values) for method, values in seconds.items()})


def provisional(estimates: Estimates, running: Iterable[tuple[Found, int, float]]) -> Estimates:
    """The same, with methods that were never measured whole taken from how far their first runs have come.

    Args:
        running: each with its step and its age in seconds; start-up makes early guesses too long.
    """
    guesses: dict[str, float] = {}
    for found, step, age_s in running:
        done = step - found.step
        if done >= FEW_STEPS:
            guesses[found.run.method] = age_s * found.run.config.run.num_steps / done
    return Estimates(guesses | dict(estimates.by_method))


def next_run(waiting: Sequence[Found], estimates: Estimates, left_s: float | None) -> Found | None:
    """The first run that is not finished and that fits; None when none does.

    Args:
        left_s: of the budget; None without one. A run whose time nobody knows yet counts as fitting.
    """
    for found in waiting:
        needed_s = estimates.of(found)
        if found.state is not State.FINISHED and (left_s is None or (left_s > 0 and (needed_s or 0.0) <= left_s)):
            return found
    return None


def rest_s(
    waiting: Sequence[Found], running: Sequence[tuple[Found, float]], estimates: Estimates, parallel: int
) -> float | None:
    """Seconds until all have ended, each free place taking the next run; None while no run was ever measured.

    Args:
        running: each with its age in seconds.
    """
    ends = [max(0.0, (estimates.of(found) or 0.0) - age_s) for found, age_s in running]
    heapq.heapify(ends)
    last = max(ends, default=0.0)
    for found in waiting:
        needed_s = estimates.of(found)
        if needed_s is None:
            return None
        start = heapq.heappop(ends) if len(ends) >= parallel else 0.0
        heapq.heappush(ends, start + needed_s)
        last = max(last, start + needed_s)
    return last if estimates.by_method else None
