"""Several rewards are one function that adds them; the weights sum to 1, so the reward stays in [0, 1]."""

from __future__ import annotations

import re

import bapo
from bapo.tasks.countdown import is_right

WEIGHTS = {"correct": 0.8, "format": 0.1, "short": 0.1}


@bapo.reward
def weighted(completion: str, numbers: list[int], target: int, **row: object) -> float:
    """A correct equation counts most; a well-formed and a short answer a little."""
    parts = {
        "correct": is_right(completion, numbers, target),
        "format": re.search(r"<answer>[^<]+</answer>", completion) is not None,
        "short": len(completion) <= 80,
    }
    return sum(WEIGHTS[name] * met for name, met in parts.items())
