"""What a run loses, in a sentence each: groups whose verifier failed, truncated responses, dropped groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from bapo.core.text import percent
from bapo.tasks.grading.pool import UngradedError, VerifierKilledError, VerifierRaisedError, VerifierTimeoutError

VERIFIER_REASONS = {
    error.reason for error in (UngradedError, VerifierKilledError, VerifierRaisedError, VerifierTimeoutError)
}


def losses(counters: Mapping[str, int], metrics: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """(what, how many with the rate and the commonest reason); nothing for a run that has lost nothing.

    Args:
        counters: events of the buffer since the run began, as `GET /counters` answers.
        metrics: rows of metrics.jsonl.
    """
    failed, pushed = _by_reason(counters, "failed_groups"), _by_reason(counters, "pushed_groups")
    num_tried = failed.total() + pushed.total()
    verifiers = Counter({reason: number for reason, number in failed.items() if reason in VERIFIER_REASONS})
    dropped = _by_reason(counters, "dropped_groups") + _by_reason(counters, "dropped_requests")
    for what, lost in (("verifiers", verifiers), ("failed", failed - verifiers), ("dropped", dropped)):
        if lost:
            ((reason, number),) = lost.most_common(1)
            rate = percent(lost.total() / max(num_tried, lost.total()))
            yield what, f"{lost.total()} of {num_tried} groups ({rate}), most often {reason} ({number})"
    rows = [row for row in metrics if row.get("num_responses")]
    if num_truncated := sum(row["num_truncated"] for row in rows):
        num_responses = sum(row["num_responses"] for row in rows)
        rate = percent(num_truncated / num_responses)
        yield "truncated", f"{num_truncated} of {num_responses} responses ({rate}), by rollout.max_response_tokens"


def _by_reason(counters: Mapping[str, int], event: str) -> Counter[str]:
    """Reason -> count of the counters `event:reason`."""
    return Counter({key.partition(":")[2]: number for key, number in counters.items() if key.startswith(f"{event}:")})
