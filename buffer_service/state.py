"""What the buffer keeps besides groups: the values that its use cases and its stores exchange."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from xxhash import xxh3_64_hexdigest

from bapo.core.batch_items import Kind
from bapo.core.codec import GroupHeader
from bapo.core.errors import ContractError, Refusal
from bapo.core.json_values import plain_number
from bapo.core.types import (
    Count,
    GroupResult,
    GroupStat,
    HardPrompt,
    Origin,
    Prompt,
    Purpose,
    RolloutRequest,
    Seconds,
    Share,
    Version,
    stat_of,
)
from bapo.transport.messages import ExtraRound


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """B_bad, B_high and the numbers of eq. 8 after the assembly of `step`."""

    step: Version = 0
    r_tot: Share | None = None
    c2: Share | None = None
    c3: Share | None = None
    bad: tuple[HardPrompt, ...] = ()
    """B_bad, oldest first."""
    high: tuple[GroupStat, ...] = ()
    """B_high, oldest first: what the composer keeps to be used again."""
    edits: Count = 0
    """How often they were changed since that assembly: by a person, or by a demand."""
    num_extra: Count = 0
    """Fresh groups that all demands of the run have asked for."""
    demand: Demand | None = None
    """Of step + 1."""
    extra_rounds: tuple[ExtraRound, ...] = ()
    """Rounds that were asked for, until a batch has consumed a group of them: then they are known to be on their way.
    A step may be filled by groups that were sampled ahead, before the scheduler has seen its demand."""

    def needs(self, num_fresh: int) -> int:
        """Fresh groups that the next step needs. `num_fresh`: those of its first round."""
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
    stale: tuple[GroupResult, ...]
    """Groups that were too old, dropped since the last assembly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReading:
    """What one moment of the store says of a step."""

    step: int
    ready: Readiness
    view: Callable[[], View]
    """What its assembly reads, of that moment except groups that were consumed since. May block, so it is called only
    when nothing is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    """A batch without its groups' frames."""

    step: Version
    group_ids: tuple[str, ...]
    header: Mapping[str, Any]
    """Of the batch's frame on the wire."""
    num_bytes: Count
    """Of its groups' frames together."""
    untrained: tuple[str, ...] = ()
    """Groups that its assembly saw and did not train, held as long as the batch, so that their texts can be read."""

    @property
    def held(self) -> tuple[str, ...]:
        """All groups that the batch refers to; one may be there twice."""
        return self.group_ids + self.untrained


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectorState:
    """What a prompt selector has learned, opaque to a store: it stands for the success counts that it was made of."""

    round: Version = 0
    """Newest step that prompts were proposed for from it; 0: nothing was kept yet."""
    through: Version = 0
    """Step up to which success counts are in it."""
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
    success_counts: bytes = b""
    """Of `fresh`, for a prompt selector that learns (`bapo.core.success_counts`); empty: none does."""

    @property
    def left_bad(self) -> tuple[str, ...]:
        """Ids of the prompts that left B_bad."""
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


# A store holds a group twice: its frame, opaque and untouched, and its `GroupRecord`, the few numbers that rules, run
# records and delivery need. No rule opens a frame. What a group and its request have in common, its `terms`, is one
# string, so that a script can compare them.


class GroupRecord(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What the index knows of one stored group. The order of the fields is that of the row that stores keep, of which
    push.lua reads three."""

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
    """Size of the frame."""
    claimed_at: Seconds
    sample_s: Seconds
    grade_s: Seconds
    outcome_chars: str = ""
    """`outcomes`, one character each: Redis' msgpack knows no bytes."""
    digest: str = ""
    """`bapo.core.frames.frame_digest` of the frame: of its head as it was pushed, of its body as its worker says."""
    prompt_digest: str = ""
    """`prompt_digest` of its prompt."""

    @property
    def outcomes(self) -> bytes:
        """[G] values of Outcome, one byte per response; empty when all are GRADED."""
        return self.outcome_chars.encode("latin-1")

    @property
    def order(self) -> tuple[int, str]:
        """Key of the order in which a composer sees groups: free of when they happened to arrive."""
        return self.step, self.group_id

    @property
    def terms(self) -> str:
        """What the group answers to, to be compared with `request_terms`."""
        return _terms(self.purpose, self.step, len(self.rewards), self.prompt_id, self.prompt_digest, self.label)

    @property
    def outcome(self) -> tuple[str, float, int]:
        """(prompt id, k, G): what a prompt selector learns from."""
        return self.prompt_id, float(sum(self.rewards)), len(self.rewards)

    def stat(self, birth: int = 0) -> GroupStat:
        """What the composer sees."""
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
        """One line of the run's group records."""
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
        )


