"""What a policy loss is given and what it gives, per response token of one micro-batch; and how a name finds its loss.

Suffixes: M response tokens, R responses of the micro-batch, one after the other.
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
    """Which response each token belongs to. A micro-batch never holds a part of a response."""

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
        """[R] tokens of each response, as numbers of the kind of `like`."""
        return self.sum(torch.ones_like(like))

    def spread(self, values_R: Tensor) -> Tensor:
        """[M] the value of the response that each token belongs to."""
        return values_R.index_select(0, self.index_M)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenInputs:
    """What the loss of each response token is made of, in addition to the policy. All [M], float32 unless stated."""

    rows: Rows
    anchor_M: Tensor
    """NaN: not known, because this pass is the first at theta_t, so the policy itself is the anchor. In ratio mode
    `interpolated` the end of the line at alpha."""
    rollout_M: Tensor
    """log alpha; 0 for an expert's token."""
    reference_M: Tensor | None
    """log pi_ref; None where the KL term does not need it."""
    advantage_M: Tensor
    weight_M: Tensor
    """Of the token in the loss of the mini-batch (`aggregation.token_weights`)."""
    expert_M: Tensor
    """bool: no policy sampled it."""
    reference_share: float = 1.0
    """Share of the KL term to pi_ref in kl_ref = convex; the rest is to pi_theta_t."""
    policy_share_M: Tensor | None = None
    """How far the anchor lies between `anchor_M` (0) and the policy (1), in log-probs; None: at `anchor_M`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Surrogate:
    """What a loss gives for each token, before importance weight, KL and entropy. All [M] float32."""

    loss_M: Tensor
    """Differentiable in the policy's log-probs alone."""
    ratio_M: Tensor
    """rho, detached: for the records."""
    clipped_M: Tensor
    """1 where clipping changed the objective."""


class PolicyLoss:
    """Base of every loss. A response's loss may be given to its tokens in any shares that add up to it over equal
    token weights: the weights of one response are equal in every aggregation."""

    whole_minibatch = False
    """`fitted` needs the log-probs of the mini-batch before its first pass."""

    def surrogate(self, logprobs_M: Tensor, anchor_M: Tensor, inputs: TokenInputs) -> Surrogate:
        """The loss of each token.

        Args:
            logprobs_M: of the policy.
            anchor_M: as in `inputs`, with unknown ones replaced by the policy's own, detached.
        """
        raise NotImplementedError

    def fitted(self, logprobs_M: Tensor, anchor_M: Tensor, inputs: TokenInputs) -> PolicyLoss:
        """The loss for one mini-batch, from all of its computed tokens on all ranks; the same on every rank."""
        return self

    @property
    def facts(self) -> Mapping[str, float]:
        """What the records should say of a fitted loss."""
        return {}


def load_loss(settings: LossConfig) -> PolicyLoss:
    """The loss that `learner/losses/<settings.name>.py` makes. The configuration has refused unknown names."""
    module: Any = importlib.import_module(f"learner.losses.{settings.name}")
    return cast(PolicyLoss, module.make_loss(settings))
