"""What a store must do: every method is one atomic operation, safe to call from many threads and processes.

    QUEUED --claim--> LEASED --push--> DONE, and its group is in `fresh`, `reevaluated` or `evaluated`
       ^                |
       +- lease over, release, fail (at most `max_attempts` failed attempts, then DROPPED)

    fresh ---------commit_assembly---> batch (retained until a checkpoint after it), B_high, or deleted
    reevaluated ---commit_assembly---> batch, or deleted
    a frame is deleted when no table and no retained batch refers to its group any more

Fresh groups are consumed in the order of arrival; a store made with `in_step_order` puts the steps that they are
planned for above that (slack = 0: each step has its own groups, however its workers race).

Time is the store's own: leases do not depend on the clock of a caller. A store knows no rule of any algorithm.

Raises, everywhere: UnavailableError when the store cannot be reached or is full, StorageError when its disk is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from bapo.core.types import Progress, Prompt, RolloutRequest
from bapo.transport.messages import BufferStatus
from buffer_service.state import (
    Assembly,
    BatchRecord,
    GroupRecord,
    Health,
    Incoming,
    Look,
    Memory,
    Readiness,
    Replacement,
    SelectorState,
    Tables,
)
from buffer_service.store.invariants import Audit
from buffer_service.store.run_image import Image

MOST_COMPOSITIONS = 1000
"""Lines of `GET /batches` that are kept."""
SHOWN_COMPOSITIONS = 8
"""Lines of them in a status."""
FORGET_AFTER_STEPS = 20
"""A settled request is remembered, so that a late push of its group is a `duplicate`, for so many steps behind the
newest checkpoint; after that it is `unknown`. That of an evaluation is remembered until the evaluation is forgotten.
An id that a table or a retained batch refers to is never asked for again, also when its request is forgotten."""


LAST_FAILURE_CHARS = 500
"""Of the text of the newest failure."""
SILENT_WORKER_S = 3600.0
"""A worker that holds nothing and was silent for so long is forgotten, and its claims with it."""
FORGOTTEN_AT_ONCE = 8
"""So many at each call of another worker: prelude.lua has both numbers, too."""


class Store(Protocol):
    """State of one run."""

    # -- requests

    def enqueue(self, requests: Sequence[RolloutRequest], *, cursor: int | None, spares: int | None = None) -> int:
        """Queue requests that were never asked for, see FORGET_AFTER_STEPS; returns how many.

        Args:
            cursor: fresh requests ever enqueued, stored with them: nothing happens unless it rises.
            spares: those of them beyond B per step, stored with the cursor; None leaves the number as it is.
        """
        ...

    def enqueue_round(self, step: int, requests: Sequence[RolloutRequest]) -> int:
        """Queue the re-evaluation round of a step, once; returns how many requests are new (0 the second time).

        The round is answered when no re-evaluation of its step is open, whether it was asked for with the round, by
        itself before it, or by itself after it.
        """
        ...

    def claim(
        self, worker_id: str, *, limit: int, policy_version: int, with_fresh: bool = True, nonce: str = ""
    ) -> list[RolloutRequest]:
        """Lease requests with min_version <= policy_version: newest re-evaluations first, evaluations, fresh.

        Of each worker that is not silent the newest nonce that leased something is remembered, with what it leased.
        The same nonce again is the same claim again: it gets what the worker still holds of that, for a whole lease
        from now on, and never anything new. A lower one of the same client is a claim that nobody waits for any more:
        it gets nothing.

        Args:
            nonce: "<client>-<number>", the number rising; "": a claim of its own, after which none is remembered.
        """
        ...

    def renew(self, worker_id: str, request_ids: Sequence[str]) -> list[str]:
        """Extend leases; returns the ids that the worker still holds."""
        ...

    def fail(self, worker_id: str, request_id: str, *, reason: str, detail: str) -> str:
        """`requeued`, `dropped`, or `not_leased` when the worker does not hold it (nothing changes then)."""
        ...

    def release(self, worker_id: str) -> int:
        """Return all leases of a worker to their places, and forget it and its claim; returns how many."""
        ...

    # -- groups

    def put_frame(self, name: str, frame: bytes | memoryview) -> None:
        """Keep a frame under this name for `FRAME_TTL_MS`, or until a push of its group. Raises: FullError."""
        ...

    def push(self, groups: Sequence[Incoming]) -> list[str]:
        """Store groups, whose frames are there; returns one word of `PushFate` each.

        Raises: ContractError when one contradicts its request, or is another content of the lease whose group is held;
            FrameError when the frame of one is missing, or has another length. Nothing is stored then.
        """
        ...

    def note_bad_frame(self, record: GroupRecord, problem: str) -> bool:
        """Count that a stored group's frame is not what its header says; False when that is known already."""
        ...

    def frames(self, group_ids: Sequence[str]) -> list[bytes | None]:
        """Frames in the order of the ids; None where there is none."""
        ...

    def records(self, group_ids: Sequence[str]) -> list[GroupRecord | None]:
        """Records in the order of the ids."""
        ...

    def evaluated(self, label: str) -> list[str]:
        """Ids of the settled requests of one evaluation, sorted; those that were dropped have no group."""
        ...

    def forget(self, label: str) -> None:
        """Delete one evaluation: groups, open requests, count. Other purposes' requests with that label stay."""
        ...

    # -- assembly

    def readiness(self, step: int) -> Readiness:
        """Whether step `step` can be assembled."""
        ...

    def look(self, step: int, num_fresh: int) -> Look:
        """`readiness`, and behind it the view of an assembly that may use so many fresh groups."""
        ...

    def fresh_requests(self, group_ids: Sequence[str]) -> list[RolloutRequest | None]:
        """What fresh groups answer, few of which are looked at; None for one that was consumed meanwhile."""
        ...

    def replace_stale(self, replacements: Sequence[Replacement], *, hold: bool = False) -> list[str]:
        """Drop fresh groups, count them by reason and difficulty, and queue the replacing requests at the head.

        Returns: ids of the groups with which nothing happened, because the id of their replacing request is taken.

        Args:
            hold: keep what they are made of until the assembly that reports them.
        """
        ...

    def commit_assembly(self, assembly: Assembly) -> bool:
        """Apply an assembly; False, and nothing changes, when its fence does not hold."""
        ...

    def batch(self, step: int) -> BatchRecord | None:
        """A retained batch, which a store that outlives its process would still have now."""
        ...

    def commit(self, step: int, checkpointed: int) -> None:
        """Batch `step` is trained; release the batches up to `checkpointed`. Both numbers only rise."""
        ...

    def resume(self, step: int) -> None:
        """Return all leases, forget all claims, set the learner's progress back to `step`: the newest checkpoint.

        Raises: ContractError when not all batches after `step` are retained, or a restore is under way or was cut off:
            waiting does not help, a learner that has a snapshot restores it.
        """
        ...

    # -- what prompt selectors learn from

    def outcomes(self, after: int, limit: int) -> list[bytes]:
        """Packed outcomes of the steps after + 1, after + 2, ...: as far as they are kept without a gap. As `batch`."""
        ...

    def selector_state(self) -> SelectorState:
        """The newest that was kept."""
        ...

    def keep_selector_state(self, state: SelectorState) -> bool:
        """Keep a state and drop the outcomes up to `through`; False, and nothing changes, unless its round rises."""
        ...

    # -- by hand: what a person removes

    def drop_group(self, group_id: str) -> str:
        """Delete a group that no batch has consumed; returns the table that it was in, or '' if there is none.

        fresh: the scheduler is told, through `fresh_dropped`, to ask for another one; reevaluated: as if its prompt
        had not been asked; evaluated: settled without a group, as a request that failed for good.
        """
        ...

    def drop_request(self, request_id: str) -> bool:
        """Withdraw an open request, queued or leased, as one whose attempts are used up; False if none is open.

        It is settled without a group: a fresh one counts into `fresh_dropped`, a round or an evaluation waits for one
        less, and a push of its group is a `duplicate`.
        """
        ...

    def edit_tables(self, before: Tables, after: Tables) -> bool:
        """Take entries out of B_bad and B_high; False, and nothing changes, when `before` is not the newest."""
        ...

    # -- looking

    def progress(self) -> Progress:
        """The newest report."""
        ...

    def report(self, progress: Progress) -> None:
        """Both numbers only rise."""
        ...

    def status(self) -> BufferStatus:
        """Everything in numbers; leases that are over are returned first."""
        ...

    def tables(self) -> Tables:
        """B_bad, B_high and thresholds after the newest assembly."""
        ...

    def bad_prompts(self) -> dict[str, Prompt]:
        """Prompt id -> prompt of B_bad."""
        ...

    def compositions(self, offset: int, limit: int) -> tuple[int, list[Mapping[str, Any]]]:
        """(how many there are, a page of them), newest first."""
        ...

    def counters(self) -> dict[str, int]:
        """Event -> count over the whole run: `<what>:<reason>[:<k>/<G>]`."""
        ...

    def memory(self) -> Memory:
        """What the store occupies, and what it may."""
        ...

    def audit(self) -> Audit:
        """The facts that must fit together (`buffer_service.store.invariants`). O(what the buffer holds): for
        people.
        """
        ...

    def health(self) -> Health:
        """Raises: UnavailableError when the store does not answer."""
        ...

    # -- whole state

    def image(self) -> Image:
        """One consistent image."""
        ...

    def restore(self, image: Image, frames: Iterable[tuple[str, bytes | memoryview]]) -> None:
        """Replace everything of the run.

        When it is cut off in the middle, all is as before, or every method raises UnavailableError from then on, and
        `resume` ContractError. Of two restores that run at once the one that began last is done; the other one raises
        UnavailableError.
        """
        ...
