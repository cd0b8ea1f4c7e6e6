"""Buffer state other than groups: the values that use cases and stores exchange."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from xxhash import xxh3_64_hexdigest

from bapo.core.batch_items import Kind
from bapo.core.codec import GroupHeader
from bapo.core.errors import ContractError, Refusal
from bapo.core.json_values import plain_value
from bapo.core.reward_details import means_of
from bapo.core.types import (
    Count,
    GroupResult,
    GroupStat,
    HardPrompt,
    Origin,
    Outcome,
    Prompt,
    Purpose,
    RolloutRequest,
    Seconds,
    Share,
    Version,
    num_correct,
    stat_of,
)
from bapo.transport.messages import ExtraRound


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """B_bad, B_high and what the composer reported after the assembly of `step`."""

    step: Version = 0
    r_tot: Share | None = None
    facts: Mapping[str, float] = field(default_factory=dict)
    """What the composer reported."""
    bad: tuple[HardPrompt, ...] = ()
    """B_bad, oldest first."""
    high: tuple[GroupStat, ...] = ()
    """B_high, oldest first: groups that the composer keeps for reuse."""
    edits: Count = 0
    """Number of changes since that assembly, by an operator or by a demand."""
    num_extra: Count = 0
    """Fresh groups requested by all demands of the run."""
    demand: Demand | None = None
    """Demand of step + 1."""
    extra_rounds: tuple[ExtraRound, ...] = ()
    """Requested rounds of which no batch has consumed a group yet. A step may be filled by groups that were sampled
    ahead, before the scheduler has seen its demand."""

    def needs(self, num_fresh: int) -> int:
        """Number of fresh groups the next step needs. `num_fresh`: those of its first round."""
        return num_fresh if self.demand is None else self.demand.num_fresh


def left_prompts(before: Tables, after: Tables) -> tuple[str, ...]:
    """Ids of the prompts that left B_bad."""
    stay = {entry.prompt_id for entry in after.bad}
    return tuple(entry.prompt_id for entry in before.bad if entry.prompt_id not in stay)


def left_high(before: Tables, after: Tables) -> tuple[str, ...]:
    """Ids of the groups that left B_high."""
    stay = {stat.group_id for stat in after.high}
    return tuple(stat.group_id for stat in before.high if stat.group_id not in stay)


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness:
    """The counts that determine whether a step can be assembled."""

    assembled: int
    num_fresh: int
    round_left: int | None
    """Open requests of the step's re-evaluation round; None: the round was not issued."""
    failures_in_a_row: int
    last_failure: str
    num_open: int
    """Open fresh requests planned for this step or earlier."""
    fresh_bytes: int
    """Bytes of the frames of the fresh groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The input of an assembly: O(B), independent of the size of the buffer."""

    tables: Tables
    fresh: tuple[GroupRecord, ...]
    """At most B, in the order of arrival, or of their steps if the store keeps step order."""
    reevaluated: tuple[GroupRecord, ...]
    """All that arrived since the previous assembly."""
    stale: tuple[GroupResult, ...]
    """Groups dropped as stale since the previous assembly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReading:
    """One consistent reading of a step."""

    step: int
    ready: Readiness
    view: Callable[[], View]
    """The input of the assembly, without groups consumed since the reading. May block; call it only if nothing is
    missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    """A batch without its groups' frames."""

    step: Version
    group_ids: tuple[str, ...]
    header: Mapping[str, Any]
    """Bytes of the batch on the wire."""
    num_bytes: Count
    """Total bytes of its groups' frames."""
    untrained: tuple[str, ...] = ()
    """Groups that its assembly read but did not train, retained with the batch so that their texts can be read."""

    @property
    def held(self) -> tuple[str, ...]:
        """All groups the batch references; may contain duplicates."""
        return self.group_ids + self.untrained


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectorState:
    """State of a prompt selector, opaque to the store; it replaces the success counts it was computed from."""

    round: Version = 0
    """Newest step that prompts were proposed for from it; 0: no state was stored yet."""
    through: Version = 0
    """Newest step whose success counts are included."""
    data: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """All changes of assembling a step; a store applies them atomically.

    Fence: the current tables are `before`, of step `step - 1`, and every id of `fresh` and `reevaluated` still exists.
    """

    step: int
    fresh: tuple[str, ...]
    """X_on(t): consumed."""
    reevaluated: tuple[str, ...]
    """Consumed from the table `reevaluated`."""
    before: Tables
    after: Tables
    new_prompts: tuple[Prompt, ...]
    """Prompts of the entries of B_bad that are new."""
    batch: BatchRecord
    composition: Mapping[str, Any]
    """Entry of `GET /batches`."""
    num_stale: int
    """Number of entries of `View.stale` that the batch reports."""
    fresh_bytes: int
    """Total bytes of the frames of `fresh`."""
    stale: tuple[str, ...] = ()
    """Entries of `View.stale` whose groups were retained until now."""
    success_counts: bytes = b""
    """Success counts of `fresh` for an adaptive prompt selector (`bapo.core.success_counts`); else empty."""

    @property
    def left_bad(self) -> tuple[str, ...]:
        """Ids of the prompts that left B_bad."""
        return left_prompts(self.before, self.after)

    @property
    def reference_changes(self) -> dict[str, int]:
        """Group id -> nonzero change of its reference count; groups without references are deleted."""
        changes: Counter[str] = Counter(self.batch.held)
        changes.update(left_high(self.after, self.before))  # those that are new
        changes.subtract((*left_high(self.before, self.after), *self.fresh, *self.reevaluated, *self.stale))
        return {group_id: change for group_id, change in changes.items() if change}


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory use of a store, in bytes."""

    used: int
    limit: int
    """0: unlimited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Health of a store, as returned by `/readyz`."""

    where: str
    """Address, without a password."""
    persistent: bool
    """Acknowledged groups survive a crash of the store's process."""
    detail: str
    """How it persists."""


