"""The keys of one run in Redis, all with the run's name as hash tag: one run is one slot of a cluster.

| key            | type   | content                                                                                   |
|----------------|--------|-------------------------------------------------------------------------------------------|
| meta           | HASH   | assembled, committed, checkpointed, step, policy_version, cursor, fresh_dropped, seq,     |
|                |        | table_edits, bytes, fresh_bytes, failures_in_a_row, last_failure, restoring, fresh_spares, |
|                |        | selector_round, selector_through, format; restoring: nonce of the restore that began last |
| requests       | HASH   | request id -> request, while it is open or its fresh group is not consumed                |
| live           | HASH   | open request id -> "score terms"                                                          |
| queue_*        | ZSET   | queued request ids by score = min_version * 2^32 + place; one per purpose                 |
| leases_*       | ZSET   | leased request ids by deadline (ms of Redis TIME); one per purpose                        |
| holders        | HASH   | leased request id -> worker                                                               |
| held           | HASH   | worker -> number of its leases                                                            |
| claims         | HASH   | worker -> "nonce id id ...": its newest claim that leased something, and what             |
| heard          | ZSET   | workers by ms when they were last heard of; gone an hour later, unless one holds leases |
| attempts       | HASH   | open request id -> failed attempts                                                        |
| done           | ZSET   | settled request ids by the step that was assembled then; evaluations: +inf                |
| planned        | ZSET   | open fresh request ids by the step that they are planned for                              |
| fresh          | ZSET   | group ids by rank * 2^32 + ingest number; rank = planned step, or 0 with max_steps_ahead |
| reevaluated    | ZSET   | group ids by ingest number                                                                |
| evaluated      | ZSET   | "label request_id" of settled evaluation requests, sorted as text                         |
| evaluations    | HASH   | label -> settled requests                                                                 |
| rounds         | HASH   | step whose round was issued -> its re-evaluations that are open                           |
| records        | HASH   | group id -> GroupRecord                                                                   |
| refs           | HASH   | group id -> how many tables and retained batches refer to it + 2^20 * bytes of its frame  |
| tables         | STRING | Tables after the newest assembly                                                          |
| bad_prompts    | HASH   | prompt id of B_bad -> prompt                                                              |
| batches        | HASH   | step -> BatchRecord, until a checkpoint after it                                          |
| compositions   | LIST   | one line per batch, newest first                                                          |
| stale          | LIST   | results of groups dropped as too old since the last assembly                              |
| counters       | HASH   | event -> count                                                                            |
| success_counts | HASH   | step -> those of its fresh groups, packed, when a prompt selector learns from them        |
| selector       | STRING | what it had learned when it was kept last; the success counts before are gone             |
| settings       | STRING | settings that every service of the run must have, as JSON                                 |
| bad_frames     | HASH   | group id -> what is wrong with its frame                                                  |
| group:ID       | STRING | the frame; learners read it                                                               |
| incoming:N     | STRING | a frame on its way in, written by a worker; expires when its push never comes             |
| access         | STRING | the password of the users that may write `incoming:*` or read `group:*`, and nothing else |
"""

from __future__ import annotations

INDEX = (
    "meta",
    "requests",
    "live",
    "queue_fresh",
    "queue_reevaluate",
    "queue_evaluate",
    "leases_fresh",
    "leases_reevaluate",
    "leases_evaluate",
    "holders",
    "held",
    "claims",
    "heard",
    "attempts",
    "done",
    "planned",
    "fresh",
    "reevaluated",
    "evaluated",
    "evaluations",
    "rounds",
    "records",
    "refs",
    "tables",
    "bad_prompts",
    "batches",
    "compositions",
    "stale",
    "counters",
    "success_counts",
    "selector",
    "bad_frames",
)
"""Every script declares all of them, in this order, and after them the frames that it touches."""


FORMAT = "3"
"""Of all this, in `meta`: a run of another one is refused."""


SPAN, MIDDLE = 1 << 32, 1 << 31
"""Of a queue's scores; prelude.lua has the same numbers."""


FRAME_BYTE = 1 << 20
"""Of a value in `refs`; prelude.lua has the same number."""


def reference_value(count: int, frame_bytes: int) -> int:
    """What `refs` holds for a group."""
    return FRAME_BYTE * frame_bytes + count


def reference_count(value: bytes) -> int:
    """How often a group is referred to."""
    return int(value) % FRAME_BYTE


class Keys:
    """Key names of one run."""

    def __init__(self, run: str) -> None:
        self._prefix = f"bapo:{{{run}}}:"
        self.index = [self._prefix + name for name in INDEX]
        self._by_name = dict(zip(INDEX, self.index, strict=True))

    def __getitem__(self, name: str) -> str:
        return self._by_name[name]

    def group(self, group_id: str) -> str:
        """Key of a frame."""
        return f"{self._prefix}group:{group_id}"

    @property
    def settings(self) -> str:
        """Key of what all services of the run have in common; no script needs it."""
        return f"{self._prefix}settings"

    def incoming(self, name: str) -> str:
        """Key of a frame that is not admitted yet."""
        return f"{self._prefix}incoming:{name}"

    @property
    def access(self) -> str:
        """Key of the password of `buffer_service.store.redis.frame_access`."""
        return f"{self._prefix}access"
