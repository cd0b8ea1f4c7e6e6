"""What the buffer keeps of a group besides its frame, and what becomes of one that is pushed.

A store holds a group twice: its frame, opaque and untouched, and its `GroupRecord`, the few numbers that rules, records
of the run and delivery need. No rule ever opens a frame. What is common to a group and its request, its `terms`, is one
string, so that any store can compare them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import msgspec
from xxhash import xxh3_64_hexdigest

from bapo.errors import ContractError, Refusal
from bapo.plain_json import plain_number
from bapo.rows import Kind
from bapo.types import Fate, GroupStat, Origin, Prompt, Purpose, RolloutRequest, stat_of
from bapo.wire import GroupHeader


class GroupRecord(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What the index knows of one stored group. The order of the fields is that of the row that stores keep, of which
    push.lua reads three."""

    group_id: str
    prompt_id: str
    purpose: Purpose
    step: int
    """`step` of the request."""
    label: str
    worker_id: str
    policy_version: int
    """Oldest version that sampled any token."""
    rewards: tuple[float, ...]
    """[G]"""
    num_tokens: int
    num_bytes: int
    """Size of the frame."""
    claimed_at: float
    sample_s: float
    grade_s: float
    outcome_chars: str = ""
    """`outcomes`, one character each: Redis' msgpack knows no bytes."""
    digest: str = ""
    """`bapo.frames.frame_digest` of the frame: of its head as it was pushed, of its body as its worker says."""
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

    def fate(
        self,
        origin: Origin | None,
        reason: str,
        birth: int,
        *,
        item: str = "",
        rows: tuple[int, ...] | None = None,
        kind: Kind = "rl",
    ) -> Fate:
        """One line of the run's group records."""
        return Fate(
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
    """The record of a group whose frame has so many bytes, and this digest."""
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
    """What of a prompt must be the same in a request and in the group that answers it: text, task and answer.

    Raises: ContractError for an answer that is no JSON.
    """
    try:
        content = json.dumps([prompt.text, prompt.task, prompt.answer], sort_keys=True, default=plain_number)
    except (TypeError, ValueError) as error:
        raise ContractError(f"prompt {prompt.prompt_id}: its answer is no JSON: {error}", Refusal.HEADER) from error
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


class PushFate:
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

    fate: Fate
    request: RolloutRequest

    @property
    def event(self) -> str:
        """What is counted: the reason and the difficulty, as right responses of G."""
        rewards = self.fate.rewards
        return f"dropped_groups:{self.fate.reason}:{round(sum(rewards))}/{len(rewards)}"
