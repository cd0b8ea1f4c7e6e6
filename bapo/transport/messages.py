"""The status of the buffer, as its API says it. Requests and prompts are in `bapo.core.types`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bapo.core.types import Purpose, Version


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLeases:
    """State of a worker in the buffer."""

    leased: int
    """Number of its leases."""
    silent_s: float
    """Seconds since its last call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraRound:
    """Another round of fresh groups for a step whose batch has too few groups with a gradient (DAPO)."""

    step: Version
    round: Version
    """From 2."""
    first: int
    """Index of its first prompt among all that extra rounds have requested."""
    size: int
    """Groups."""

    @property
    def prefix(self) -> str:
        """Prefix of the ids of its requests, and of no others."""
        return f"extra-{self.step:06d}-{self.round:02d}-"


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferStatus:
    """Status of the buffer, for the scheduler, the evaluator and displays."""

    run: str
    step: int
    """Step that the learner has started; 0 before its first report."""
    policy_version: int
    """Last version published by the learner; 0 before its first report."""
    assembled_step: int
    """Newest step that has a batch."""
    committed_step: int
    """Newest step that the learner has trained."""
    checkpointed_step: int
    """Newest durable checkpoint; batches up to here are released."""
    cursor: int
    """Fresh requests ever enqueued by the scheduler."""
    fresh_dropped: int
    """Fresh requests that failed permanently and must be replaced."""
    fresh_spares: int = 0
    """Of `cursor`, those beyond B per step, which replace such requests."""
    queued: dict[str, int]
    """Queued requests, by purpose."""
    leased: dict[str, int]
    """Leased requests, by purpose."""
    fresh_ready: int
    """Fresh groups that no batch has consumed."""
    reevaluated_ready: int
    """Re-evaluated groups that no batch has read."""
    num_bad: int
    """|B_bad|."""
    num_high: int
    """|B_high|."""
    r_tot: float | None
    """Of the newest batch; None before the first."""
    facts: dict[str, float]
    """What its composer reported, such as c2 and c3."""
    evaluations: dict[str, int]
    """Label -> requests that are done, or were dropped after their last attempt."""
    reevaluation_rounds: dict[int, int]
    """Step of a re-evaluation round that is not yet assembled -> its open requests."""
    workers: dict[str, WorkerLeases]
    """By worker id."""
    failures_in_a_row: int
    """Failed groups since the last stored one."""
    last_failure: str
    """Reason of the last of them."""
    num_bytes: int
    """Payload bytes of all stored groups."""
    batches: list[dict[str, Any]]
    """Compositions of the newest batches, newest last: {step, x1, x2, x3, r_tot, num_bad, num_high, ...}."""
    demand: str = ""
    """Why the next step needs another round of fresh groups; empty when it does not."""
    extra_rounds: tuple[ExtraRound, ...] = ()
    """Requested rounds of which no batch has consumed a group yet, oldest first."""
    max_staleness: int | None = None
    """Steps that a fresh group may be older than its batch; None: unknown."""

    def has_ended(self, num_steps: int) -> bool:
        """Whether the learner has reported the end of the run, after step T or before (`evaluation.patience`).

        The version counts, too: a training loop of another framework may continue past `run.num_steps`.
        """
        return self.step == num_steps + 1 and self.policy_version == self.assembled_step + 1

    def num_open(self, purpose: Purpose) -> int:
        """Requests of a purpose that are queued or leased."""
        return self.queued.get(purpose.value, 0) + self.leased.get(purpose.value, 0)

    @property
    def counts(self) -> tuple[int, ...]:
        """Numbers that change with progress: a group arrived or a batch was assembled.

        Claims and returned leases are no progress: a worker that dies after each claim completes nothing.
        """
        return (
            self.assembled_step,
            self.fresh_ready,
            self.reevaluated_ready,
            sum(self.reevaluation_rounds.values()),
            sum(self.evaluations.values()),
        )
