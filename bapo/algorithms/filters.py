"""The online filter: which fresh groups become X1 (docs/paper.md, Eq. 5; appendix A.3 of the paper).

range     groups whose rewards differ; in {0, 1}: 1/G <= mu <= (G-1)/G       the paper's default
gaussian  range, then each group stays with probability p(mu), by its own draw
uniform   floor(share * |X_on|) groups, whatever their rewards: the paper's negative control
none      all groups: GRPO
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from bapo.algorithms.composer import Reason
from bapo.algorithms.reward_levels import TOLERANCE, is_all_correct, is_all_incorrect, is_informative
from bapo.algorithms.settings import AlgorithmConfig
from bapo.core.types import GroupStat

Kept = list[GroupStat]
Groups = tuple[GroupStat, ...]
Reasons = dict[str, str]
"""Group id -> a word of `Reason`."""


def filtered_fresh(settings: AlgorithmConfig, fresh: Groups, rng: random.Random) -> tuple[Groups, Reasons]:
    """X1: what the online filter keeps, each prompt once (eq. 5, first indicator; line 5)."""
    kept = {stat.group_id for stat in online_filter(settings, fresh, rng)}
    x1: dict[str, GroupStat] = {}
    reasons: Reasons = {}
    for stat in fresh:
        if stat.group_id not in kept:
            reasons[stat.group_id] = why_left_out(stat)
        elif stat.prompt_id in x1:
            reasons[stat.group_id] = Reason.DUPLICATE_PROMPT
        else:
            x1[stat.prompt_id] = stat
            reasons[stat.group_id] = Reason.INFORMATIVE
    return tuple(x1.values()), reasons


def why_left_out(stat: GroupStat) -> str:
    """The reason of a fresh group that the online filter did not keep."""
    if is_informative(stat):
        return Reason.FILTERED
    if is_all_incorrect(stat):
        return Reason.ALL_INCORRECT
    return Reason.ALL_CORRECT if is_all_correct(stat) else Reason.NO_VARIANCE


def online_filter(settings: AlgorithmConfig, fresh: Sequence[GroupStat], rng: random.Random) -> Kept:
    """The fresh groups that may train, in their order."""
    return FILTERS[settings.online_filter](settings, fresh, rng)


def keep_probability(mu: float, center: float, width: float) -> float:
    """p(mu) = exp(-(mu - mu_f)^2 / (2 sigma_f^2)): 1 at the centre."""
    return math.exp(-((mu - center) ** 2) / (2 * width**2))


def _range(_settings: AlgorithmConfig, fresh: Sequence[GroupStat], _rng: random.Random) -> Kept:
    return [stat for stat in fresh if is_informative(stat)]


def _gaussian(settings: AlgorithmConfig, fresh: Sequence[GroupStat], rng: random.Random) -> Kept:
    center, width = settings.gaussian_center, settings.gaussian_width
    informative = _range(settings, fresh, rng)
    return [stat for stat in informative if rng.random() < keep_probability(stat.mu, center, width)]


def _uniform(settings: AlgorithmConfig, fresh: Sequence[GroupStat], rng: random.Random) -> Kept:
    num = math.floor(settings.uniform_share * len(fresh) + TOLERANCE)  # 0.29 * 100 = 28.999... counts as 29
    chosen = {stat.group_id for stat in rng.sample(list(fresh), num)}
    return [stat for stat in fresh if stat.group_id in chosen]


def _none(_settings: AlgorithmConfig, fresh: Sequence[GroupStat], _rng: random.Random) -> Kept:
    return list(fresh)


FILTERS: dict[str, Callable[[AlgorithmConfig, Sequence[GroupStat], random.Random], Kept]] = {
    "range": _range,
    "gaussian": _gaussian,
    "uniform": _uniform,
    "none": _none,
}
