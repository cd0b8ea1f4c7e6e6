"""The interface of policy losses, per response token of one micro-batch, and their lookup by name.

Suffixes: M response tokens, R responses of the micro-batch, concatenated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bapo.algorithms.methods import LOSS, Method, own_settings
from bapo.config.objective import LossConfig

if TYPE_CHECKING:
    from torch import Tensor


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
        return self.sum(like.new_ones(like.shape))

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


class PolicyLoss(Method, ABC):
    """Base class of losses. A response's loss may be distributed over its tokens in any way, because every aggregation
    gives them equal weights."""

    takes_weight = True
    """Whether the importance weight anchor / alpha may multiply it; false if its ratio already is the correction."""
    needs_bounds = False
    """Whether clip_low and clip_high must be numbers."""
    ratio_modes: tuple[str, ...] = ("direct", "official", "decoupled", "interpolated")
    """The values of `loss.ratio_mode` whose anchor it can use."""
    always_counts = False
    """Whether it depends on responses with advantage 0."""
    whole_minibatch = False
    """Whether `fitted` needs the log-probs of the mini-batch before its first pass."""

    def __init__(self, settings: LossConfig, own: Any = None) -> None:
        """`own`: its Settings; None: their defaults."""
        self._settings = settings
        self._own = own or self.Settings()

    @classmethod
    def check(cls, config: Any, own: Any) -> Iterator[str]:
        """What it declares above; extend it for more."""
        del own
        loss = config.loss
        if not cls.takes_weight and loss.importance_level != "none":
            yield (
                f"loss.name = {loss.name} has no importance weight in addition to its ratio; set "
                "loss.importance_level = none"
            )
        if loss.ratio_mode not in cls.ratio_modes:
            yield (
                f"loss.name = {loss.name} has no use for the anchor of loss.ratio_mode = {loss.ratio_mode}; set "
                f"loss.ratio_mode = {cls.ratio_modes[0]}"
            )
        if cls.needs_bounds and None in (loss.clip_low, loss.clip_high):
            yield f"loss.name = {loss.name} needs both bounds; set loss.clip_low and loss.clip_high to numbers"

    @abstractmethod
    def surrogate(self, logprobs_M: Tensor, anchor_M: Tensor, inputs: TokenInputs) -> Surrogate:
        """The loss of each token.

        Args:
            logprobs_M: log-probs of the policy.
            anchor_M: as in `inputs`, with NaN replaced by the policy's log-probs, detached.
        """

    def fitted(self, logprobs_M: Tensor, anchor_M: Tensor, inputs: TokenInputs) -> PolicyLoss:
        """The loss fitted to one mini-batch from all computed tokens on all ranks; identical on every rank."""
        return self

    @property
    def facts(self) -> Mapping[str, float]:
        """Values of a fitted loss to log."""
        return {}


def load_loss(settings: LossConfig) -> PolicyLoss:
    """The loss `settings.name` with its own settings.

    Raises: ConfigError if there is none of that name, or one of its settings is wrong.
    """
    kind: type[PolicyLoss] = LOSS.find(settings.name)
    return kind(settings, own_settings(LOSS, kind.Settings, settings.options))
