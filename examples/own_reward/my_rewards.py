"""Your own reward: columns of a row come by name."""

from __future__ import annotations

import bapo
from bapo.tasks.countdown import is_right


@bapo.reward
def equation(completion: str, numbers: list[int], target: int, **row: object) -> float:
    """1 when the last <answer> is an expression over exactly these numbers that equals the target, else 0."""
    return float(is_right(completion, numbers, target))
