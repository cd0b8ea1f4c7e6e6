"""The fixed policies of an update: the anchor of the trust region, and the reference of the KL term (Eqs. 1, 3).

    direct        anchor = alpha, the rollout policy: nothing to compute
    decoupled     anchor = pi_theta_t, for all of D_t
    official      anchor = pi_gen, the trained weights at the step in which the group was generated
    interpolated  between alpha and the policy that trains, by the age of the token: no pass of its own

The learner first sees a group in the step whose assembly consumed it, so for X1 and X2 pi_gen is pi_theta_t of that
step. X3 is reused within the window of B_high; its pi_gen is stored here by group id and in every checkpoint. A group
of X3 that was filtered in its first step was never evaluated: its anchor is pi_theta_t of its first use.

Unknown anchors are NaN. The first mini-batch needs no separate pass: its policy still is theta_t, so the policy's own
log-probs are the anchor, and the ratio is exactly 1.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bapo.algorithms.reward_levels import TOLERANCE
from bapo.config.objective import LossConfig
from bapo.core.types import Batch
from learner.batch.packing import Columns, token_spans
from learner.distributed.shard_files import StoredShards, weights_of
from learner.distributed.sharding import copy_parameters, reshard
from learner.model.policy import Policy

Float32s = NDArray[np.float32]


log = logging.getLogger(__name__)


class GenerationMemory:
    """log pi_gen of groups that may be reused, by group id."""

    def __init__(self, window: int) -> None:
        """`window`: steps after its first use in which a group may be reused (S of B_high)."""
        self._window = window
        self._logprobs: dict[str, Float32s] = {}
        self._steps: dict[str, int] = {}

    def recall(self, group_id: str) -> Float32s | None:
        """[T] in nats; None if this group was not trained within the window."""
        return self._logprobs.get(group_id)

    def remember(self, step: int, group_id: str, logprobs: Float32s) -> None:
        """Store the log-probs of the first use; later calls have no effect."""
        if group_id not in self._logprobs:
            self._logprobs[group_id] = logprobs
            self._steps[group_id] = step

    def drop_before(self, step: int) -> None:
        """Drop groups that cannot be reused at `step` or later."""
        for group_id in [found for found, used in self._steps.items() if used < step - self._window]:
            del self._logprobs[group_id], self._steps[group_id]

    @property
    def columns(self) -> Mapping[str, Float32s]:
        """Group id -> log-probs, for a checkpoint."""
        return self._logprobs

    @property
    def steps(self) -> Mapping[str, int]:
        """Group id -> step of first use, for a checkpoint."""
        return self._steps

    def load(self, columns: Mapping[str, Float32s], steps: Mapping[str, int]) -> None:
        """Load from a checkpoint."""
        self._logprobs, self._steps = dict(columns), dict(steps)


def known_anchors(batch: Batch, columns: Columns, settings: LossConfig, memory: GenerationMemory) -> Float32s:
    """[M] anchors as far as they are known before the policy is asked; NaN elsewhere."""
    if settings.ratio_mode in ("direct", "interpolated"):
        return columns.rollout_logprobs_M.copy()
    anchors_M = np.full(len(columns.token_ids_M), np.nan, dtype=np.float32)
    if settings.ratio_mode == "official":
        for entry, span in zip(batch.entries, token_spans(batch), strict=True):
            remembered = memory.recall(entry.group.group_id)
            if remembered is not None:
                anchors_M[span] = remembered
    return anchors_M


def policy_shares(batch: Batch, columns: Columns, settings: LossConfig) -> Float32s | None:
    """[M] a of ratio mode `interpolated`: how far its anchor lies from alpha to the policy. None in other modes.

    AReaL's `prox_logp_method = "loglinear"`: a = (v_prox - v_alpha) / (v_theta - v_alpha) with v_prox = v_theta - 1, in
    [0, 1], where v is the version that sampled the token and v_theta that of the step. So a is 0 for a token that is 0
    or 1 versions old, 1/2 for 2, 2/3 for 3. An expert's token was sampled by none: its anchor is the policy itself.
    """
    if settings.ratio_mode != "interpolated":
        return None
    versions_M = np.concatenate([entry.group.token_versions for entry in batch.entries])
    age_M = np.maximum(batch.step - versions_M.astype(np.float32), 1.0)
    shares_M: Float32s = (age_M - 1.0) / age_M
    shares_M[np.repeat(columns.expert_R, columns.lengths_R)] = 1.0
    return shares_M


def remember_anchors(batch: Batch, anchors_M: Float32s, settings: LossConfig, memory: GenerationMemory) -> None:
    """After a step: store pi_gen of its groups for reuse, drop old ones."""
    if settings.ratio_mode != "official":
        return
    for entry, span in zip(batch.entries, token_spans(batch), strict=True):
        if not np.isnan(anchors_M[span]).any():  # a group without contribution to the loss was not evaluated
            memory.remember(batch.step, entry.group.group_id, anchors_M[span].copy())
    memory.drop_before(batch.step + 1)


class Reference:
    """pi_ref of the KL term: the frozen base model, until a restart replaces it by the policy (ReMix)."""

    def __init__(self, policy: Policy, settings: LossConfig) -> None:
        """`policy`: frozen, with the weights of the base model."""
        self.policy = policy
        self._settings = settings
        self._replaced = False

    def begin_step(self, step: int, trained: Policy) -> None:
        """After step T, once: copy the weights of the policy at the beginning of this step."""
        restart = self._settings.kl_restart_step
        if restart is None or step <= restart or self._replaced:
            return
        copy_parameters(trained, self.policy)
        self._replaced = True
        log.info("step %d the KL reference is now the policy of this step", step)

    def share(self, step: int) -> float:
        """Weight of KL(pi_theta | pi_ref) in the KL term; the rest is to pi_theta_t."""
        if self._settings.kl_ref != "convex" or self._replaced:
            return 1.0
        return reference_share(step)

    def tensors(self) -> dict[str, Tensor]:
        """State for a checkpoint; empty while it is the base model."""
        if not self._replaced:
            return {}
        reshard(self.policy)
        return weights_of(self.policy.model)

    def load(self, stored: StoredShards) -> None:
        """Load from a checkpoint."""
        stored.load(weights_of(self.policy.model))
        self._replaced = True


# Coefficients that change with the step.

FULL_UNTIL = 50
"""Last step at which the base model has the whole share."""
STEPS_PER_STAGE = 10
LOSS_PER_STAGE = 0.1
MIN_SHARE = 0.5


def reference_share(step: int) -> float:
    """lambda(t) = max(1 - 0.1 ceil(max(t - 50, 0) / 10), 0.5): ReMix's share of the KL to the base model."""
    stages = math.ceil(max(step - FULL_UNTIL, 0) / STEPS_PER_STAGE - TOLERANCE)
    return max(1.0 - LOSS_PER_STAGE * stages, MIN_SHARE)
