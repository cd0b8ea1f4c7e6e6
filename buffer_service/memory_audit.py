"""The facts of one run in memory. What Redis keeps twice is kept once here, so some invariants cannot break."""

from __future__ import annotations

from collections import Counter

from bapo.types import Purpose
from buffer_service.audit import Audit, OpenFacts
from buffer_service.memory_state import MemoryState


def audit_of(state: MemoryState) -> Audit:
    """Call with the store's lock held."""
    sizes = {group_id: len(frame) for group_id, frame in state.frames.items()}
    opened = {key: item.request for key, item in state.open.items()}
    holders = {key: item.holder for key, item in state.open.items() if item.holder}
    return Audit(
        assembled=state.tables.step,
        committed=state.committed,
        checkpointed=state.checkpointed,
        num_bytes=sum(sizes.values()),
        fresh_bytes=state.fresh_bytes,
        tables=state.tables,
        bad_prompts=frozenset(state.bad_prompts),
        batches=dict(state.batches),
        records=dict(state.records),
        references=dict(state.refs),
        frame_sizes=sizes,
        fresh=tuple(state.fresh),
        reevaluated=tuple(state.reevaluated),
        stale=frozenset(fate.group_id for fate in state.stale),
        evaluated={label: tuple(settled) for label, settled in state.evaluated.items()},
        evaluations={label: len(settled) for label, settled in state.evaluated.items()},
        opened={key: OpenFacts(purpose=request.purpose, step=request.step) for key, request in opened.items()},
        queued={key: request.purpose for key, request in opened.items() if key not in holders},
        leased={key: opened[key].purpose for key in holders},
        holders=holders,
        held=Counter(holders.values()),
        contents=frozenset([*opened, *state.fresh]),
        done=frozenset(state.done),
        planned={key: request.step for key, request in opened.items() if request.purpose is Purpose.FRESH},
        rounds=dict(state.rounds),
    )
