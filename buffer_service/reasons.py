"""Why a batch is not there yet, in one line for people: who waits for whom."""

from __future__ import annotations

from bapo.config.tree import Config
from bapo.messages import BufferStatus
from buffer_service.values import Readiness

SILENT_S = 10.0
"""A worker that holds requests and said nothing for so long is named."""


def must_wait_for_round(step: int, config: Config) -> bool:
    """Whether step t needs the answers of its own re-evaluation round (the paper's order)."""
    is_due = config.algorithm.use_x2 and step % config.cadence.m == 0
    return config.cadence.wait_for_reevaluation and is_due


def in_step_order(config: Config) -> bool:
    """Whether each step consumes the groups that were planned for it: without slack."""
    return config.cadence.slack == 0


def has_its_fresh(ready: Readiness, config: Config, wanted: int) -> bool:
    """Whether all fresh groups of the next step, which needs so many, are there."""
    return ready.num_fresh >= wanted and not (in_step_order(config) and ready.num_open)


def is_ready(step: int, ready: Readiness, config: Config, wanted: int) -> bool:
    """Whether step t, which is next and needs so many fresh groups, can be assembled."""
    if not has_its_fresh(ready, config, wanted):
        return False
    return is_answered(ready) or not must_wait_for_round(step, config)


def is_answered(ready: Readiness) -> bool:
    """Whether the step's round is issued and has no open request."""
    return ready.round_left == 0


def why_not_yet(step: int, ready: Readiness, status: BufferStatus, config: Config, wanted: int) -> str:
    """For example "96/256 fresh groups, 2 leased, 158 queued; worker-2 silent for 38 s"."""
    parts = [status.demand] if status.demand else []
    parts.append(_missing(step, ready, status, config, wanted))
    silent = {name: w.silent_s for name, w in status.workers.items() if w.leased and w.silent_s >= SILENT_S}
    parts += [f"{name} silent for {silent_s:.0f} s" for name, silent_s in sorted(silent.items())]
    if ready.failures_in_a_row:
        parts.append(f"{ready.failures_in_a_row} groups failed in a row, last: {ready.last_failure}")
    return "; ".join(parts)


def why_kept(status: BufferStatus, config: Config) -> str:
    """The batches that only a checkpoint releases, and the setting, to end a sentence with; '' when there are none."""
    first, last = status.checkpointed_step + 1, status.assembled_step
    if first > last:
        return ""
    every = config.checkpoint.every
    return (
        f", or write checkpoints more often: batches {first}-{last} are kept until the next (checkpoint.every={every})"
    )


def _missing(step: int, ready: Readiness, status: BufferStatus, config: Config, wanted: int) -> str:
    leased, queued = status.leased["fresh"], status.queued["fresh"]
    if ready.num_fresh < wanted:
        found = f"{ready.num_fresh}/{wanted} fresh groups, {leased} leased, {queued} queued"
        return found if leased or queued else f"{found}: nothing is asked for, does the scheduler run?"
    if in_step_order(config) and ready.num_open:
        return f"{ready.num_open} fresh groups of steps up to {step} are open, {leased} leased, {queued} queued"
    if in_step_order(config) and status.demand:
        return "its groups are not asked for yet: does the scheduler run?"
    if ready.round_left is None:
        return f"re-evaluation round {step} is not issued: does the scheduler run?"
    leased, queued = status.leased["reevaluate"], status.queued["reevaluate"]
    if not is_answered(ready):
        return f"{ready.round_left} requests of re-evaluation round {step} are open, {leased} leased, {queued} queued"
    return f"step {step} is being assembled"
