"""TEMPO's values without GRPO's own term (ours): A_t = sum_l lambda^l delta_{t+l} / sigma.

It needs responses that share text, as on tasks with one way of writing a solution: a response that parts from all
others at once has A_0 = r - mean and, with lambda = 0, nothing after it.
"""

from __future__ import annotations

from pydantic import Field

from bapo.core.types import Group
from contrib.prefix_tree import tree_credit
from learner.advantages.base import Advantage, Float64s


class Tree(Advantage):
    """The advantage `tree`."""

    credits_tokens = True

    class Settings(Advantage.Settings):
        """Of its horizon."""

        gae_lambda: float = Field(0.0, ge=0, le=1)
        """lambda; 0 credits only the token at which responses part."""

    _own: Settings

    def credit(self, group: Group, rewards: Float64s) -> Float64s:
        """Token by token."""
        return tree_credit(group, rewards, gae_lambda=self._own.gae_lambda)
