"""Generalized advantage estimation against a critic (PPO), which `critic.py` trains beside the policy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import Field

from learner.advantages.base import Advantage
from learner.advantages.group import OfGroup


class Gae(OfGroup):
    """The advantage `gae`; until the critic has run, tokens have that of their group."""

    ignores = ("loss.advantage_norm", "loss.advantage_eps", "loss.advantage_pass_k")
    update_hooks = ("contrib.gae.critic:CriticTrainer",)
    always_counts = True
    trained_models = 1

    class Settings(Advantage.Settings):
        """Of the estimate, and of the critic: a second copy of the backbone with a linear head."""

        gamma: float = Field(1.0, gt=0, le=1)
        """Discount per token."""
        lam: float = Field(1.0, ge=0, le=1)
        """lambda of generalized advantage estimation; 1: return minus value."""
        value_clip: float = Field(0.5, gt=0)
        """Clip range of the value around its old value; the loss is the maximum of clipped and unclipped."""
        critic_lr: float = Field(1e-5, gt=0)
        """Learning rate of the critic (verl's default; not in the paper)."""
        critic_grad_clip: float = Field(1.0, gt=0)
        """Maximum L2 norm of its gradient."""
        critic_weight_decay: float = Field(0.0, ge=0)
        """Weight decay of its AdamW."""

    @classmethod
    def check(cls, config: Any, own: Any) -> Iterator[str]:
        """The critic is the only baseline."""
        yield from super().check(config, own)
        loss = config.loss
        if loss.advantage_batch_norm or loss.advantage_pool != "mixed":
            yield (
                f"loss.advantage = {loss.advantage} has a critic as baseline and is whitened over the batch; set "
                "loss.advantage_batch_norm = false and loss.advantage_pool = mixed, or loss.advantage = group"
            )
