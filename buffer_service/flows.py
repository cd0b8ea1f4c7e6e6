"""What one assembly moved, in numbers: into and out of B_bad and B_high, and what became of the groups it looked at.

Pure: an Assembly says it all. Groups are counted at the first assembly that looks at them, so X3 spends nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from bapo.algorithms.composer import Reason
from buffer_service.values import Assembly, left_high

Spent = dict[tuple[str, str], tuple[int, int]]
"""(purpose, use) -> (responses, tokens)."""


def inserted(assembly: Assembly) -> dict[str, int]:
    """Table -> entries that this step has put there, also in the place of older ones of the same prompt."""
    before, after = assembly.before, assembly.after
    had_bad = {(entry.prompt_id, entry.birth) for entry in before.bad}
    had_high = {stat.group_id for stat in before.high}
    return {
        "bad": sum((entry.prompt_id, entry.birth) not in had_bad for entry in after.bad),
        "high": sum(stat.group_id not in had_high for stat in after.high),
    }


def evicted(assembly: Assembly, *, high_window: int) -> Counter[tuple[str, str]]:
    """(table, reason) -> entries that left it, also for newer ones of the same prompt: what `inserted` put there less
    these is how much the table grew.

    Args:
        high_window: S, the steps that a group stays in B_high.
    """
    before, after = assembly.before, assembly.after
    answers = {fate["prompt_id"]: fate["reason"] for fate in _looked_at(assembly) if fate["purpose"] == "reevaluate"}
    found: Counter[tuple[str, str]] = Counter()
    stay = {(entry.prompt_id, entry.birth) for entry in after.bad}
    hard = {entry.prompt_id for entry in after.bad}
    for entry in before.bad:
        if (entry.prompt_id, entry.birth) not in stay:
            reason = answers.get(entry.prompt_id)
            is_answered = reason in (Reason.IMPROVED, Reason.SOLVED)
            found["bad", str(reason) if is_answered else "replaced" if entry.prompt_id in hard else "full"] += 1
    left = set(left_high(before, after))
    newer = {stat.prompt_id for stat in after.high}
    for stat in before.high:
        if stat.group_id in left:
            expired = stat.birth <= assembly.step - high_window
            found["high", "expired" if expired else "replaced" if stat.prompt_id in newer else "dropped"] += 1
    return found


def ages(assembly: Assembly) -> Iterator[tuple[str, int]]:
    """(table, steps since birth) of every entry that was used: asked again, or trained as X3."""
    births = {entry.prompt_id: entry.birth for entry in assembly.before.bad}
    high = {stat.group_id: stat.birth for stat in assembly.before.high}
    for fate in assembly.batch.header["fates"]:
        if fate["origin"] == "x3" and fate["group_id"] in high:
            yield "high", assembly.step - high[fate["group_id"]]
        elif fate["purpose"] == "reevaluate" and fate["prompt_id"] in births:
            yield "bad", assembly.step - births[fate["prompt_id"]]


def spent(assembly: Assembly) -> Spent:
    """What the groups had cost that this assembly was the first to look at."""
    found: Spent = {}
    trained = {fate["group_id"] for fate in assembly.batch.header["fates"] if fate["origin"] is not None}
    for fate in _looked_at(assembly):
        use = "stale" if fate["reason"] == Reason.STALE else "trained" if fate["group_id"] in trained else "left_out"
        responses, tokens = found.get((fate["purpose"], use), (0, 0))
        found[fate["purpose"], use] = responses + len(fate["rewards"]), tokens + fate["num_tokens"]
    return found


def _looked_at(assembly: Assembly) -> Iterator[Mapping[str, Any]]:
    """The fates of groups that no earlier step looked at, each group once."""
    new = {*assembly.fresh, *assembly.reevaluated}
    for fate in assembly.batch.header["fates"]:
        if fate["group_id"] in new or fate["reason"] == Reason.STALE:
            new.discard(fate["group_id"])
            yield fate
