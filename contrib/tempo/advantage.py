"""TEMPO (arXiv 2509.18314): GRPO plus credit where responses of a group part. No critic.

A_t = (r - mean(r) + delta_t) / sigma          delta_t = V(s_{t+1}) - V(s_t): contrib/prefix_tree.py
"""

from __future__ import annotations

import numpy as np

from bapo.core.types import Group
from contrib.prefix_tree import tree_credit
from learner.advantages.base import Advantage, Float64s


class Tempo(Advantage):
    """The advantage `tempo`."""

    ignores = ("shaping.shift",)
    credits_tokens = True

    def credit(self, group: Group, rewards: Float64s) -> Float64s:
        """Token by token."""
        credit_M = tree_credit(group, rewards)
        credit_M += np.repeat(rewards - rewards.mean(), group.lengths)
        return credit_M
