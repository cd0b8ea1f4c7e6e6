"""ReLIFT's cross-entropy on entries of kind sft: one pass after the step's policy updates.

    loss = mean over tokens of (-log pi_theta) - sft_entropy_coef * mean entropy        separate AdamW and clip

Suffix: M response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from contrib.relift.composer import Relift
from learner.batch.microbatch import MicroBatch
from learner.batch.packing import minibatches
from learner.distributed.shard_files import StoredShards, load_optimizer, optimizer_state
from learner.model.lora import trained_parameters
from learner.update.hooks import Given, UpdateHook
from learner.update.step import Step, StepInputs


class Supervised(UpdateHook):
    """Owns the second optimizer of the policy."""

    name = "supervised"
    trains_sft = True
    own: Relift.Settings

    def __init__(self, given: Given, own: Relift.Settings) -> None:
        super().__init__(given, own)
        self.optimizer = torch.optim.AdamW(
            trained_parameters(self.policy),
            lr=own.sft_lr,
            betas=self.config.learner.betas,
            weight_decay=0.0,
            fused=True,
        )

    def after_passes(self, step: Step) -> None:
        """Train the entries of kind sft, if there are any. Raises: DivergenceError."""
        groups = [i for i, entry in enumerate(step.inputs.batch.entries) if entry.kind == "sft"]
        if not groups:
            return
        settings = self.config.learner
        plan = minibatches(  # the epoch after those of the policy, for an independent order
            len(groups), settings.minibatch_size, seed=self.config.run.seed, step=step.number, epoch=settings.epochs
        )
        losses = [self._minibatch(step.inputs, [groups[i] for i in chosen]) for chosen in plan]
        step.facts["supervised_loss"] = sum(losses) / len(losses)

    def _minibatch(self, inputs: StepInputs, groups: Sequence[int]) -> float:
        entropy_coef, responses = self.own.sft_entropy_coef, inputs.columns.responses_of(groups)
        factor_E = np.array([entry.weight for entry in inputs.batch.entries])
        weight_M = inputs.spread(inputs.token_mean(responses) * factor_E[inputs.columns.group_R])

        def loss_of(micro: MicroBatch) -> Tensor:
            logprobs_M, entropy_M = self.policy(micro, with_entropy=entropy_coef > 0)
            loss_M = -logprobs_M
            if entropy_coef:
                loss_M = loss_M - entropy_coef * entropy_M
            loss: Tensor = (loss_M * weight_M[micro.slot_M]).sum()
            return loss

        return self.passes.optimizer_step(
            loss_of, inputs, groups, responses, optimizer=self.optimizer, grad_clip=self.own.sft_grad_clip,
            where="cross-entropy",
        )  # fmt: skip

    def tensors(self) -> dict[str, Tensor]:
        """The moments."""
        return optimizer_state(self.policy.model, self.optimizer)

    def load(self, stored: StoredShards) -> None:
        """Load from a checkpoint."""
        load_optimizer(self.policy.model, self.optimizer, stored)
