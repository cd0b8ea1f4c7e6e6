"""Cross-entropy on entries of kind sft (ReLIFT): one pass after the step's policy updates.

    loss = mean over tokens of (-log pi_theta) - entropy_coef * mean entropy        separate AdamW and clip

Suffix: M response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from bapo.config.tree import Config
from learner.batch.packing import MicroBatch, minibatches
from learner.distributed.shard_files import StoredShards, load_optimizer, optimizer_state
from learner.model.policy import Policy
from learner.update.passes import Passes
from learner.update.step_state import StepInputs


class Supervised:
    """Owns the second optimizer of the policy."""

    def __init__(self, *, config: Config, policy: Policy, passes: Passes) -> None:
        self._config = config
        self._policy = policy
        self._passes = passes
        settings = config.supervised
        self.optimizer = torch.optim.AdamW(
            policy.parameters(), lr=settings.lr, betas=config.learner.betas, weight_decay=0.0, fused=True
        )

    def run(self, inputs: StepInputs) -> Mapping[str, float]:
        """Mean loss over the mini-batches; empty without entries of kind sft. Raises: DivergenceError."""
        groups = [i for i, entry in enumerate(inputs.batch.entries) if entry.kind == "sft"]
        if not groups:
            return {}
        settings = self._config.learner
        plan = minibatches(  # the epoch after those of the policy, for an independent order
            len(groups), settings.minibatch_size, seed=self._config.run.seed, step=inputs.batch.step,
            epoch=settings.epochs,
        )  # fmt: skip
        losses = [self._minibatch(inputs, [groups[i] for i in chosen]) for chosen in plan]
        return {"supervised_loss": sum(losses) / len(losses)}

    def _minibatch(self, inputs: StepInputs, groups: Sequence[int]) -> float:
        settings, responses = self._config.supervised, inputs.columns.responses_of(groups)
        factor_E = np.array([entry.weight for entry in inputs.batch.entries])
        weight_M = inputs.spread(inputs.token_mean(responses) * factor_E[inputs.columns.group_R])

        def loss_of(micro: MicroBatch) -> Tensor:
            logprobs_M, entropy_M = self._policy(micro, with_entropy=settings.entropy_coef > 0)
            loss_M = -logprobs_M
            if settings.entropy_coef:
                loss_M = loss_M - settings.entropy_coef * entropy_M
            loss: Tensor = (loss_M * weight_M[micro.slot_M]).sum()
            return loss

        return self._passes.optimizer_step(
            loss_of, inputs, groups, responses, optimizer=self.optimizer, grad_clip=settings.grad_clip,
            where="cross-entropy",
        )  # fmt: skip

    def tensors(self) -> dict[str, Tensor]:
        """State for a checkpoint."""
        return optimizer_state(self._policy.model, self.optimizer)

    def load(self, stored: StoredShards) -> None:
        """Load from a checkpoint."""
        load_optimizer(self._policy.model, self.optimizer, stored)
