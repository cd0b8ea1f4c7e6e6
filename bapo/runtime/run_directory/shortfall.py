"""Whether batches are nearly empty: what the page and the live table say about it.

A step teaches by its groups whose rewards differ: those of one prompt that all got the same reward have no advantage.

Pure: rows of metrics.jsonl in, a sentence out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bapo.core.text import num_groups

LATEST = 20
"""Steps whose mean counts."""
FEWEST = 5
"""Steps below which nothing is said."""
NEARLY_EMPTY = 0.3
"""Share of B; as in the alert BatchUnderfilled."""
EASY, HARD = 0.75, 0.25
"""Mean rewards above and below which the groups without an advantage are most likely all-correct, all-incorrect."""


def num_useful(row: Mapping[str, Any]) -> int:
    """Trained groups of a step whose rewards differ; of a row without that count, and with a teacher, from whom every
    group learns, its trained groups."""
    total = num_groups(row)
    informative = None if row.get("teacher_kl") is not None else row.get("num_informative_trained")
    return total if informative is None else min(total, int(informative) + int(row.get("x3") or 0))


def shortfall(rows: Sequence[Mapping[str, Any]]) -> str:
    """What is wrong with the batches of the latest rows and what to do; empty if they are full enough."""
    latest = [row for row in rows if row.get("batch_size")][-LATEST:]
    if len(latest) < FEWEST:
        return ""
    size = latest[-1]["batch_size"]
    useful = sum(map(num_useful, latest)) / len(latest)
    if useful >= NEARLY_EMPTY * size:
        return ""
    return (
        f"nearly empty: {useful:.1f} of {size} groups per step trained with rewards that differ (last "
        f"{len(latest)} steps), so each gradient rests on few prompts; {_remedy(latest, size)}"
    )


def _remedy(latest: Sequence[Mapping[str, Any]], size: int) -> str:
    if sum(row.get("num_informative") or 0 for row in latest) >= NEARLY_EMPTY * size * len(latest):
        return "there were more such groups, which were left out: `bapo explain RUN all STEP` says why"
    rewards = [row["reward_mean"] for row in latest if row.get("reward_mean") is not None]
    mean = sum(rewards) / len(rewards) if rewards else (EASY + HARD) / 2
    if mean >= EASY:
        return f"with a mean reward of {mean:.2f} the prompts are too easy: use harder ones"
    if mean <= HARD:
        return (
            f"with a mean reward of {mean:.2f} the prompts are too hard, or the reward never matches: test it with "
            "`bapo reward test`, use easier prompts or raise rollout.max_response_tokens"
        )
    return "most prompts are solved always or never: use prompts in between, or raise algorithm.group_size"
