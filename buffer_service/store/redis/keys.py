"""The Redis keys of one run, with the run's name as hash tag: one run is one hash slot.

| key            | type   | content                                                                                   |
|----------------|--------|-------------------------------------------------------------------------------------------|
| meta           | HASH   | assembled, committed, checkpointed, step, policy_version, cursor, fresh_dropped, seq,     |
|                |        | table_edits, bytes, fresh_bytes, failures_in_a_row, last_failure, restoring, fresh_spares, |
|                |        | selector_round, selector_through, format; restoring: nonce of the latest restore          |
| requests       | HASH   | request id -> request, while it is open or its fresh group is not consumed                |
| live           | HASH   | open request id -> "score terms"                                                          |
| queue_*        | ZSET   | queued request ids by score = min_version * 2^32 + place; one per purpose                 |
| leases_*       | ZSET   | leased request ids by deadline (ms of Redis TIME); one per purpose                        |
| holders        | HASH   | leased request id -> worker                                                               |
| held           | HASH   | worker -> number of its leases                                                            |
| claims         | HASH   | worker -> "nonce id id ...": its newest claim that leased anything, with the leases       |
| heard          | ZSET   | workers by the time (ms) of their last call; removed after an hour without leases         |
| attempts       | HASH   | open request id -> failed attempts                                                        |
| done           | ZSET   | finished request ids by the newest assembled step at that time; evaluations: +inf         |
| planned        | ZSET   | open fresh request ids by planned step                                                    |
| fresh          | ZSET   | group ids by rank * 2^32 + ingest number; rank = planned step, or 0 with max_steps_ahead |
| reevaluated    | ZSET   | group ids by ingest number                                                                |
| evaluated      | ZSET   | "label request_id" of finished evaluation requests, sorted as text                        |
| evaluations    | HASH   | label -> number of finished requests                                                      |
| rounds         | HASH   | step whose round was issued -> number of its open re-evaluations                          |
| records        | HASH   | group id -> GroupRecord                                                                   |
| refs           | HASH   | group id -> reference count (tables and retained batches) + 2^20 * bytes of its frame     |
| tables         | STRING | Tables after the newest assembly                                                          |
| bad_prompts    | HASH   | prompt id of B_bad -> prompt                                                              |
| batches        | HASH   | step -> BatchRecord, until a checkpoint after it                                          |
| compositions   | LIST   | one line per batch, newest first                                                          |
| stale          | LIST   | results of groups dropped as stale since the last assembly                                |
| counters       | HASH   | event -> count                                                                            |
| success_counts | HASH   | step -> packed success counts of its fresh groups, for an adaptive prompt selector        |
| selector       | STRING | last stored selector state; the success counts before it are deleted                      |
| settings       | STRING | settings shared by every service of the run, as JSON                                      |
| bad_frames     | HASH   | group id -> problem of its frame                                                          |
| journals       | HASH   | open request id -> number of entries of its episodes; "id n" -> the n-th, from 0         |
| group:ID       | STRING | the frame; learners read it                                                               |
| incoming:N     | STRING | a frame written by a worker before its push; expires if the push never comes              |
| access         | STRING | password of the users that may only write `incoming:*` or read `group:*`                  |
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
    "journals",
)
"""Every script declares all of these keys in this order, followed by the frames it accesses."""


FORMAT = "3"
"""Format number in `meta`; runs of another format are rejected."""


SPAN, MIDDLE = 1 << 32, 1 << 31
"""Range of queue scores; same values in prelude.lua."""


FRAME_BYTE = 1 << 20
"""Factor of the frame bytes in `refs`; same value in prelude.lua."""


def reference_value(count: int, frame_bytes: int) -> int:
    """The value of a group in `refs`."""
    return FRAME_BYTE * frame_bytes + count


def reference_count(value: bytes) -> int:
    """The reference count in a value of `refs`."""
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
        """Key of the settings shared by all services of the run; not used by scripts."""
        return f"{self._prefix}settings"

    def incoming(self, name: str) -> str:
        """Key of a frame that is not pushed yet."""
        return f"{self._prefix}incoming:{name}"

    @property
    def access(self) -> str:
        """Key of the password used by `buffer_service.store.redis.frame_access`."""
        return f"{self._prefix}access"