# A store keeps two values per group: its frame, which is opaque, and its `GroupRecord`, the numbers that composers, run
# records and delivery need. Composers never open a frame. The `terms`, which a group and its request have in common,
# are one string, so that a script can compare them.


class GroupRecord(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Index entry of a stored group. The field order is that of the stored row, of which push.lua reads three."""

    group_id: str
    prompt_id: str
    purpose: Purpose
    step: Version
    """`step` of the request."""
    label: str
    worker_id: str
    policy_version: Version
    """Oldest version that sampled any token."""
    rewards: tuple[Share, ...]
    """[G]"""
    num_tokens: Count
    num_bytes: Count
    """Bytes of the frame."""
    claimed_at: Seconds
    sample_s: Seconds
    grade_s: Seconds
    outcome_chars: str = ""
    """`outcomes`, one character each: msgpack in Redis has no bytes type."""
    digest: str = ""
    """`bapo.core.frames.frame_digest` of the frame: header as pushed, body as declared by its worker."""
    prompt_digest: str = ""
    """`prompt_digest` of its prompt."""
    newest_version: Version = 0
    """Newest version that sampled any token; 0 in a row of before this field."""
    reward_details: dict[str, float] = {}
    """Means over the responses that a worker sampled (`bapo.core.reward_details`)."""

    @property
    def outcomes(self) -> bytes:
        """[G] values of Outcome, one byte per response; empty when all are GRADED."""
        return self.outcome_chars.encode("latin-1")

    @property
    def order(self) -> tuple[int, str]:
        """Sort key of groups for composers, independent of arrival order."""
        return self.step, self.group_id

    @property
    def terms(self) -> str:
        """The terms of the group, to compare with `request_terms`."""
        return _terms(self.purpose, self.step, len(self.rewards), self.prompt_id, self.prompt_digest, self.label)

    @property
    def outcome(self) -> tuple[str, float, int]:
        """(prompt id, k, G) of the sampled responses, the input of prompt selectors."""
        stat = self.stat()
        return self.prompt_id, stat.reward_sum, stat.size

    def stat(self, birth: int = 0) -> GroupStat:
        """The group as composers see it."""
        return stat_of(
            group_id=self.group_id,
            prompt_id=self.prompt_id,
            policy_version=self.policy_version,
            rewards=self.rewards,
            outcomes=self.outcomes if self.outcome_chars else bytes(len(self.rewards)),
            birth=birth,
        )

    def result(
        self,
        origin: Origin | None,
        reason: str,
        birth: int,
        *,
        item: str = "",
        rows: tuple[int, ...] | None = None,
        kind: Kind = "rl",
    ) -> GroupResult:
        """The group as a line of the run's group records."""
        return GroupResult(
            group_id=self.group_id,
            prompt_id=self.prompt_id,
            purpose=self.purpose,
            policy_version=self.policy_version,
            rewards=self.rewards,
            origin=origin,
            reason=reason,
            birth=birth,
            item=item,
            rows=rows,
            kind=kind,
            outcomes=self.outcomes,
            worker_id=self.worker_id,
            num_tokens=self.num_tokens,
            sample_s=self.sample_s,
            grade_s=self.grade_s,
            claimed_at=self.claimed_at,
            reward_details=self.reward_details,
        )


def record_of(group: GroupHeader, num_bytes: int, digest: str) -> GroupRecord:
    """The record of a group. `num_bytes`, `digest`: of its frame."""
    details = group.details
    sampled = [outcome != Outcome.EXPERT for outcome in group.outcomes]
    return GroupRecord(
        group_id=group.group_id,
        prompt_id=group.prompt.prompt_id,
        purpose=group.purpose,
        step=group.step,
        label=group.label,
        worker_id=group.worker_id,
        policy_version=group.policy_version,
        rewards=group.rewards,
        num_tokens=sum(length for length, is_own in zip(group.lengths, sampled, strict=True) if is_own),
        num_bytes=num_bytes,
        claimed_at=group.timing.claimed_at,
        sample_s=group.timing.sample_s,
        grade_s=group.timing.grade_s,
        outcome_chars=group.outcomes.decode("latin-1") if any(group.outcomes) else "",
        digest=digest,
        prompt_digest=prompt_digest(group.prompt),
        newest_version=group.newest_version,
        reward_details=means_of({name: values[sampled] for name, values in details.items()}) if details else {},
    )


def prompt_digest(prompt: Prompt) -> str:
    """Digest of a prompt's text, task, answer and images, which must match between a request and its group.

    Raises: ContractError for an answer that is not JSON.
    """
    parts = [prompt.text, prompt.task, prompt.answer, *([prompt.images] if prompt.images else [])]
    try:
        content = json.dumps(parts, sort_keys=True, default=plain_value)
    except (TypeError, ValueError) as error:
        raise ContractError(f"prompt {prompt.prompt_id}: its answer is not JSON: {error}", Refusal.HEADER) from error
    return xxh3_64_hexdigest(content.encode())


def request_terms(request: RolloutRequest) -> str:
    """Purpose, step, G, prompt and label of a request as one string, which the group must match."""
    prompt = request.prompt
    return _terms(
        request.purpose, request.step, request.group_size, prompt.prompt_id, prompt_digest(prompt), request.label
    )


TERMS = ("purpose", "step", "group_size", "prompt", "label")


def _terms(purpose: Purpose, step: int, size: int, prompt_id: str, digest: str, label: str) -> str:
    return f"{purpose.value} {step} {size} {prompt_id}/{digest} {label}"


class Incoming(msgspec.Struct, frozen=True, kw_only=True):
    """A group to store, whose frame is already in the store."""

    record: GroupRecord
    frame_name: str
    """Name the frame was written under."""
    newest_version: int = 0
    """Newest version that sampled any token."""


MISMATCH, OTHER_CONTENT = CONTRADICTIONS = ("mismatch", "other_content")
"""Results of push.lua."""


def contradiction(word: str, group_id: str, detail: str, answered: str = "") -> ContractError:
    """The error for a group that does not match its request (terms `detail`; terms of the group `answered`), or that
    differs from the stored group of its lease (worker `detail`)."""
    if word == MISMATCH:
        pairs = zip(TERMS, detail.split(" "), answered.split(" "), strict=True)
        others = [_difference(name, asked, mine) for name, asked, mine in pairs if asked != mine]
        message = f"group {group_id} does not match its request: {', '.join(others)}"
        return ContractError(message, Refusal.NOT_ITS_REQUEST)
    message = f"group {group_id} is already stored with different content, from the same lease of {detail}: "
    return ContractError(message + "it is kept, and nothing of this push is stored", Refusal.OTHER_CONTENT)


def _difference(name: str, asked: str, mine: str) -> str:
    if name == "prompt":
        asked, mine = asked.rpartition("/")[0], mine.rpartition("/")[0]
        if asked == mine:
            return f"prompt {asked} was requested with a different text, task or answer"
    return f"expected {name} {asked or 'none'}, got {mine or 'none'}"


class PushResult:
    """Outcome of a pushed group."""

    STORED = "stored"
    DUPLICATE = "duplicate"
    """Its request was already answered or dropped."""
    STALE = "stale"
    """Sampled by weights older than the request allows; the request is queued again."""
    UNKNOWN = "unknown"
    """Never requested, or forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshGroup:
    """A fresh group that no batch has consumed, and its request."""

    record: GroupRecord
    request: RolloutRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """A fresh group that is stale for its step, and the request that re-samples its prompt."""

    result: GroupResult
    request: RolloutRequest

    @property
    def event(self) -> str:
        """The counted event: reason and pass rate k/G, k correct responses."""
        rewards = self.result.rewards
        return f"dropped_groups:{self.result.reason}:{num_correct(rewards)}/{len(rewards)}"


@dataclass(frozen=True, slots=True)
class Demand:
    """Further generation rounds requested by the next step, whose batch has too few groups that train."""

    step: int
    rounds: int
    """Rounds of B fresh groups it needs now, at least 2."""
    most: int
    """Maximum number of rounds, after which it trains what it has."""
    found: int
    """Groups that train from the rounds so far."""
    wanted: int
    """Groups that train in a full batch."""
    num_fresh: int
    """Fresh groups the step needs in all its rounds."""

    @property
    def sentence(self) -> str:
        """Human-readable form."""
        return f"round {self.rounds} of {self.most}: {self.found}/{self.wanted} informative groups"
