"""A sampled sequence: the value from the engine to the gradient, and the columns that a group makes of it.

    engine, segments, expert --SampledSequence--> group_columns --> Group --frame--> learner
                                                  sequences_of <--

A column with one value per token is a field here, a field of `Group` and an entry of `PER_TOKEN` there: joining,
splitting, packing and checking go by these names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bapo.core.errors import ContractError, Refusal
from bapo.core.token_arrays import Float32s, Int32s, pairs_of, runs_of
from bapo.core.turns import Turns, table_of, turns_of
from bapo.core.types import PER_TOKEN, Group, Outcome


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampledSequence:
    """A response (TRL: completion, prime-rl: rollout) as it was sampled: L tokens after a prompt."""

    token_ids: Int32s
    """[L], including the end-of-sequence token."""
    rollout_logprobs: Float32s
    """[L] nats, under the distribution that each token was sampled from (after temperature)."""
    versions: Int32s
    """[L] policy version that sampled each token."""
    outcome: Outcome = Outcome.GRADED
    text: str | None = None
    """For the reward function; None: what the tokenizer decodes without special tokens."""
    turns: Turns | None = None
    """Where its tokens stand in an episode; None: one turn after the prompt."""
    teacher_logprobs: Float32s | None = None
    """[L] nats, of the teacher of a distillation, once the whole response is there; else None."""

    @property
    def truncated(self) -> bool:
        """Whether a limit on its tokens ended it."""
        return self.outcome is Outcome.TRUNCATED

    @property
    def is_expert(self) -> bool:
        """Whether no policy sampled it."""
        return self.outcome is Outcome.EXPERT

    def followed_by(self, later: SampledSequence) -> SampledSequence:
        """The sequence and its continuation, which says how it ended."""
        names = (*PER_TOKEN, "versions")
        return replace(later, **{name: np.concatenate([getattr(self, name), getattr(later, name)]) for name in names})

    def first(self, num_tokens: int) -> SampledSequence:
        """The sequence as a limit of `num_tokens` would have ended it."""
        if len(self.token_ids) <= num_tokens:
            return self
        begin = {name: getattr(self, name)[:num_tokens] for name in (*PER_TOKEN, "versions")}
        return replace(self, outcome=Outcome.TRUNCATED, **begin)


def group_columns(sequences: Sequence[SampledSequence]) -> dict[str, Any]:
    """Columns of the `Group` that has these responses: all but the prompt's and the rewards. Raises: ContractError."""
    lengths = np.array([len(sequence.token_ids) for sequence in sequences], np.int32)
    versions_T = np.concatenate([sequence.versions for sequence in sequences])
    if len(versions_T) != lengths.sum():
        raise ContractError(f"versions of {len(versions_T)} tokens for {lengths.sum()}", Refusal.VERSIONS)
    versions = pairs_of(versions_T, lengths)
    taught = [sequence.teacher_logprobs for sequence in sequences if sequence.teacher_logprobs is not None]
    turns, context_ids = table_of([(sequence.turns, len(sequence.token_ids)) for sequence in sequences])
    return {
        **{name: np.concatenate([getattr(sequence, name) for sequence in sequences]) for name in PER_TOKEN},
        "lengths": lengths,
        "outcomes": np.array([sequence.outcome for sequence in sequences], np.uint8),
        "versions": versions,
        "spans": None if np.array_equal(versions[:, 0], versions[:, 1]) else runs_of(versions_T),
        "turns": turns,
        "context_ids": context_ids,
        "teacher_logprobs": np.concatenate(taught) if len(taught) == len(sequences) else None,
    }


def sequences_of(group: Group, rows: Iterable[int] | None = None) -> Iterator[SampledSequence]:
    """Responses of a group as views into its columns, without texts.

    Args:
        rows: which ones; None: all.
    """
    ends_G, versions_T = np.cumsum(group.lengths), group.token_versions
    for row in range(group.size) if rows is None else rows:
        span = slice(int(ends_G[row] - group.lengths[row]), int(ends_G[row]))
        yield SampledSequence(
            **{name: getattr(group, name)[span] for name in PER_TOKEN},
            versions=versions_T[span],
            outcome=Outcome(int(group.outcomes[row])),
            turns=(
                None
                if group.turns is None or group.context_ids is None
                else turns_of(group.turns, group.context_ids, row)
            ),
            teacher_logprobs=None if group.teacher_logprobs is None else group.teacher_logprobs[span],
        )
