"""Cross-entropy on the entries of kind sft (ReLIFT): one pass over them behind the step's policy updates.

    loss = mean over tokens of (-log pi_theta) - entropy_coef * mean entropy        its own AdamW, its own clip

Suffix: M response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bapo.config.tree import Config
from learner.batching import minibatches
from learner.distributed import whole
from learner.divergence import refuse_divergence
from learner.losses.aggregation import token_weights
from learner.moments import gather_optimizer, load_optimizer
from learner.passes import Passes
from learner.policy import Policy
from learner.step import Step


class Supervised:
    """Owns the second optimizer of the policy."""

    def __init__(self, *, config: Config, policy: Policy, passes: Passes, run_path: Path) -> None:
        self._config = config
        self._policy = policy
        self._passes = passes
        self._run_path = run_path
        settings = config.supervised
        self.optimizer = torch.optim.AdamW(
            policy.parameters(), lr=settings.lr, betas=config.learner.betas, weight_decay=0.0, fused=True
        )

    def run(self, step: Step) -> Mapping[str, float]:
        """Mean loss over the mini-batches; nothing without entries of kind sft. Raises: DivergenceError."""
        groups = [i for i, entry in enumerate(step.batch.entries) if entry.kind == "sft"]
        if not groups:
            return {}
        settings = self._config.learner
        plan = minibatches(  # the epoch behind those of the policy, so that its order is its own
            len(groups), settings.minibatch_size, seed=self._config.run.seed, step=step.batch.step,
            epoch=settings.epochs,
        )  # fmt: skip
        losses = [self._minibatch(step, [groups[i] for i in chosen]) for chosen in plan]
        return {"supervised_loss": sum(losses) / len(losses)}

    def _minibatch(self, step: Step, groups: Sequence[int]) -> float:
        settings, world = self._config.supervised, self._passes.world
        responses = step.columns.responses_of(groups)
        weight_M = self._weights(step, groups)
        total = torch.zeros(1, device=world.device)
        self.optimizer.zero_grad(set_to_none=True)
        for micro in self._passes.microbatches(step, responses):
            logprobs_M, entropy_M = self._policy(micro)
            loss = ((-logprobs_M - settings.entropy_coef * entropy_M) * weight_M[micro.slot_M]).sum()
            (loss * world.size).backward()  # FSDP averages gradients over ranks, but the parts add up
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(self._policy.parameters(), settings.grad_clip)
        found = float(world.sum(total))
        refuse_divergence(
            step.batch, groups, "cross-entropy", found, float(whole(norm)), run_path=self._run_path, leads=world.leads
        )
        self.optimizer.step()
        return found

    def _weights(self, step: Step, groups: Sequence[int]) -> Tensor:
        """[M] token mean over these groups, times the weight of the entry."""
        columns = step.columns
        responses = columns.responses_of(groups)
        weights_R = np.zeros(len(columns.group_R))
        weights_R[responses] = token_weights(columns.lengths_R[responses], "token_mean", 1)
        factor_E = np.array([entry.weight for entry in step.batch.entries])
        weights_M = np.repeat(weights_R * factor_E[columns.group_R], columns.lengths_R)
        return torch.from_numpy(weights_M.astype(np.float32)).to(step.rollout_M.device)

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint must hold. All ranks must call it."""
        return gather_optimizer(self._policy.model, self.optimizer)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what a checkpoint holds."""
        load_optimizer(self._policy.model, self.optimizer, tensors)
