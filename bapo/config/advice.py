"""Which settings advice may name: only those that the method of a run has, and that can still be lowered.

One table: setting -> whether it can be lowered. Every alarm, warning and hint that says "lower ..." asks it.
"""

from __future__ import annotations

from collections.abc import Callable

from bapo.config.tree import Config

CAN_BE_LOWERED: dict[str, Callable[[Config], bool]] = {
    "algorithm.max_reevaluated": lambda c: c.algorithm.use_x2 and c.algorithm.most_reevaluated > 1,
    "cadence.weight_sync_interval": lambda c: c.cadence.weight_sync_interval > 1,
    "cadence.max_steps_ahead": lambda c: c.cadence.max_steps_ahead > c.continuation_steps,
    "learner.lr": lambda c: c.learner.lr > 0,
    "learner.microbatch_tokens": lambda c: c.learner.microbatch_tokens > c.rollout.max_response_tokens,
    "rollout.num_workers": lambda c: c.rollout.num_workers > 1,
    "rollout.max_groups_in_flight": lambda c: (c.rollout.max_groups_in_flight or 2) > 1,
    "checkpoint.keep_last": lambda c: c.checkpoint.keep_last > 1,
    "checkpoint.keep_best": lambda c: c.checkpoint.keep_best > 0,
}


def lower(config: Config, *keys: str) -> str:
    """ "lower a, b or c" of the settings that can be lowered; empty if none can. What a method's part names for itself
    (`Composer.ages_by`) can."""
    left = [key for key in keys if key not in CAN_BE_LOWERED or CAN_BE_LOWERED[key](config)]
    return f"lower {' or '.join([', '.join(left[:-1]), left[-1]] if len(left) > 1 else left)}" if left else ""
