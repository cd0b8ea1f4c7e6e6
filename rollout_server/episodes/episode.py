"""An episode: one response of a group, sampled turn by turn for an agent. Pure, and rebuilt from its events.

    opened --turn, turn, ...--> ended(reward): a response of its group
                          \\---> failed: no reward; the next `opened` begins it again, with another key

Events are what the journal holds, in order. The key of an episode is the API key of its agent: who has it may call, and
no other; the key of a failed attempt is dead.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from bapo.core.errors import ContractError
from bapo.core.sequences import SampledSequence
from bapo.core.turns import FROM_NOTHING

Count = Annotated[int, Meta(ge=0)]
KEY_BYTES = 24


class Opened(msgspec.Struct, frozen=True, kw_only=True, tag="opened"):
    """An attempt begins; all before it is forgotten."""

    index: Count
    """Which response of the group."""
    key: str
    agent: str = ""
    """Who has it: NAME@START of a process that this run restarts; empty: any other."""


class Sampled(msgspec.Struct, frozen=True, kw_only=True, tag="sampled"):
    """One call of the model. Ids, log-probs and versions are little-endian columns of 4 bytes."""

    index: Count
    call: str
    """Digest of the client's request: a retry of it gets this turn again."""
    parent: int
    """The earlier turn that it continues; FROM_NOTHING: the context is all that the engine saw."""
    context_i4: bytes
    token_ids_i4: bytes
    logprobs_f4: bytes
    versions_i4: bytes
    truncated: bool
    text_chars: Count
    text_digest: bytes
    """Length and digest of the rendered text up to the end of the turn (`history.py`)."""

    @property
    def context_ids(self) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """[c]"""
        return np.frombuffer(self.context_i4, "<i4")

    @property
    def token_ids(self) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """[L] sampled tokens."""
        return np.frombuffer(self.token_ids_i4, "<i4")

    @property
    def logprobs(self) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        """[L]"""
        return np.frombuffer(self.logprobs_f4, "<f4")

    @property
    def versions(self) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """[L]"""
        return np.frombuffer(self.versions_i4, "<i4")


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """The agent, or its environment, gave a reward; NaN: the task's reward function grades the last text."""

    index: Count
    reward: float
    facts: dict[str, float] = {}


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """No reward: an error, a reward of null, or a silent agent."""

    index: Count
    reason: str
    detail: str = ""
    counts: bool = True
    """Among the attempts, which are limited; not for an episode that was given back."""


Event = Opened | Sampled | Ended | Failed
_EVENT: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
_pack = msgspec.msgpack.Encoder().encode


def pack_event(event: Event) -> bytes:
    """One entry of the journal."""
    return _pack(event)


def unpack_event(data: bytes) -> Event:
    """Inverse of `pack_event`. Raises: ContractError."""
    try:
        return _EVENT.decode(data)
    except msgspec.DecodeError as error:
        raise ContractError(f"an entry of a journal of episodes is malformed: {error}") from error


def new_key() -> str:
    """A key that cannot be guessed. Its look is that of the keys that SDKs check."""
    return f"sk-bapo-{secrets.token_urlsafe(KEY_BYTES)}"


@dataclass(slots=True, kw_only=True, eq=False)
class Episode:
    """One attempt at one response."""

    index: int
    key: str
    agent: str = ""
    turns: list[Sampled] = field(default_factory=list)
    attempts: int = 0
    """Failed ones before this that count."""
    reward: float | None = None
    """NaN: to be graded from the last text."""
    facts: dict[str, float] = field(default_factory=dict)
    """What its agent reported besides."""
    has_failed: bool = False

    @property
    def is_open(self) -> bool:
        """Whether its agent may call."""
        return self.reward is None and not self.has_failed

    def apply(self, event: Event) -> None:
        """What has happened. Raises: ContractError for an event that cannot follow."""
        if isinstance(event, Opened):
            if not self.has_failed:
                raise ContractError(f"episode {self.index} is opened again and has not failed")
            self.key, self.agent, self.turns, self.has_failed = event.key, event.agent, [], False
        elif not self.is_open:
            raise ContractError(f"episode {self.index} has ended, and nothing can follow")
        elif isinstance(event, Sampled):
            if not FROM_NOTHING <= event.parent < len(self.turns) or event.parent == -1:
                raise ContractError(f"episode {self.index} has no turn {event.parent}")
            self.turns.append(event)
        elif isinstance(event, Ended):
            self.reward, self.facts = event.reward, event.facts
        else:
            self.has_failed, self.attempts = True, self.attempts + event.counts

    def path_of(self, turn: int) -> list[int]:
        """All tokens up to the end of a turn, as the engine saw and sampled them; of FROM_NOTHING none."""
        parts: list[Sampled] = []
        while turn >= 0:
            parts.append(self.turns[turn])
            turn = parts[-1].parent
        return [
            token for part in reversed(parts) for ids in (part.context_ids, part.token_ids) for token in ids.tolist()
        ]

    @property
    def num_tokens(self) -> int:
        """Context and sampled tokens of all turns: what a micro-batch of the learner needs for it, at most."""
        return sum(len(turn.context_i4) + len(turn.token_ids_i4) for turn in self.turns) // 4

    @property
    def num_forks(self) -> int:
        """Rows beyond the first."""
        return len(self.turns) - len({turn.parent for turn in self.turns if turn.parent >= 0}) - 1

    def turn_of_call(self, call: str) -> Sampled | None:
        """The turn of an earlier request with this digest, the newest."""
        return next((turn for turn in reversed(self.turns) if turn.call == call), None)


def replayed(events: Sequence[Event]) -> dict[int, Episode]:
    """Episodes of one group by index, from its journal. Raises: ContractError."""
    episodes: dict[int, Episode] = {}
    for event in events:
        found = episodes.get(event.index)
        if found is not None:
            found.apply(event)
        elif isinstance(event, Opened):
            episodes[event.index] = Episode(index=event.index, key=event.key, agent=event.agent)
        else:
            raise ContractError(f"episode {event.index} begins with {type(event).__name__}")
    return episodes


def sampled_turn(
    index: int,
    sequence: SampledSequence,
    *,
    call: str,
    parent: int,
    context_ids: Sequence[int],
    mark: tuple[int, bytes],
) -> Sampled:
    """The event of a finished call. `mark`: of the text up to its end (`history.text_mark`)."""
    return Sampled(
        index=index,
        call=call,
        parent=parent,
        context_i4=np.asarray(context_ids, "<i4").tobytes(),
        token_ids_i4=sequence.token_ids.astype("<i4").tobytes(),
        logprobs_f4=sequence.rollout_logprobs.astype("<f4").tobytes(),
        versions_i4=sequence.versions.astype("<i4").tobytes(),
        truncated=sequence.truncated,
        text_chars=mark[0],
        text_digest=mark[1],
    )
