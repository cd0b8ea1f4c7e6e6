"""Is a difference real? Intervals over seeds and prompts. No library, no resampling.

`crossed`        mean of a seeds x prompts table and its 95 % interval when both are samples: every seed was measured on
                 the same prompts, so the two are crossed factors.  Var = (MS_seed + MS_prompt - MS_rest) / (S P), with
                 Student's t at Satterthwaite's degrees of freedom. With one seed: over prompts alone.
`weighted`       the same for a mean in which prompts have weights, measured ones too: the ratio is made linear first.

`holm`           p values corrected for all comparisons that are looked at together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bapo.core.statistics import Estimate

TAIL = 0.975
"""Of a 95 % interval."""


@dataclass(frozen=True, slots=True)
class Tested(Estimate):
    """A mean with its 95 % interval, and the two-sided p value of the mean being 0."""

    p: float


def crossed(table: Sequence[Sequence[float]]) -> Tested:
    """Mean and 95 % interval over seeds and prompts.

    Args:
        table: [S][P] outcome of each prompt with each seed; the same prompts in the same order for all seeds.
    Raises: ValueError when it is empty or its rows have other lengths.
    """
    num_seeds, num_prompts = len(table), len(table[0]) if table else 0
    if num_prompts == 0 or any(len(row) != num_prompts for row in table):
        raise ValueError(f"all {num_seeds} seeds must have the same prompts, got {[len(row) for row in table]}")
    mean = sum(map(sum, table)) / (num_seeds * num_prompts)
    variance, freedom = _variance(table, mean)
    deviation = math.sqrt(variance)
    half = student_quantile(TAIL, freedom) * deviation
    return Tested(mean, mean - half, mean + half, _p_value(mean, deviation, freedom))


def _p_value(mean: float, deviation: float, freedom: float) -> float:
    """P(|T| >= |mean| / deviation), not as 1 - P: that would be 0 below 1e-16. 1 without spread."""
    if not deviation:
        return 1.0
    return incomplete_beta(freedom / (freedom + (mean / deviation) ** 2), freedom / 2, 0.5)


def holm(p_values: Sequence[float]) -> list[float]:
    """The p values times the number of hypotheses that are left when each is reached in ascending order (Holm 1979).

    Example: .01, .04 and .03 become .03, .06 and .06.
    """
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    corrected, largest = [0.0] * len(p_values), 0.0
    for place, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - place) * p_values[i]))
        corrected[i] = largest
    return corrected


def weighted(table: Sequence[Sequence[float]], weights: Sequence[float]) -> Tested:
    """R = sum of outcomes / sum of weights, with its 95 % interval over seeds and prompts.

    To first order R is the mean of R + (x - R w) / mean(w), so that table goes to `crossed`: prompts, with what their
    weights happened to be, are the sample.

    Args:
        table: [S][P] x, outcomes that are already multiplied by their prompts' weights. weights: [P] w >= 0.
    Raises: ValueError when all weights are 0, or as `crossed`.
    """
    mean_weight = sum(weights) / len(weights) if weights else 0.0
    if mean_weight <= 0.0:
        raise ValueError("all prompt weights are 0")
    ratio = sum(map(sum, table)) / (len(table) * sum(weights))
    return crossed(
        [[ratio + (x - ratio * w) / mean_weight for x, w in zip(row, weights, strict=True)] for row in table]
    )


def student_quantile(share: float, freedom: float) -> float:
    """The value below which Student's t with `freedom` degrees of freedom (need not be whole) lies with this share."""
    low, high = 0.0, 1e3
    for _ in range(200):
        middle = (low + high) / 2
        if student_cdf(middle, freedom) < share:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def student_cdf(t: float, freedom: float) -> float:
    """P(T <= t) for t >= 0: 1 - I_x(freedom / 2, 1 / 2) / 2 with x = freedom / (freedom + t^2)."""
    return 1 - incomplete_beta(freedom / (freedom + t * t), freedom / 2, 0.5) / 2


def incomplete_beta(x: float, a: float, b: float) -> float:
    """I_x(a, b), the regularised incomplete beta function, by its continued fraction (Abramowitz-Stegun 26.5.8)."""
    if x <= 0.0 or x >= 1.0:
        return float(x >= 1.0)
    if x > (a + 1) / (a + b + 2):  # where the fraction converges fast
        return 1 - incomplete_beta(1 - x, b, a)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    value = 1.0
    for m in range(200, 0, -1):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        value = 1 + even / (1 + odd / value)
    first = -(a + b) * x / (a + 1)
    return math.exp(log_front) / a / (1 + first / value)


def _variance(table: Sequence[Sequence[float]], mean: float) -> tuple[float, float]:
    """Var(grand mean) and its degrees of freedom, from the two-way table without repetition."""
    S, P = len(table), len(table[0])
    seeds = [sum(row) / P for row in table]
    prompts = [sum(row[j] for row in table) / S for j in range(P)]
    if P == 1:
        raise ValueError("at least two prompts are required")
    ms_prompt = S * sum((value - mean) ** 2 for value in prompts) / (P - 1)
    if S == 1:
        return ms_prompt / P, P - 1
    ms_seed = P * sum((value - mean) ** 2 for value in seeds) / (S - 1)
    rest = sum((table[i][j] - seeds[i] - prompts[j] + mean) ** 2 for i in range(S) for j in range(P))
    ms_rest = rest / ((S - 1) * (P - 1))
    # Chance can make the sum smaller than its largest part; the interval never shrinks below that part.
    total = max(ms_seed + ms_prompt - ms_rest, ms_seed, ms_prompt)
    if total <= 0.0:
        return 0.0, S - 1
    freedom = total**2 / (ms_seed**2 / (S - 1) + ms_prompt**2 / (P - 1) + ms_rest**2 / ((S - 1) * (P - 1)))
    return total / (S * P), max(1.0, freedom)
