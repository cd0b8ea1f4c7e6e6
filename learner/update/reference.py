"""pi_ref of the KL term: the frozen base model, until a restart replaces it by the policy (ReMix).

With LoRA it is the policy with its adapter off: the same log-probs, without a second copy.
"""

from __future__ import annotations

import logging
import math
from contextlib import nullcontext
from typing import Any

import numpy as np
from torch import Tensor

from bapo.algorithms.reward_levels import TOLERANCE
from learner.distributed.shard_files import StoredShards, weights_of
from learner.distributed.sharding import copy_parameters, reshard
from learner.model.lora import adapter_off
from learner.model.policy import load_policy
from learner.update.hooks import Given, UpdateHook
from learner.update.step import Step

log = logging.getLogger(__name__)


class Reference(UpdateHook):
    """A frozen copy of the policy."""

    name = "reference"

    def __init__(self, given: Given, own: Any = None) -> None:
        super().__init__(given, own)
        self._is_policy = self.config.model.lora is not None
        self.model = self.policy
        if not self._is_policy:
            self.model = load_policy(self.config.model.path, self.config, self.passes.world, frozen=True)
        self._replaced = False

    @classmethod
    def is_wanted(cls, given: Given) -> bool:
        return given.config.loss.needs_reference

    def prepare(self, step: Step) -> None:
        """Its log-probs, without gradients."""
        self._begin(step.number)
        inputs = step.inputs
        with adapter_off(self.policy) if self._is_policy else nullcontext():
            step.reference_M = self.passes.evaluate(self.model.logprobs, inputs, np.flatnonzero(inputs.active_R))
        step.reference_share = self._share(step.number)

    def _begin(self, step: int) -> None:
        """After step T, once: copy the weights of the policy at the beginning of this step."""
        restart = self.config.loss.kl_restart_step
        if restart is None or step <= restart or self._replaced:
            return
        copy_parameters(self.policy, self.model)
        self._replaced = True
        log.info("step %d the KL reference is now the policy of this step", step)

    def _share(self, step: int) -> float:
        """Weight of KL(pi_theta | pi_ref) in the KL term; the rest is to pi_theta_t."""
        if self.config.loss.kl_ref != "convex" or self._replaced:
            return 1.0
        return reference_share(step)

    def tensors(self) -> dict[str, Tensor]:
        """Empty while it is the base model."""
        if not self._replaced:
            return {}
        reshard(self.model)
        return weights_of(self.model.model)

    def load(self, stored: StoredShards) -> None:
        stored.load(weights_of(self.model.model))
        self._replaced = True


FULL_UNTIL = 50
"""Last step at which the base model has the whole share."""
STEPS_PER_STAGE = 10
LOSS_PER_STAGE = 0.1
MIN_SHARE = 0.5


def reference_share(step: int) -> float:
    """lambda(t) = max(1 - 0.1 ceil(max(t - 50, 0) / 10), 0.5): ReMix's share of the KL to the base model."""
    stages = math.ceil(max(step - FULL_UNTIL, 0) / STEPS_PER_STAGE - TOLERANCE)
    return max(1.0 - LOSS_PER_STAGE * stages, MIN_SHARE)
