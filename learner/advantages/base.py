"""The interface of advantages: what a response, or each of its tokens, is credited with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bapo.algorithms.methods import ADVANTAGE, Method, own_settings
from bapo.config.objective import LossConfig
from bapo.core.types import Group

Float64s = NDArray[np.float64]


class Advantage(Method, ABC):
    """By default each token has the advantage of its response: its reward against those of its group (eq. 2)."""

    credits_tokens = False
    """`credit` gives each token its own."""
    always_counts = False
    """Whether a response with advantage 0 still trains something."""
    needs_teacher = False
    """Whether `credit` reads `Group.teacher_logprobs`."""
    trained_models = 0
    """Models of the policy's size that train in addition to it."""
    _own: Any

    def __init__(self, own: Any = None) -> None:
        """`own`: its Settings; None: their defaults."""
        self._own = own or self.Settings()

    @classmethod
    def check(cls, config: Any, own: Any) -> Iterator[str]:
        """What it declares above leaves no other baseline, and a teacher for those that read one."""
        del own
        loss = config.loss
        if cls.needs_teacher and config.distillation is None:
            yield (
                f"loss.advantage = {loss.advantage} learns from a teacher, and there is none; add "
                '[distillation] with teacher = "http://host:8000/v1"'
            )
        if config.distillation is not None and not cls.needs_teacher:
            yield (
                f"[distillation] with loss.advantage = {loss.advantage}, which does not learn from the teacher; set "
                "loss.advantage = distillation and loss.advantage_norm = center, or remove [distillation]"
            )
        if cls.credits_tokens and loss.has_own_baseline:
            yield (
                f"loss.advantage = {loss.advantage} has the whole group as baseline; set loss.advantage_batch_norm = "
                "false, loss.advantage_pool = mixed and loss.advantage_pass_k = 1, or loss.advantage = group"
            )

    @abstractmethod
    def credit(self, group: Group, rewards: Float64s) -> Float64s:
        """[T] credit of each token of a group, before it is divided by the deviation of the rewards.

        Args:
            rewards: [G] as shaped.
        """


def load_advantage(settings: LossConfig) -> Advantage:
    """The advantage `settings.advantage` with its own settings. Raises: ConfigError."""
    kind: type[Advantage] = ADVANTAGE.find(settings.advantage)
    return kind(own_settings(ADVANTAGE, kind.Settings, settings.advantage_options))
