"""Whether a group's rewards differ, and where their mean lies: the membership tests of eqs. 5-7.

    is_informative             the rewards differ; for rewards in {0, 1} that is 1/G <= mu <= (G-1)/G
    is_all_correct, ..._incorrect    all of them are 1, or 0; equal ones in between are neither
    is_hard, is_within         mu against c1, and against [c2, c3], decided on k = G mu

k is an integer for rewards in {0, 1}, so mu = 1/8 against c1 = 1/8 is never a question of rounding.
Fractional rewards travel as float32: their sum is right to about G * 6e-8, far inside TOLERANCE.
"""

from __future__ import annotations

import math

from bapo.core.types import GroupStat

TOLERANCE = 1e-6
"""In units of k. Less than any real difference between two levels, more than the rounding of c * G and of k."""


def is_within(stat: GroupStat, low: float, high: float) -> bool:
    """low <= mu <= high: the third indicator of eq. 5."""
    return low * stat.size - TOLERANCE <= stat.reward_sum <= high * stat.size + TOLERANCE


def is_hard(stat: GroupStat, c1: float) -> bool:
    """mu <= c1: belongs into B_bad (algorithm 1, line 8)."""
    return stat.reward_sum <= c1 * stat.size + TOLERANCE


def is_informative(stat: GroupStat) -> bool:
    """The first indicator of eq. 5, 1/G <= mu <= (G-1)/G, for all rewards in [0, 1]: they are not all equal.

    Of the rewards 0, .1, .1, .1 the sum is below 1, and yet three responses have a positive advantage.
    """
    return not stat.homogeneous


def is_all_correct(stat: GroupStat) -> bool:
    """mu = 1: every reward is 1, and nothing is left to learn."""
    return stat.mu >= 1 - TOLERANCE


def is_all_incorrect(stat: GroupStat) -> bool:
    """mu = 0: every reward is 0."""
    return stat.mu <= TOLERANCE


def levels_within(low: float, high: float, group_size: int) -> range:
    """The levels k of a group with binary rewards that satisfy low <= k/G <= high; empty if the window misses all."""
    return range(math.ceil(low * group_size - TOLERANCE), math.floor(high * group_size + TOLERANCE) + 1)
