"""pi_ref of the KL term: the base model, frozen, until a reincarnation puts the policy in its place (ADR 0055)."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from torch import Tensor

from bapo.algorithms.annealing import reference_share
from bapo.config.objective import LossConfig
from learner.distributed import copy_parameters, gather, load_parameters, reshard
from learner.policy import Policy

log = logging.getLogger(__name__)


class Reference:
    """A frozen policy, and the step from which on it is another one."""

    def __init__(self, policy: Policy, settings: LossConfig) -> None:
        """`policy`: frozen, with the weights of the base model."""
        self.policy = policy
        self._settings = settings
        self._replaced = False

    def begin_step(self, step: int, trained: Policy) -> None:
        """Behind step T, once: take the weights that the policy has at the beginning of this step."""
        restart = self._settings.kl_restart_step
        if restart is None or step <= restart or self._replaced:
            return
        copy_parameters(trained, self.policy)
        self._replaced = True
        log.info("step %d the reference of the KL term is now the policy of this step", step)

    def share(self, step: int) -> float:
        """Weight of KL(pi_theta | pi_ref) in the KL term; the rest is to pi_theta_t."""
        if self._settings.kl_ref != "convex" or self._replaced:
            return 1.0
        return reference_share(step)

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint must hold: nothing, as long as it is the base model. All ranks must call it."""
        if not self._replaced:
            return {}
        reshard(self.policy)
        return gather(dict(self.policy.model.named_parameters()))

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what a checkpoint holds."""
        load_parameters(self.policy.model, tensors)
        self._replaced = True
