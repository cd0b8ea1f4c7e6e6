"""The reward of a response against those of its group (eq. 2), for each of its tokens."""

from __future__ import annotations

import numpy as np

from bapo.core.types import Group
from learner.advantages.base import Advantage, Float64s


class OfGroup(Advantage):
    """The advantage `group`."""

    def credit(self, group: Group, rewards: Float64s) -> Float64s:
        """The learner takes it by response (`of_batch.py`), with its pools and weights."""
        return np.repeat(rewards - rewards.mean(), group.lengths)
