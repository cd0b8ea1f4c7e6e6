"""The reward of a response against those of its group (eq. 2), for each of its tokens."""

from __future__ import annotations

import numpy as np

from bapo.algorithms.credits.base import Advantage, Float64s
from bapo.core.types import Group


class OfGroup(Advantage):
    """The advantage `group`."""

    def credit(self, group: Group, rewards: Float64s) -> Float64s:
        """The learner takes it by response (`learner.advantages.of_batch`), with its pools and weights."""
        return np.repeat(rewards - rewards.mean(), group.lengths)
