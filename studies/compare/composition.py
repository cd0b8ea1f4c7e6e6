"""What batches were made of and how training went, one number per run: what section D of the paper's claims is about.

shares of X1, X2, X3        of the items that trained (appendix A.6: X1 40 to 60 %)
stored                      of the responses that trained: those of a group that an earlier step has seen
retained                    of the fresh groups: those that trained at once (appendix A.3: 40 to 60 %)
re-evaluated, improved, solved   prompts
last entropy and length, gradient norms
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from bapo.algorithms.composer import Reason
from bapo.core.types import GroupResult, Origin, Outcome, Purpose
from studies.compare.figures import WINDOW_SHARE, response_lengths
from studies.compare.gather import Measured, Method


def share_of(run: Measured, origin: Origin) -> float | None:
    """Of the items of all batches; None where the method has no such part or nothing trained."""
    own, every = (sum(row[o.value] for row in run.metrics for o in kinds) for kinds in ((origin,), Origin))
    settings = run.config.algorithm
    is_bapo = settings.composer == "bapo"
    has_part = {Origin.X1: True, Origin.X2: is_bapo and settings.use_x2, Origin.X3: is_bapo and settings.use_x3}[origin]
    return own / every if every and (own or has_part) else None


def stored_share(run: Measured) -> float | None:
    """Of the responses that trained; None when nothing did. X3, and the old rows in items of X1 (RePO, ARPO)."""
    old = every = 0
    for _, result, is_stored in trained(run):
        rows = len(result.rewards) if result.rows is None else len(result.rows)
        every += rows
        old += rows * is_stored
    return old / every if every else None


def retained_share(run: Measured) -> float | None:
    """Of the fresh groups: those that trained in the step that they were sampled for; None without fresh groups."""
    fresh = [result for _, results in run.sampled for result in results if result.purpose is Purpose.FRESH]
    return sum(result.origin is Origin.X1 for result in fresh) / len(fresh) if fresh else None


def num_reevaluated(run: Measured) -> float | None:
    """Distinct hard prompts that were re-evaluated; None without X2, or without group records."""
    return len(_reevaluated(run, None)) if run.config.algorithm.use_x2 and run.has_groups else None


def improved_share(run: Measured) -> float | None:
    """Of the re-evaluated prompts: those that once had c1 < mu' < 1; None when none was re-evaluated."""
    return _share_of_reevaluated(run, (Reason.IMPROVED, Reason.NO_ROOM))


def solved_share(run: Measured) -> float | None:
    """Of the re-evaluated prompts: those that once had mu' = 1; None when none was re-evaluated."""
    return _share_of_reevaluated(run, (Reason.SOLVED,))


def last_entropy(run: Measured) -> float | None:
    """Nats per trained token, mean of the last twelfth of the steps; None when it was never measured."""
    return _mean_of_last([row.get("entropy") for row in run.metrics])


def last_length(run: Measured) -> float | None:
    """Tokens per fresh response, mean of the last twelfth of the steps."""
    return _mean_of_last([length for _, length in response_lengths(run)])


def gradient_norm(run: Measured, share: float) -> float | None:
    """The least gradient norm (before clipping) that this share of the steps does not exceed; 1.0: the largest."""
    norms = sorted(float(norm) for row in run.metrics if (norm := row.get("grad_norm")) is not None)
    return norms[max(0, math.ceil(share * len(norms)) - 1)] if norms else None


def _reevaluated(run: Measured, reasons: Iterable[str] | None) -> set[str]:
    return {
        result.prompt_id
        for _, results in run.sampled
        for result in results
        if result.purpose is Purpose.REEVALUATE and (reasons is None or result.reason in reasons)
    }


def _share_of_reevaluated(run: Measured, reasons: Iterable[str]) -> float | None:
    asked = _reevaluated(run, None)
    return len(_reevaluated(run, reasons)) / len(asked) if asked else None


def _mean_of_last(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    last = known[-max(1, len(known) // WINDOW_SHARE) :]
    return sum(last) / len(last) if last else None


# Whether a method's runs were on-policy, from what they trained and not from its name.

MAX_STALENESS = 1
"""Steps. Sampling next to the learner (`cadence.max_steps_ahead` = 1) uses the weights of the step before."""


def is_on_policy(method: Method) -> bool | None:
    """Each response trains in one step alone, once, and the policy of that step or of the one before sampled it.

    Returns: None when the configuration allows it, and a run has no group records.
    """
    config = method.config
    if (
        config.cadence.weight_sync_interval > 1
        or config.cadence.max_steps_ahead > MAX_STALENESS
        or config.learner.epochs > 1
    ):
        return False
    if not all(run.has_groups for run in method.runs):
        return None
    return not any(
        is_stored or step - result.policy_version > MAX_STALENESS or not_its_own(result)
        for run in method.runs
        for step, result, is_stored in trained(run)
    )


def trained(run: Measured) -> Iterator[tuple[int, GroupResult, bool]]:
    """(step, result, whether an earlier step has seen it already) of every group of which rows trained.

    Such stored groups are X3 of BAPO, and the rows that RePO and ARPO put into items of X1.
    """
    seen: set[str] = set()
    for step, results in run.groups:
        yield from ((step, result, result.group_id in seen) for result in results if result.origin is not None)
        seen.update(result.group_id for result in results)


def not_its_own(result: GroupResult) -> bool:
    return result.kind == "sft" or Outcome.EXPERT in result.outcomes
