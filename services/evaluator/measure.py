"""From the groups of one measurement to one row of evaluations.jsonl."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bapo.config.rollout import RolloutConfig
from bapo.statistics import INTERVAL, estimate
from bapo.types import Group, Outcome
from services.evaluator.plan import Target


def evaluation_row(
    split: str, target: Target, groups: Sequence[Group], *, num_asked: int, rollout: RolloutConfig
) -> dict[str, Any]:
    """Accuracy of one split with its interval, and what a comparison with another run needs to be fair.

    Args:
        groups: at least one; groups that failed for good are missing and counted as dropped, not as wrong.
    """
    found = estimate([group.mu for group in groups])
    num_tokens = sum(len(group.token_ids) for group in groups)
    num_responses = sum(group.size for group in groups)
    num_truncated = sum(int((group.outcomes == Outcome.TRUNCATED).sum()) for group in groups)
    return {
        "split": split,
        "version": target.version,
        "step": target.step,
        "accuracy": found.mean,
        "low": found.low,
        "high": found.high,
        "interval": INTERVAL,
        "num_prompts": len(groups),
        "num_dropped": num_asked - len(groups),
        "num_samples": groups[0].size,
        "truncated_share": num_truncated / num_responses,
        "mean_tokens": num_tokens / num_responses,
        "versions": [
            min(int(group.versions.min()) for group in groups),
            max(int(group.versions.max()) for group in groups),
        ],
        "seconds": round(_busy_seconds(groups), 3),
        "sampling": {
            "temperature": rollout.temperature,
            "top_p": rollout.top_p,
            "max_response_tokens": rollout.max_response_tokens,
        },
        "rewards": {group.prompt.prompt_id: [float(r) for r in group.rewards] for group in groups},
    }


def _busy_seconds(groups: Sequence[Group]) -> float:
    """From the first claim to the last graded group: waiting for workers to come up is no part of it."""
    begin = min(group.timing.claimed_at for group in groups)
    return max(g.timing.claimed_at + g.timing.sample_s + g.timing.grade_s for g in groups) - begin
