"""Whether a method's runs were on-policy, from what they trained and not from its name."""

from __future__ import annotations

from collections.abc import Iterator

from bapo.comparison.gather import Measured, Method
from bapo.types import Fate, Outcome

MOST_STALENESS = 1
"""Steps. Sampling beside the learner (`cadence.slack` = 1) uses the weights of the step before."""


def is_on_policy(method: Method) -> bool:
    """Each response trains in one step alone, once, and the policy of that step or of the one before sampled it."""
    config = method.config
    if config.cadence.v > 1 or config.cadence.slack > MOST_STALENESS or config.learner.epochs > 1:
        return False
    return not any(old or not_its_own(fate) for run in method.runs for fate, old in trained(run))


def trained(run: Measured) -> Iterator[tuple[Fate, bool]]:
    """(fate, whether it is old) of every group of which rows trained.

    Old: stored by an earlier step (X3 of BAPO, the rows that RePO and ARPO put into items of X1), or sampled by weights
    from before the latest step.
    """
    seen: set[str] = set()
    for step, fates in run.groups:
        for fate in fates:
            if fate.origin is not None:
                yield fate, fate.group_id in seen or step - fate.policy_version > MOST_STALENESS
        seen.update(fate.group_id for fate in fates)


def not_its_own(fate: Fate) -> bool:
    """Rows that no policy of ours sampled: an expert's."""
    return fate.kind == "sft" or Outcome.EXPERT in fate.outcomes