def record_of(group: GroupHeader, num_bytes: int, digest: str) -> GroupRecord:
    """The record of a group. `num_bytes`, `digest`: of its frame."""
    return GroupRecord(
        group_id=group.group_id,
        prompt_id=group.prompt.prompt_id,
        purpose=group.purpose,
        step=group.step,
        label=group.label,
        worker_id=group.worker_id,
        policy_version=group.policy_version,
        rewards=group.rewards,
        num_tokens=group.num_tokens,
        num_bytes=num_bytes,
        claimed_at=group.timing.claimed_at,
        sample_s=group.timing.sample_s,
        grade_s=group.timing.grade_s,
        outcome_chars=group.outcomes.decode("latin-1") if any(group.outcomes) else "",
        digest=digest,
        prompt_digest=prompt_digest(group.prompt),
    )


def prompt_digest(prompt: Prompt) -> str:
    """What of a prompt must be the same in a request and in the group that answers it: text, task, answer and images.

    Raises: ContractError for an answer that is not JSON.
    """
    parts = [prompt.text, prompt.task, prompt.answer, *([prompt.images] if prompt.images else [])]
    try:
        content = json.dumps(parts, sort_keys=True, default=plain_number)
    except (TypeError, ValueError) as error:
        raise ContractError(f"prompt {prompt.prompt_id}: its answer is not JSON: {error}", Refusal.HEADER) from error
    return xxh3_64_hexdigest(content.encode())


def request_terms(request: RolloutRequest) -> str:
    """What a group must be to answer the request: purpose, step, G, prompt and label in one comparable string."""
    prompt = request.prompt
    return _terms(
        request.purpose, request.step, request.group_size, prompt.prompt_id, prompt_digest(prompt), request.label
    )


TERMS = ("purpose", "step", "group_size", "prompt", "label")


def _terms(purpose: Purpose, step: int, size: int, prompt_id: str, digest: str, label: str) -> str:
    return f"{purpose.value} {step} {size} {prompt_id}/{digest} {label}"


class Incoming(msgspec.Struct, frozen=True, kw_only=True):
    """A group on its way into the store, which has its frame already."""

    record: GroupRecord
    frame_name: str
    """Under which the frame was written."""
    newest_version: int = 0
    """Newest version that sampled any token."""


MISMATCH, OTHER_CONTENT = CONTRADICTIONS = ("mismatch", "other_content")
"""As push.lua says it."""


def contradiction(word: str, group_id: str, detail: str, answered: str = "") -> ContractError:
    """What is raised for a group that contradicts its request, whose terms are `detail` and those of the group
    `answered`, or what is held of its lease, whose worker is `detail`."""
    if word == MISMATCH:
        pairs = zip(TERMS, detail.split(" "), answered.split(" "), strict=True)
        others = [_difference(name, asked, mine) for name, asked, mine in pairs if asked != mine]
        message = f"group {group_id} does not answer its request: {', '.join(others)}"
        return ContractError(message, Refusal.NOT_ITS_REQUEST)
    message = f"group {group_id} was stored with another content, from the same lease of {detail}: "
    return ContractError(message + "the first one stays, and nothing of this push is stored", Refusal.OTHER_CONTENT)


def _difference(name: str, asked: str, mine: str) -> str:
    if name == "prompt":
        asked, mine = asked.rpartition("/")[0], mine.rpartition("/")[0]
        if asked == mine:
            return f"prompt {asked} was asked for with another text, task or answer"
    return f"{name} {asked or 'none'} was asked for, not {mine or 'none'}"


class PushResult:
    """What became of a pushed group."""

    STORED = "stored"
    DUPLICATE = "duplicate"
    """Its request was answered, or dropped, before."""
    STALE = "stale"
    """Sampled by weights older than the request admits; the request is queued again."""
    UNKNOWN = "unknown"
    """Never asked for, or forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshGroup:
    """A fresh group that no batch has consumed, and the request that it answers."""

    record: GroupRecord
    request: RolloutRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """A fresh group that is too old for its step, and the request that asks for its prompt once more."""

    result: GroupResult
    request: RolloutRequest

    @property
    def event(self) -> str:
        """What is counted: the reason and the difficulty, as right responses of G."""
        rewards = self.result.rewards
        return f"dropped_groups:{self.result.reason}:{round(sum(rewards))}/{len(rewards)}"


@dataclass(frozen=True, slots=True)
class Demand:
    """Further generation rounds that the next step has asked for: its batch has too few groups that train."""

    step: int
    rounds: int
    """Rounds of B fresh groups that it needs now, from 2."""
    most: int
    """Rounds after which it takes what there is."""
    found: int
    """Groups that train, among those of the rounds before."""
    wanted: int
    """Groups that train, when the batch is full."""
    num_fresh: int
    """Fresh groups that the step needs: those of all its rounds."""

    @property
    def sentence(self) -> str:
        """For people."""
        return f"round {self.rounds} of {self.most}: {self.found}/{self.wanted} informative groups"
