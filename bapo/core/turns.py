"""Turns of a response: what an agent's episode adds to the tokens that were sampled.

    prompt ── turn 0: [context][sampled] ── turn 1: [context][sampled]      a history that grows: one row
                                         └─ turn 2: [context][sampled]      another continuation of turn 0: a fork
    turn 3: [context][sampled]                                              a history that was changed: from nothing

Context (the tool's output, the next question) is read and never trained. The sampled tokens of all turns, in order, are
the tokens of the response: reward, advantage and loss weight belong to the response, however its history forks. A mask
is implied: context is 0, sampled tokens are 1.

Suffixes: U turns, C context tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bapo.core.errors import ContractError, Refusal
from bapo.core.token_arrays import Int32s

FROM_PROMPT = -1
"""Parent of a turn whose context follows the prompt of the group."""
FROM_NOTHING = -2
"""Parent of a turn whose context is all that the engine saw."""
COLUMNS = 4
"""Of a group's turns: response, parent, context tokens, sampled tokens."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turns:
    """The turns of one response."""

    parents_U: Int32s
    """The earlier turn that each continues, with everything before it; or FROM_PROMPT, FROM_NOTHING."""
    num_context_U: Int32s
    num_sampled_U: Int32s
    context_ids: Int32s
    """[C] of all turns, in order."""

    @property
    def leaves(self) -> NDArray[np.bool_]:
        """[U] turns that no other continues: each is the end of a row."""
        leaves = np.ones(len(self.parents_U), np.bool_)
        leaves[self.parents_U[self.parents_U >= 0]] = False
        return leaves

    @property
    def num_computed(self) -> NDArray[np.int64]:
        """[U] tokens of each turn that a pass reads: not the last one of a row, from which nothing is predicted."""
        return self.num_context_U.astype(np.int64) + self.num_sampled_U - self.leaves

    @property
    def num_forks(self) -> int:
        """Rows beyond the first."""
        return int(self.leaves.sum()) - 1

    @property
    def reads_prompt(self) -> bool:
        """Whether a turn begins with the prompt of the group."""
        return bool((self.parents_U == FROM_PROMPT).any())

    def offsets(self, num_prompt: int) -> NDArray[np.int64]:
        """[U] tokens before each turn's context, with `num_prompt` of the prompt where it begins with that."""
        offsets = np.zeros(len(self.parents_U), np.int64)
        ends = offsets.copy()
        for turn, parent in enumerate(self.parents_U.tolist()):
            offsets[turn] = ends[parent] if parent >= 0 else num_prompt if parent == FROM_PROMPT else 0
            ends[turn] = offsets[turn] + self.num_context_U[turn] + self.num_sampled_U[turn]
        return offsets

    def with_rest(self, rest: Int32s, *, has_prompt: bool) -> Turns:
        """The same turns where the prompt of the group lost its last tokens, `rest`: they begin the context of every
        turn that followed it.

        Args:
            has_prompt: whether anything of the prompt is left.
        """
        after = self.parents_U == FROM_PROMPT
        contexts = np.split(self.context_ids, np.cumsum(self.num_context_U)[:-1])
        pieces = [
            piece for follows, own in zip(after, contexts, strict=True) for piece in ([rest, own] if follows else [own])
        ]
        return Turns(
            parents_U=np.where(after & (not has_prompt), FROM_NOTHING, self.parents_U).astype(np.int32),
            num_context_U=(self.num_context_U + after * len(rest)).astype(np.int32),
            num_sampled_U=self.num_sampled_U,
            context_ids=np.concatenate(pieces).astype(np.int32),
        )


def common_start(many: Sequence[Int32s]) -> Int32s:
    """The token ids with which all of at least one sequence begin."""
    first = many[0]
    for other in many[1:]:
        num = min(len(first), len(other))
        differ = np.flatnonzero(first[:num] != other[:num])
        first = first[: differ[0] if len(differ) else num]
    return first.astype(np.int32)


def one_turn(num_sampled: int) -> Turns:
    """A response that an agent did not interrupt: `num_sampled` tokens after the prompt."""
    one = np.array([num_sampled], np.int32)
    return Turns(
        parents_U=np.array([FROM_PROMPT], np.int32),
        num_context_U=np.zeros_like(one),
        num_sampled_U=one,
        context_ids=one[:0],
    )


def table_of(responses: Sequence[tuple[Turns | None, int]]) -> tuple[Int32s | None, Int32s | None]:
    """Columns of a group, [U, 4] and [C], from (turns, sampled tokens) of its responses; None: none has turns."""
    if all(turns is None for turns, _ in responses):
        return None, None
    found = [turns or one_turn(num_sampled) for turns, num_sampled in responses]
    tables = [
        np.stack([np.full_like(turns.parents_U, row), turns.parents_U, turns.num_context_U, turns.num_sampled_U], 1)
        for row, turns in enumerate(found)
    ]
    return np.concatenate(tables), np.concatenate([turns.context_ids for turns in found])


def turns_of(table: Int32s, context_ids: Int32s, row: int) -> Turns:
    """The turns of a response of a group: inverse of `table_of`."""
    chosen = table[:, 0] == row
    start = int(table[table[:, 0] < row, 2].sum())
    own = table[chosen]
    return Turns(
        parents_U=own[:, 1],
        num_context_U=own[:, 2],
        num_sampled_U=own[:, 3],
        context_ids=context_ids[start : start + int(own[:, 2].sum())],
    )


def require_turns(group_id: str, table: Int32s, num_context: int, lengths: Sequence[int], *, has_prompt: bool) -> None:
    """Raises: ContractError for turns that are not those of these responses."""
    if problem := _problem(table, num_context, lengths, has_prompt=has_prompt):
        raise ContractError(f"group {group_id}: {problem}", Refusal.SHAPE)


def _problem(table: Int32s, num_context: int, lengths: Sequence[int], *, has_prompt: bool) -> str:
    if table.ndim != 2 or table.shape[1] != COLUMNS or not len(table):
        return "turns must be rows (response, parent, context tokens, sampled tokens), at least one"
    response, parent, context, sampled = table.astype(np.int64).T
    if (np.diff(response) < 0).any() or response[0] < 0 or response[-1] >= len(lengths):
        return "turns must be in the order of their responses"
    if (sampled < 1).any() or (context < 0).any():
        return "each turn needs at least one sampled token, and no number of context tokens is negative"
    if not np.array_equal(np.bincount(response, sampled, len(lengths)), lengths):
        return "the sampled tokens of the turns are not those of the responses"
    if context.sum() != num_context:
        return f"turns have {context.sum()} context tokens, of which {num_context} are there"
    own = np.arange(len(table)) - np.searchsorted(response, response)  # index of each turn within its response
    if (parent >= own).any() or (parent < FROM_NOTHING).any():
        return "a turn continues an earlier turn of its response, the prompt (-1) or nothing (-2)"
    if ((parent == FROM_NOTHING) & (context < 1)).any() or (not has_prompt and (parent == FROM_PROMPT).any()):
        return "the first token of a turn needs a token before it"
    return ""
