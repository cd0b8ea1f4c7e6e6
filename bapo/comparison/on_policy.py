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
    return not any(
        is_stored or step - fate.policy_version > MOST_STALENESS or not_its_own(fate)
        for run in method.runs
        for step, fate, is_stored in trained(run)
    )


def trained(run: Measured) -> Iterator[tuple[int, Fate, bool]]:
    """(step, fate, whether an earlier step has looked at it already) of every group of which rows trained.

    Such stored groups are X3 of BAPO, and the rows that RePO and ARPO put into items of X1.
    """
    seen: set[str] = set()
    for step, fates in run.groups:
        yield from ((step, fate, fate.group_id in seen) for fate in fates if fate.origin is not None)
        seen.update(fate.group_id for fate in fates)


def not_its_own(fate: Fate) -> bool:
    """Rows that no policy of ours sampled: an expert's."""
    return fate.kind == "sft" or Outcome.EXPERT in fate.outcomes
