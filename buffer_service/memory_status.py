"""The memory store in numbers."""

from __future__ import annotations

from collections import Counter

from bapo.messages import BufferStatus, WorkerLeases
from bapo.types import Purpose
from buffer_service.memory_state import MemoryState
from buffer_service.store import SHOWN_COMPOSITIONS, SILENT_WORKER_S


def status_of(run: str, state: MemoryState, now: float) -> BufferStatus:
    """Everything in numbers."""
    held = Counter(item.holder for item in state.open.values() if item.holder)
    leased = Counter(item.request.purpose.value for item in state.open.values() if item.holder)
    queued = Counter(item.request.purpose.value for item in state.open.values() if not item.holder)
    tables = state.tables
    return BufferStatus(
        run=run,
        step=state.progress.step,
        policy_version=state.progress.policy_version,
        assembled_step=tables.step,
        committed_step=state.committed,
        checkpointed_step=state.checkpointed,
        cursor=state.cursor,
        fresh_dropped=state.fresh_dropped,
        fresh_spares=state.fresh_spares,
        queued={purpose.value: queued[purpose.value] for purpose in Purpose},
        leased={purpose.value: leased[purpose.value] for purpose in Purpose},
        fresh_ready=len(state.fresh),
        reevaluated_ready=len(state.reevaluated),
        num_bad=len(tables.bad),
        num_high=len(tables.high),
        r_tot=tables.r_tot,
        c2=tables.c2,
        c3=tables.c3,
        evaluations={label: len(settled) for label, settled in state.evaluated.items()},
        reevaluation_rounds=dict(state.rounds),
        workers={
            worker: WorkerLeases(leased=held[worker], silent_s=now - heard)
            for worker, heard in sorted(state.heard.items())
            if held[worker] or now - heard < SILENT_WORKER_S
        },
        failures_in_a_row=state.failures_in_a_row,
        last_failure=state.last_failure,
        num_bytes=sum(len(frame) for frame in state.frames.values()),
        batches=[dict(line) for line in reversed(state.compositions[:SHOWN_COMPOSITIONS])],
        demand=tables.demand.sentence if tables.demand else "",
        extra_rounds=tables.extra_rounds,
    )
