"""What is shown of an episode: its turns, each with the context that the agent and its tools put before it.

    group's prompt   <user>a+c<assistant>                     as the engine saw it
    turn 0           [               ] get a                  context is grey, sampled tokens have their values
    turn 1           [<tool>37<asst> ] get c
    turn 2           [<tool>37 is odd] calc 37+5              fork: continues turn 0

Token ids of turns are in `bapo.core.turns`; here are their texts, as a record has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from bapo.core.turns import FROM_NOTHING, FROM_PROMPT

CHARS = 4
"""Approximate characters per token, to weigh texts against tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnText:
    """What an episode read before a turn, and how much it then sampled; a struct in the file."""

    parent: int
    """The earlier turn that it continues, from 0; FROM_PROMPT, FROM_NOTHING."""
    num_tokens: int
    """Sampled tokens."""
    context: str
    """With special tokens, so that roles are visible. Of FROM_NOTHING all that the engine saw."""


def fork_of(turn: int, parent: int) -> str:
    """Where a turn continues if that is not the turn before it; empty where nothing is forked.

    Example: `fork_of(2, 0)` is "fork: continues turn 0".
    """
    if turn == 0 or parent == turn - 1:
        return ""
    if parent == FROM_PROMPT:
        return "history was changed: starts again after the prompt"
    return "history was changed: starts again" if parent == FROM_NOTHING else f"fork: continues turn {parent}"


def pieces_by_turn(pieces: Sequence[str], sizes: Sequence[int]) -> list[Sequence[str]]:
    """Pieces of each turn, at least one turn.

    Args:
        pieces: one per sampled token, or one per turn.
        sizes: sampled tokens of each turn; empty: one turn.
    """
    if not sizes:
        return [pieces]
    ends = [0, *accumulate(sizes if len(pieces) > len(sizes) else [1] * len(sizes))]
    return [pieces[start:end] for start, end in pairwise(ends)]


def num_context(contexts: Sequence[str]) -> int:
    """Approximate tokens of the contexts."""
    return sum(map(len, contexts)) // CHARS
