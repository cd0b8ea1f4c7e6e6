"""On-policy distillation: each sampled token is credited with how much likelier the teacher finds it (docs/methods.md).

    A_t = teacher_weight (log pi_T(y_t | .) - log alpha(y_t | .)) + reward_weight (r - mean(r))

y_t ~ alpha, so the mean of -A_t is the reverse KL of the policy that sampled to the teacher, token by token; the
gradient of A_t log pi lowers it (Agarwal et al., arXiv 2306.13649; Thinking Machines, On-Policy Distillation, 2025).
A token is not credited with what later tokens cost (discount 0).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from pydantic import Field

from bapo.core.errors import ContractError
from bapo.core.types import Group
from learner.advantages.base import Advantage, Float64s

KEEPS_ALL = ("none", "uniform")
"""Online filters that do not read rewards."""


class Distillation(Advantage):
    """The advantage `distillation`."""

    ignores = ("shaping.shift",)
    credits_tokens = True
    needs_teacher = True

    class Settings(Advantage.Settings):
        """Of teacher and reward."""

        teacher_weight: float = Field(1.0, gt=0)
        """Factor on the log-ratio of teacher and policy."""
        reward_weight: float = Field(0.0, ge=0)
        """Factor on the reward less the mean of its group; 0: rewards are measured, and do not train."""
        max_gap: float | None = Field(None, gt=0)
        """Bound on the absolute log-ratio of a token, in nats; null: none."""

    @classmethod
    def check(cls, config: Any, own: Any) -> Iterator[str]:
        """Groups without a difference of rewards train, and nothing divides nats by the deviation of rewards."""
        yield from super().check(config, own)
        loss, algorithm = config.loss, config.algorithm
        if loss.advantage_norm != "center":
            yield (
                f"loss.advantage = distillation with loss.advantage_norm = {loss.advantage_norm} would divide the "
                "log-ratio to the teacher by the deviation of the rewards; set loss.advantage_norm = center"
            )
        if algorithm.composer != "grpo" and ":" not in algorithm.composer:
            yield (
                f"loss.advantage = distillation with algorithm.composer = {algorithm.composer}, which chooses groups "
                "by their rewards; set preset = grpo, or algorithm.composer = grpo and algorithm.online_filter = none"
            )
        elif algorithm.online_filter not in KEEPS_ALL:
            yield (
                f"loss.advantage = distillation with algorithm.online_filter = {algorithm.online_filter} would drop "
                "groups whose rewards do not differ, which have as much to learn from a teacher; set "
                "algorithm.online_filter = none"
            )

    def credit(self, group: Group, rewards: Float64s) -> Float64s:
        """Token by token. Raises: ContractError for a group that no teacher has scored."""
        if group.teacher_logprobs is None:
            raise ContractError(
                f"group {group.group_id} has no log-probs of a teacher: it was sampled without [distillation]"
            )
        gap_M = group.teacher_logprobs.astype(np.float64) - group.rollout_logprobs
        if self._own.max_gap is not None:
            gap_M = np.clip(gap_M, -self._own.max_gap, self._own.max_gap)
        of_reward = np.repeat(rewards - rewards.mean(), group.lengths)
        credit_M: Float64s = self._own.teacher_weight * gap_M + self._own.reward_weight * of_reward
        return credit_M
