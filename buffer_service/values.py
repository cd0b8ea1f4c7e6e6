"""What the buffer keeps besides groups: the values that its use cases and its stores exchange."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bapo.messages import ExtraRound
from bapo.types import Fate, GroupStat, HardPrompt, Prompt
from buffer_service.demand import Demand
from buffer_service.groups import GroupRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """B_bad, B_high and the numbers of eq. 8 after the assembly of `step`."""

    step: int = 0
    r_tot: float | None = None
    c2: float | None = None
    c3: float | None = None
    bad: tuple[HardPrompt, ...] = ()
    """B_bad, oldest first."""
    high: tuple[GroupStat, ...] = ()
    """B_high, oldest first: what the composer keeps to be used again."""
    edits: int = 0
    """How often they were changed since that assembly: by a person, or by a demand."""
    num_extra: int = 0
    """Fresh groups that all demands of the run have asked for."""
    demand: Demand | None = None
    """Of step + 1."""
    extra_rounds: tuple[ExtraRound, ...] = ()
    """Rounds that were asked for, until a batch has consumed a group of them: then they are known to be on their way.
    A step may be filled by groups that were sampled ahead, before the scheduler has seen its demand."""

    def needs(self, num_fresh: int) -> int:
        """Fresh groups that the next step needs, whose first round has so many."""
        return num_fresh if self.demand is None else self.demand.num_fresh


def left_prompts(before: Tables, after: Tables) -> tuple[str, ...]:
    """Prompt ids that are in B_bad no more."""
    stay = {entry.prompt_id for entry in after.bad}
    return tuple(entry.prompt_id for entry in before.bad if entry.prompt_id not in stay)


def left_high(before: Tables, after: Tables) -> tuple[str, ...]:
    """Group ids that are in B_high no more."""
    stay = {stat.group_id for stat in after.high}
    return tuple(stat.group_id for stat in before.high if stat.group_id not in stay)


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness:
    """The few numbers that say whether a step can be assembled."""

    assembled: int
    num_fresh: int
    round_left: int | None
    """Requests of the step's re-evaluation round that are not settled; None: the round was not issued."""
    failures_in_a_row: int
    last_failure: str
    num_open: int
    """Fresh requests planned for this step or before that are neither done nor dropped."""
    fresh_bytes: int
    """Of the frames of the fresh groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What the assembly of a step reads: O(B), however much the buffer holds."""

    tables: Tables
    fresh: tuple[GroupRecord, ...]
    """At most B: in the order of arrival, or of their steps when the store keeps that order."""
    reevaluated: tuple[GroupRecord, ...]
    """All that arrived since the last assembly."""
    stale: tuple[Fate, ...]
    """Groups that were too old, dropped since the last assembly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What one moment of the store says of a step."""

    step: int
    ready: Readiness
    view: Callable[[], View]
    """What its assembly reads, of that moment but for groups that were consumed since. May block: most looks find that
    something is missing, and ask for no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    """A batch without its groups' frames."""

    step: int
    group_ids: tuple[str, ...]
    header: Mapping[str, Any]
    """Of the batch's frame on the wire."""
    num_bytes: int
    """Of its groups' frames together."""
    untrained: tuple[str, ...] = ()
    """Groups that its assembly saw and did not train, held as long as the batch, so that their texts can be read."""

    @property
    def held(self) -> tuple[str, ...]:
        """All groups that the batch refers to; one may be there twice."""
        return self.group_ids + self.untrained


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectorState:
    """What a prompt selector has learnt, opaque to a store: it stands for the outcomes that it was made of."""

    round: int = 0
    """Newest step that prompts were proposed for from it; 0: nothing was kept yet."""
    through: int = 0
    """Step up to which outcomes are in it."""
    data: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """Everything that assembling a step changes; a store applies all of it or nothing.

    Fence: the newest tables are `before`, of step `step - 1`, and every id of `fresh` and `reevaluated` is still there.
    """

    step: int
    fresh: tuple[str, ...]
    """X_on(t): consumed."""
    reevaluated: tuple[str, ...]
    """Looked at, and gone from the table `reevaluated`."""
    before: Tables
    after: Tables
    new_prompts: tuple[Prompt, ...]
    """Of the entries of B_bad that were not in it before."""
    batch: BatchRecord
    composition: Mapping[str, Any]
    """One line of `GET /batches`."""
    num_stale: int
    """How many of `View.stale` the batch reports."""
    fresh_bytes: int
    """Of the frames of `fresh` together."""
    stale: tuple[str, ...] = ()
    """Those of `View.stale` whose groups were held until now."""
    outcomes: bytes = b""
    """Of `fresh`, for a prompt selector that learns (`bapo.outcomes`); empty: none does."""

    @property
    def left_bad(self) -> tuple[str, ...]:
        """Prompt ids that are in B_bad no more."""
        return left_prompts(self.before, self.after)

    @property
    def reference_changes(self) -> dict[str, int]:
        """Group id -> change of its reference count, where there is one; what nothing refers to is deleted."""
        changes: Counter[str] = Counter(self.batch.held)
        changes.update(left_high(self.after, self.before))  # those that are new
        changes.subtract((*left_high(self.before, self.after), *self.fresh, *self.reevaluated, *self.stale))
        return {group_id: change for group_id, change in changes.items() if change}


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What a store occupies, in bytes."""

    used: int
    limit: int
    """0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """What `/readyz` says of a store."""

    where: str
    """Address, without a password."""
    persistent: bool
    """An acknowledged group survives the end of the store's process."""
    detail: str
    """How it persists."""


def batch_is_missing(step: int, missing: int) -> str:
    """Message of the ContractError for a resume that the retained batches do not allow."""
    return (
        f"cannot go on after checkpoint {step}: the buffer does not hold batch {missing}; "
        "restore the snapshot of that checkpoint first"
    )
