"""How far a policy pi is from the policy alpha that sampled, from log-probs alone (docs/paper.md, Eqs. 9, 10).

Estimators take y ~ alpha: d = log pi - log alpha on response tokens, rho = e^d; D = sum of d over one response,
W = e^D.

    tokens [T] --`response_gaps`, the only pass over tokens--> responses [R] --`group_gaps`--> groups [P]
                                                                   \\--`pooled`--> one number for all

The unit of the theorem is the prompt x, so spreads (p50, p95, max) are over groups, and pooled numbers over responses.
Each response stands for itself, so nothing depends on the order of responses or on who computed them.

Does not cover: groups that were chosen for their rewards, or that pi was trained on before (docs/paper.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MAX_LOG_RATIO = 20.0
"""d is clamped to +-20 nats, so that e^d stays finite and one token cannot be the whole estimate. D is not: the
weights of long responses differ by their ratio, also where each of them is tiny."""
BLOCK_TOKENS = 32768
"""Tokens per pass: 256 KiB per column stay in the cache of one core, which is three times faster than all at once."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ResponseGaps:
    """What the tokens of each response add up to; every field [R]."""

    num_tokens: Floats
    log_weight: Floats
    """D: log of the importance weight W of the response; e^D may overflow."""
    tv_sum: Floats
    """Sum of |rho - 1| / 2."""
    kl_fwd: Floats
    """Sum of (rho - 1 - d) >= 0: unbiased for KL(alpha || pi) of the sequence."""
    kl_rev: Floats
    """Sum of (rho d - rho + 1) >= 0: unbiased per token for KL(pi || alpha)."""
    rho_sum: Floats
    rho_square_sum: Floats
    rho_max: Floats

    def __len__(self) -> int:
        return len(self.num_tokens)

    def of(self, chosen: NDArray[Any]) -> Self:
        return type(self)(**{field.name: getattr(self, field.name)[chosen] for field in fields(self)})

    @property
    def tv_seq(self) -> Floats:
        """|W - 1| / 2, with W at most e^20: means of it are reported as at most 1."""
        weight: Floats = np.exp(np.minimum(self.log_weight, MAX_LOG_RATIO))
        return 0.5 * np.abs(weight - 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupGaps:
    """Estimates for each prompt, from the responses of its group; every field [P]."""

    tv_tok: Floats
    tv_seq: Floats
    """Mean of |W - 1| / 2, at most 1."""
    tv_union: Floats
    kl_fwd: Floats
    kl_rev: Floats
    delta: Floats
    """min(tv_bh, tv_union): the smaller of two upper bounds of TV(pi(.|x), alpha(.|x)), hence at most 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergences:
    """One number for all responses; nats, and total variation in [0, 1] except for tv_union."""

    tv_tok: float
    """Mean over tokens of |rho - 1| / 2: unbiased for the per-token TV."""
    tv_seq: float
    """Mean over responses of |W - 1| / 2: unbiased for the sequence TV, heavy-tailed; at most 1 is reported."""
    tv_union: float
    """Mean over responses of the summed token TV: never below the sequence TV, in expectation."""
    tv_pinsker: float
    """sqrt(KL / 2): upper bound of the sequence TV."""
    tv_bh: float
    """sqrt(1 - e^-KL), Bretagnolle-Huber: upper bound that never exceeds 1."""
    kl_fwd: float
    """Mean over responses."""
    kl_rev: float
    """Mean over responses."""
    kl_rev_tok: float
    """The same, as a mean over tokens."""
    ess: float
    """Effective sample size of the weights W, as a fraction of R."""
    ess_tok: float
    """Effective sample size of the token ratios rho, as a fraction of T."""
    max_ratio: float
    """Largest rho of a token."""


def response_gaps(logp: NDArray[Any], rollout_logprobs: NDArray[Any], lengths: NDArray[Any]) -> ResponseGaps:
    """One pass over all tokens.

    Args:
        logp: [T] log pi(y_t | .); rollout_logprobs: [T] log alpha(y_t | .); lengths: [R] tokens per response, all >= 1.
    Raises: ValueError when the shapes contradict each other.
    """
    if logp.shape != rollout_logprobs.shape or int(np.sum(lengths)) != logp.size:
        raise ValueError(f"{logp.shape} log-probs against {rollout_logprobs.shape}, in {int(np.sum(lengths))} tokens")
    if logp.size == 0 or int(np.min(lengths)) < 1:
        raise ValueError("divergences need at least one response, and a token in each")
    ends = np.cumsum(lengths, dtype=np.int64)
    blocks = [
        _sums(logp[start:end], rollout_logprobs[start:end], starts - start)
        for start, end, starts in _blocks(ends - lengths, ends)
    ]
    num_tokens = np.asarray(lengths, dtype=np.float64)
    log_weight, tv_sum, kl_fwd, kl_rev, rho_sum, rho_square_sum, rho_max = np.concatenate(blocks, axis=1)
    return ResponseGaps(
        num_tokens=num_tokens,
        log_weight=log_weight,
        tv_sum=tv_sum,
        kl_fwd=kl_fwd,
        kl_rev=kl_rev,
        rho_sum=rho_sum,
        rho_square_sum=rho_square_sum,
        rho_max=rho_max,
    )


def _blocks(starts: NDArray[Any], ends: NDArray[Any]) -> Iterator[tuple[int, int, NDArray[Any]]]:
    """(first token, token after the last, where each response begins) of about BLOCK_TOKENS, in whole responses."""
    first = 0
    while first < len(starts):
        behind = max(first + 1, int(np.searchsorted(ends, starts[first] + BLOCK_TOKENS, side="right")))
        yield int(starts[first]), int(ends[behind - 1]), starts[first:behind]
        first = behind


def _sums(logp: NDArray[Any], rollout_logprobs: NDArray[Any], starts: NDArray[Any]) -> Floats:
    """[7, R] sums over the tokens of each response; rho is kept in float64, because rho - 1 - d cancels."""

    def per_response(tokens: Floats) -> Floats:
        return np.asarray(np.add.reduceat(tokens, starts), dtype=np.float64)

    d = np.subtract(logp, rollout_logprobs, dtype=np.float64)
    np.clip(d, -MAX_LOG_RATIO, MAX_LOG_RATIO, out=d)
    rho = np.exp(d)
    excess = rho - 1
    d_sum, excess_sum = per_response(d), per_response(excess)
    rho_max = np.maximum.reduceat(rho, starts)
    rho_sum, rho_square_sum = per_response(rho), per_response(rho * rho)
    rho_d_sum = per_response(np.multiply(rho, d, out=rho))
    # Both are sums of terms >= 0; what is below 0 is rounding.
    kl_fwd, kl_rev = np.maximum(excess_sum - d_sum, 0.0), np.maximum(rho_d_sum - excess_sum, 0.0)
    tv_sum = 0.5 * per_response(np.abs(excess, out=excess))
    return np.stack((d_sum, tv_sum, kl_fwd, kl_rev, rho_sum, rho_square_sum, rho_max))


def group_gaps(gaps: ResponseGaps, group_R: NDArray[Any]) -> GroupGaps:
    """Estimates for each prompt.

    Args:
        group_R: [R] group of each response; the responses of a group lie together.
    """
    starts = np.flatnonzero(np.concatenate(([True], group_R[1:] != group_R[:-1])))
    sizes = np.diff(np.concatenate((starts, [len(group_R)])))

    def mean(values_R: Floats) -> Floats:
        return np.asarray(np.add.reduceat(values_R, starts) / sizes, dtype=np.float64)

    tv_union, kl_fwd = mean(gaps.tv_sum), mean(gaps.kl_fwd)
    return GroupGaps(
        tv_tok=tv_union / mean(gaps.num_tokens),
        tv_seq=np.minimum(mean(gaps.tv_seq), 1.0),
        tv_union=tv_union,
        kl_fwd=kl_fwd,
        kl_rev=mean(gaps.kl_rev),
        delta=np.minimum(bretagnolle_huber(kl_fwd), tv_union),
    )


def pooled(gaps: ResponseGaps) -> Divergences:
    """One number for all responses of `gaps`, of which there is at least one."""
    num_tokens = float(gaps.num_tokens.sum())
    kl = float(gaps.kl_fwd.mean())
    return Divergences(
        tv_tok=float(gaps.tv_sum.sum() / num_tokens),
        tv_seq=min(1.0, float(gaps.tv_seq.mean())),
        tv_union=float(gaps.tv_sum.mean()),
        tv_pinsker=math.sqrt(kl / 2),
        tv_bh=float(bretagnolle_huber(kl)),
        kl_fwd=kl,
        kl_rev=float(gaps.kl_rev.mean()),
        kl_rev_tok=float(gaps.kl_rev.sum() / num_tokens),
        ess=effective_share(gaps.log_weight),
        ess_tok=float(gaps.rho_sum.sum() ** 2 / (num_tokens * gaps.rho_square_sum.sum())),
        max_ratio=float(gaps.rho_max.max()),
    )


def effective_share(log_weight: Floats) -> float:
    """(sum W)^2 / (n sum W^2) of n >= 1 weights W = e^log_weight: 1/n (one counts) .. 1 (all count alike)."""
    weight = np.exp(log_weight - log_weight.max())  # a common factor changes nothing
    return float(weight.sum() ** 2 / (len(weight) * (weight**2).sum()))


def bretagnolle_huber(kl: Any) -> Any:
    """sqrt(1 - e^-KL) >= TV, for a number or an array."""
    return np.sqrt(-np.expm1(-np.asarray(kl, dtype=np.float64)))
