"""Image of a run's buffer, which stores and snapshots exchange."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bapo.core.types import Count, GroupResult, Progress, Prompt, RolloutRequest, Version
from buffer_service.state import BatchRecord, FreshGroup, GroupRecord, SelectorState, Tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """The buffer state that a resumed run needs, except the frames.

    Leased requests become queued, and no claims are included. Evaluations are not included: the evaluator requests
    missing results again.
    """

    progress: Progress
    committed: Version
    checkpointed: Version
    cursor: Count
    fresh_dropped: Count
    tables: Tables
    open_requests: tuple[RolloutRequest, ...]
    """In claim order, by purpose."""
    fresh: tuple[FreshGroup, ...]
    """In ingest order."""
    reevaluated: tuple[GroupRecord, ...]
    """In ingest order."""
    records: Mapping[str, GroupRecord]
    """Records of the groups of B_high and of the batches."""
    bad_prompts: Mapping[str, Prompt]
    batches: tuple[BatchRecord, ...]
    """Batches that are not trained or not released."""
    compositions: tuple[Mapping[str, Any], ...]
    """Oldest first."""
    rounds: Mapping[Version, Count]
    """Step of a re-evaluation round -> number of open requests."""
    stale: tuple[GroupResult, ...]
    counters: Mapping[str, Count]
    fresh_spares: Count = 0
    success_counts: Mapping[Version, bytes] = field(default_factory=dict)
    """Step -> packed success counts, for steps that are not included in `selector` yet."""
    selector: SelectorState = field(default_factory=SelectorState)

    @property
    def requests(self) -> list[RolloutRequest]:
        """Open requests and those of the fresh groups."""
        return [*self.open_requests, *(group.request for group in self.fresh)]

    @property
    def references(self) -> Counter[str]:
        """Group id -> number of tables and batches that reference it; exactly the groups whose frames are needed."""
        counts = Counter(group.record.group_id for group in self.fresh)
        counts.update(record.group_id for record in self.reevaluated)
        counts.update(stat.group_id for stat in self.tables.high)
        for batch in self.batches:
            counts.update(batch.held)
        return counts

    @property
    def all_records(self) -> dict[str, GroupRecord]:
        """Group id -> record of every referenced group."""
        found = dict(self.records)
        found.update((group.record.group_id, group.record) for group in self.fresh)
        found.update((record.group_id, record) for record in self.reevaluated)
        return found


EMPTY = Image(
    progress=Progress(step=0, policy_version=0),
    committed=0,
    checkpointed=0,
    cursor=0,
    fresh_dropped=0,
    tables=Tables(),
    open_requests=(),
    fresh=(),
    reevaluated=(),
    records={},
    bad_prompts={},
    batches=(),
    compositions=(),
    rounds={},
    stale=(),
    counters={},
)
"""Image of a run that has not started."""
