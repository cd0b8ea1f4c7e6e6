"""The interface of policy losses, per response token of one micro-batch, and their lookup by name.

Suffixes: M response tokens, R responses of the micro-batch, concatenated.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from bapo.config.objective import LossConfig


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Maps tokens to responses. A micro-batch contains only whole responses."""

    index_M: Tensor
    """[M] int64 from 0 to R - 1."""
    count: int
    """R."""

    def sum(self, values_M: Tensor) -> Tensor:
        """[R] sums over the tokens of each response."""
        return values_M.new_zeros(self.count).index_add(0, self.index_M, values_M)

    def mean(self, values_M: Tensor) -> Tensor:
        """[R] means over the tokens of each response."""
        return self.sum(values_M) / self.lengths(values_M)

    def lengths(self, like: Tensor) -> Tensor:
        """[R] tokens of each response, with the dtype and device of `like`."""
        return self.sum(torch.ones_like(like))

    def spread(self, values_R: Tensor) -> Tensor:
        """[M] the value of the response that each token belongs to."""
        return values_R.index_select(0, self.index_M)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenInputs:
    """Inputs of the loss per response token, in addition to the policy. All [M], float32 unless stated."""

    rows: Rows
    anchor_M: Tensor
    """NaN: not known, because this pass is the first at theta_t, so the policy itself is the anchor. In ratio mode
    `interpolated` the end of the line at alpha."""
    rollout_M: Tensor
    """log alpha; 0 for an expert's token."""
    reference_M: Tensor | None
    """log pi_ref; None if the KL term does not need it."""
    advantage_M: Tensor
    weight_M: Tensor
    """Weight in the loss of the mini-batch (`aggregation.token_weights`)."""
    expert_M: Tensor
    """bool: expert token, not sampled by a policy."""
    reference_share: float = 1.0
    """Share of the KL term to pi_ref in kl_ref = convex; the rest is to pi_theta_t."""
    policy_share_M: Tensor | None = None
    """How far the anchor lies between `anchor_M` (0) and the policy (1), in log-probs; None: at `anchor_M`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Surrogate:
    """Output of a loss per token, before importance weight, KL and entropy. All [M] float32."""

    loss_M: Tensor
    """Differentiable with respect to the policy's log-probs only."""
    ratio_M: Tensor
    """rho, detached, for logging."""
    clipped_M: Tensor
    """1 where clipping changed the objective."""


class PolicyLoss:
    """Base class of losses. A response's loss may be distributed over its tokens in any way, because every aggregation
    gives them equal weights."""

    whole_minibatch = False
    """Whether `fitted` needs the log-probs of the mini-batch before its first pass."""

    def surrogate(self, logprobs_M: Tensor, anchor_M: Tensor, inputs: TokenInputs) -> Surrogate:
        """The loss of each token.

        Args:
            logprobs_M: log-probs of the policy.
            anchor_M: as in `inputs`, with NaN replaced by the policy's log-probs, detached.
        """
        raise NotImplementedError

    def fitted(self, logprobs_M: Tensor, anchor_M: Tensor, inputs: TokenInputs) -> PolicyLoss:
        """The loss fitted to one mini-batch from all computed tokens on all ranks; identical on every rank."""
        return self

    @property
    def facts(self) -> Mapping[str, float]:
        """Values of a fitted loss to log."""
        return {}


def load_loss(settings: LossConfig) -> PolicyLoss:
    """Load `learner/losses/<settings.name>.py`. Unknown names were rejected by the config."""
    module: Any = importlib.import_module(f"learner.losses.{settings.name}")
    return cast(PolicyLoss, module.make_loss(settings))
