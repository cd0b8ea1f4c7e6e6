"""Balanced clipping (Xi et al., arXiv 2510.18927, also called BAPO): clip bounds searched for each mini-batch.

The bounds of the ratio start narrow and widen until the tokens with A > 0 contribute enough:

    metric     contribution of a token                       share                    order of the search
    paper      alpha |min(r A, clip(r) A)|; upper for A > 0   positive / all          c_high to its end, then c_low
    code       |min(r A, clip(r) A)|                          positive / negative     c_low to its end, then c_high
    gradient   r |A| where the clip lets a gradient through   positive / all          c_high to its end, then c_low

The search uses all tokens of the mini-batch on all ranks; the bounds apply to all of its passes. The loss is
dual-clipped PPO with clip(r, c_low, c_high).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from bapo.config.objective import LossConfig
from learner.losses.base import PolicyLoss, Surrogate, TokenInputs
from learner.losses.ratios import clipped_surrogate, dual_clipped, ratio

TIE = 1e-9
"""A metric this close to the target meets it, except for `code`: the released code accumulates its steps, which ends
just below."""

if TYPE_CHECKING:
    from torch import Tensor


class SearchSettings(PolicyLoss.Settings):
    """Of the search; the defaults are the paper's."""

    metric: Literal["paper", "code", "gradient"] = "paper"
    """What is searched for."""
    target: float = Field(0.4, gt=0)
    """Value of the metric at which the search ends."""
    low: tuple[float, float, float] = (0.6, 0.9, 0.02)
    """Lower bound of the ratio: [from, to, step]."""
    high: tuple[float, float, float] = (1.2, 3.0, 0.05)
    """Upper bound of the ratio: [from, to, step]."""

    @model_validator(mode="after")
    def bounds_can_move(self) -> Self:
        for key, (start, stop, step) in {"low": self.low, "high": self.high}.items():
            if not 0 <= start <= stop or step <= 0:
                raise ValueError(
                    f"{key} = [{start}, {stop}, {step}]: must be [from, to, step] with from <= to and step > 0"
                )
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Result of a search."""

    low: float
    high: float
    metric: float
    """Metric at these bounds."""
    num_evaluations: int


class BalancedClip(PolicyLoss):
    """The loss `balanced_clip`; before fitting, its bounds are the start of the search."""

    ignores = ("loss.clip_low", "loss.clip_high")
    whole_minibatch = True

    class Settings(SearchSettings):
        """Those of the search."""

    _own: SearchSettings

    def __init__(self, settings: LossConfig, own: SearchSettings, bounds: Bounds | None = None) -> None:
        super().__init__(settings, own)
        self._bounds = bounds
        self._low = bounds.low if bounds else own.low[0]
        self._high = bounds.high if bounds else own.high[0]

    def surrogate(self, logprobs_M: Tensor, anchor_M: Tensor, inputs: TokenInputs) -> Surrogate:
        """Token by token."""
        ratio_M = ratio(logprobs_M, anchor_M)
        loss_M, clipped_M = clipped_surrogate(ratio_M, inputs.advantage_M, self._low, self._high)
        loss_M, clipped_M = dual_clipped(loss_M, clipped_M, inputs.advantage_M, self._settings.dual_clip)
        return Surrogate(loss_M=loss_M, ratio_M=ratio_M.detach(), clipped_M=clipped_M)

    def fitted(self, logprobs_M: Tensor, anchor_M: Tensor, inputs: TokenInputs) -> BalancedClip:
        """The loss with the bounds for this mini-batch."""
        found = search(ratio(logprobs_M, anchor_M), inputs.advantage_M, inputs.rollout_M.exp(), self._own)
        return BalancedClip(self._settings, self._own, found)

    @property
    def facts(self) -> Mapping[str, float]:
        """The bounds and their metric; with `code` the latter is infinite without incorrect responses."""
        found = self._bounds
        if found is None:
            return {}
        bounds = {"clip_low": found.low, "clip_high": found.high}
        return bounds | ({"balance": found.metric} if math.isfinite(found.metric) else {})


def search(ratio_M: Tensor, advantage_M: Tensor, rollout_M: Tensor, settings: SearchSettings) -> Bounds:
    """The first bounds whose metric reaches the target, or the last ones.

    Args:
        ratio_M: pi_theta / anchor.
        rollout_M: alpha, the probability that each token was sampled with.
    """
    reached, number = 0.0, 0
    low, high = settings.low[0], settings.high[0]
    for number, (low, high) in enumerate(_path(settings), start=1):  # noqa: B007 - the last pair is the answer
        reached = balance(settings.metric, ratio_M, advantage_M, rollout_M, low, high)
        if reached > settings.target + (TIE if settings.metric == "code" else -TIE):
            break
    return Bounds(low=low, high=high, metric=reached, num_evaluations=number)


def balance(metric: str, ratio_M: Tensor, advantage_M: Tensor, rollout_M: Tensor, low: float, high: float) -> float:
    """Contribution of the tokens with A > 0 at these bounds, in float64. Infinite (`code`) without a negative one, 1
    if no token contributes."""
    ratio_M, advantage_M, rollout_M = ratio_M.double(), advantage_M.double(), rollout_M.double()
    positive_M, negative_M = advantage_M > 0, advantage_M < 0
    if metric == "gradient":
        size_M = ratio_M * advantage_M.abs() * ((positive_M & (ratio_M <= high)) | (negative_M & (ratio_M >= low)))
    else:
        gain_M = (ratio_M * advantage_M).minimum(ratio_M.clamp(low, high) * advantage_M)
        size_M = gain_M.abs() * (rollout_M if metric == "paper" else 1.0)
    positive, negative = float(size_M[positive_M].sum()), float(size_M[negative_M].sum())
    whole = negative if metric == "code" else positive + negative
    if whole:
        return positive / whole
    return math.inf if positive else 1.0


def _path(settings: SearchSettings) -> Iterator[tuple[float, float]]:
    """Bounds in search order; each changes one bound by one step.

    `paper` searches as long as c_low can be raised: if it is fixed, the bounds keep their initial values.
    `code` shortens a step that would exceed the range; the others skip it.
    """
    is_code = settings.metric == "code"
    lows, highs = (_grid(bound, with_end=is_code) for bound in (settings.low, settings.high))
    if is_code:
        yield from ((low, highs[0]) for low in lows)
        yield from ((lows[-1], high) for high in highs[1:])
    elif settings.metric == "paper" and len(lows) == 1:
        yield lows[0], highs[0]
    else:
        yield from ((lows[0], high) for high in highs)
        yield from ((low, highs[-1]) for low in lows[1:])


def _grid(bound: tuple[float, float, float], *, with_end: bool) -> list[float]:
    """From, from + step, ... to, without the rounding errors of repeated addition.

    Args:
        with_end: the last value is `to`, even if the steps do not end there.
    """
    start, stop, step = bound
    count = int((stop - start) / step + 1e-6)
    grid = [round(start + i * step, 10) for i in range(count + 1)]
    return [*grid, stop] if with_end and grid[-1] < stop else grid
