"""The moving window [c2, c3] of B_high (docs/paper.md, Eq. 8), its four schedules, and r_tot."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from bapo.algorithms.composer import AssemblyView
from bapo.algorithms.reward_levels import levels_within
from bapo.algorithms.settings import AlgorithmConfig
from bapo.core.types import GroupStat

log = logging.getLogger(__name__)

OFFICIAL_EASE_IN, OFFICIAL_SPAN = 0.2, 0.6
"""The authors' code moves the window only while the mean reward is in [0.2, 0.8]."""
OFFICIAL_MIN_PROMPTS = 5
"""The authors' code keeps the low ends until the buffer knows this many prompts."""


def global_mean_reward(fresh: Sequence[GroupStat], previous: float | None, decay: float) -> float:
    """r_tot: mean reward of all fresh responses of the step, before any filter (docs/paper.md, Eq. 8).

    Args:
        previous: r_tot of the step before; None at the first step.
        decay: weight of `previous` in a moving average; 0 takes this step alone.
    Raises: ZeroDivisionError if there is no fresh group.
    """
    now = sum(stat.reward_sum for stat in fresh) / sum(stat.size for stat in fresh)
    return now if previous is None else decay * previous + (1 - decay) * now


def reuse_window(settings: AlgorithmConfig, view: AssemblyView, r_tot: float) -> tuple[float, float]:
    """(c2, c3) of this step: a group of B_high may train while c2 <= mu <= c3.

    The mini-test takes mu = 1/2 alone (docs/paper.md). A window that holds no level of G snaps to the nearest one.
    """
    if settings.x3_exactly_half:
        return 0.5, 0.5
    if settings.threshold_schedule == "official":
        c2, c3 = scheduled_window(settings, official_mean_reward(view))
    else:
        c2, c3 = scheduled_window(settings, r_tot)
    return snap(c2, c3, settings.group_size)


def scheduled_window(settings: AlgorithmConfig, r_tot: float | None) -> tuple[float, float]:
    """(c2, c3) at a mean reward in [0, 1] (clipped); None stands for "not known yet": the low ends.

    eq8       c = r (high - low) + low                  as printed: rises with r, so it moves to easier groups
    inverted  c = high - r (high - low)                 as the sentence before eq. 8 says: to harder groups
    official  inverted with clip((r - 0.2) / 0.6, 0, 1) in place of r
    fixed     c = low
    """
    if r_tot is None or settings.threshold_schedule == "fixed":
        return settings.c2_range[0], settings.c3_range[0]
    share = _share_of_range(settings, min(1.0, max(0.0, r_tot)))
    c2, c3 = (low + share * (high - low) for low, high in (settings.c2_range, settings.c3_range))
    return c2, c3


def official_mean_reward(view: AssemblyView) -> float | None:
    """What the authors' code moves the window by: the mean over what the buffer holds, once it knows 5 prompts."""
    mus = [prompt.mu for prompt in view.bad] + [stat.mu for stat in view.high]
    num_prompts = len({p.prompt_id for p in view.bad} | {s.prompt_id for s in view.high})
    return sum(mus) / len(mus) if num_prompts >= OFFICIAL_MIN_PROMPTS else None


def snap(c2: float, c3: float, group_size: int) -> tuple[float, float]:
    """The window itself, or its nearest level k/G when it holds none (possible for G < 8).

    Never level 0 or G, which have no advantage.
    """
    if levels_within(c2, c3, group_size):
        return c2, c3
    k = min(group_size - 1, max(1, round(group_size * (c2 + c3) / 2)))
    log.info("no level of G=%d is in [c2=%.4f, c3=%.4f]: X3 uses k=%d", group_size, c2, c3, k)
    return k / group_size, k / group_size


def _share_of_range(settings: AlgorithmConfig, r_tot: float) -> float:
    """How far from the low to the high end: 0 to 1."""
    if settings.threshold_schedule == "eq8":
        return r_tot
    if settings.threshold_schedule == "inverted":
        return 1 - r_tot
    return 1 - min(1.0, max(0.0, (r_tot - OFFICIAL_EASE_IN) / OFFICIAL_SPAN))
