"""Batches whose responses are episodes: trees of turns, and the histories that they mean, by walking from the root."""

from __future__ import annotations

import dataclasses

import numpy as np

from bapo.core.types import Batch, Group
from tests.support.tiny_model import VOCAB_SIZE


def histories_of(group: Group, row: int) -> list[tuple[list[int], list[int]]]:
    """(everything that the engine saw, what it sampled) of each turn of a response, from the columns alone."""
    prompt, sampled_at = group.prompt_token_ids.tolist(), int(group.lengths[:row].sum())
    if group.turns is None or group.context_ids is None:
        return [(prompt, group.token_ids[sampled_at : sampled_at + int(group.lengths[row])].tolist())]
    found: list[tuple[list[int], list[int]]] = []
    context_at = 0
    for response, parent, num_context, num_sampled in group.turns.tolist():
        if response == row:
            context = group.context_ids[context_at : context_at + num_context].tolist()
            before = [prompt, []][-1 - parent] if parent < 0 else found[parent][0] + found[parent][1]
            found.append((before + context, group.token_ids[sampled_at : sampled_at + num_sampled].tolist()))
            sampled_at += num_sampled
        context_at += num_context
    return found


def with_turns(batch: Batch, seed: int = 0) -> Batch:
    """The same sampled tokens, with every second group's responses cut into trees of turns with random context."""
    rng = np.random.default_rng(seed)
    return _with_groups(batch, lambda number, group: _cut(group, rng) if number % 2 else group)


def forked(batch: Batch) -> Batch:
    """The same episodes, with every turn stored as a row of its own that begins from nothing."""
    return _with_groups(batch, lambda _, group: group if group.turns is None else _forked(group))


def _with_groups(batch: Batch, change: object) -> Batch:
    entries = [
        dataclasses.replace(entry, group=change(number, entry.group))  # type: ignore[operator]
        for number, entry in enumerate(batch.entries)
    ]
    return dataclasses.replace(batch, entries=tuple(entries))


def _cut(group: Group, rng: np.random.Generator) -> Group:
    table, context = [], []
    for row, length in enumerate(group.lengths.tolist()):
        ends = sorted({length, *rng.integers(1, length + 1, size=3).tolist()})
        for turn, num_sampled in enumerate(np.diff([0, *ends]).tolist()):
            parent = int(rng.integers(-2, turn))
            num_context = int(rng.integers(1 if parent == -2 else 0, 5))
            table.append((row, parent, num_context, num_sampled))
            context += rng.integers(4, VOCAB_SIZE, size=num_context).tolist()
    return dataclasses.replace(group, turns=np.array(table, np.int32), context_ids=np.array(context, np.int32))


def _forked(group: Group) -> Group:
    table, context = [], list[int]()
    for row in range(group.size):
        for history, sampled in histories_of(group, row):
            table.append((row, -2, len(history), len(sampled)))
            context += history
    return dataclasses.replace(group, turns=np.array(table, np.int32), context_ids=np.array(context, np.int32))
