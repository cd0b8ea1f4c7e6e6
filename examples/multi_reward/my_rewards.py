"""Three rewards, weighted in run.toml: the reward of a response is their weighted mean, in [0, 1]."""

from __future__ import annotations

import re

import bapo
from bapo.tasks.countdown import is_right


@bapo.reward
def correct(completion: str, numbers: list[int], target: int, **row: object) -> float:
    """1 for an equation over exactly the numbers that equals the target."""
    return float(is_right(completion, numbers, target))


@bapo.reward
def well_formed(completion: str, **row: object) -> float:
    """1 for an answer in its tags."""
    return float(re.search(r"<answer>[^<]+</answer>", completion) is not None)


@bapo.reward
def short(completion: str, **row: object) -> tuple[float, dict[str, float]]:
    """1 up to 80 characters; their number is a fact, which is recorded."""
    return float(len(completion) <= 80), {"characters": len(completion)}
