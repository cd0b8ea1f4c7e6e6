"""Tokens of episodes that are older than the lag allows become context (`rollout.stale_tokens = "mask"`).

    sampled by version 3 3 4 6 6, oldest allowed 4:     [context 0][3 3|4 6 6]  ->  [context 0 3 3][4 6 6]

An episode is sampled while weights are replaced, so its first calls may be too old when it ends. They are read as what
the tools said, and neither trained nor counted in a length; the episode keeps its reward, and its place in the baseline
of its group. An episode without a younger token is left out of the loss. Only fresh groups: reused ones are old on
purpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from bapo.config.tree import Config
from bapo.core.sequences import SampledSequence, group_columns, sequences_of
from bapo.core.token_arrays import Int32s
from bapo.core.turns import Turns, one_turn
from bapo.core.types import PER_TOKEN, Batch, BatchEntry, Origin

DIGITS = 6


def with_stale_as_context(batch: Batch, config: Config) -> Batch:
    """The batch that trains: the same object without `mask`, or without a stale token."""
    oldest = _oldest(batch, config)
    entries = tuple(_of_entry(entry, oldest) for entry in batch.entries)
    same = all(new is old for new, old in zip(entries, batch.entries, strict=True))
    return batch if same else replace(batch, entries=entries)


def stale_rows(batch: Batch, config: Config) -> NDArray[np.bool_]:
    """[R] responses of which every token is stale."""
    oldest = _oldest(batch, config)
    return np.concatenate([_masked_rows(entry) & (entry.group.versions[:, 1] < oldest) for entry in batch.entries])


def young_rows(entry: BatchEntry, batch: Batch, config: Config) -> NDArray[np.bool_]:
    """[G] rows whose age is limited, and that train."""
    return _masked_rows(entry) & (entry.group.versions[:, 1] >= _oldest(batch, config))


def became_context(batch: Batch, config: Config) -> NDArray[np.bool_]:
    """[M] tokens of a batch as it was sampled that `with_stale_as_context` takes from its responses."""
    oldest = _oldest(batch, config)
    return np.concatenate(
        [
            ~_kept(sequence, oldest) if is_chosen else np.zeros(len(sequence.token_ids), np.bool_)
            for entry in batch.entries
            for sequence, is_chosen in zip(sequences_of(entry.group), _masked_rows(entry).tolist(), strict=True)
        ]
    )


def masked_fields(batch: Batch, config: Config) -> dict[str, float]:
    """Of the step's row: share of the sampled tokens that are too old to train. Empty without `mask`, or tokens."""
    if config.rollout.stale_tokens != "mask" or not batch.entries:
        return {}
    lengths_R = np.concatenate([entry.group.lengths for entry in batch.entries])
    num_masked = became_context(batch, config).sum() + lengths_R[stale_rows(batch, config)].sum()
    return {"episode_masked_share": round(float(num_masked / lengths_R.sum()), DIGITS)}


def _oldest(batch: Batch, config: Config) -> int:
    """The first version that is not stale; 0: all are young enough, or were dropped before."""
    is_masked = config.rollout.stale_tokens == "mask"
    return config.cadence.oldest_fresh(batch.step) if is_masked else 0


def _masked_rows(entry: BatchEntry) -> NDArray[np.bool_]:
    """[G] rows whose age is limited."""
    return np.full(entry.group.size, entry.origin is Origin.X1) & ~entry.replayed_rows & ~entry.expert_rows


def _of_entry(entry: BatchEntry, oldest: int) -> BatchEntry:
    group, chosen = entry.group, _masked_rows(entry)
    if not (chosen & (group.versions[:, 0] < oldest) & (group.versions[:, 1] >= oldest)).any():
        return entry
    sequences = [
        _with_context(sequence, oldest) if is_chosen else sequence
        for sequence, is_chosen in zip(sequences_of(group), chosen.tolist(), strict=True)
    ]
    return replace(entry, group=replace(group, **group_columns(sequences)))


def _with_context(sequence: SampledSequence, oldest: int) -> SampledSequence:
    kept_L = _kept(sequence, oldest)
    if kept_L.all():
        return sequence
    turns = sequence.turns or one_turn(len(sequence.token_ids))
    num_stale_U = [int((~piece).sum()) for piece in np.split(kept_L, np.cumsum(turns.num_sampled_U)[:-1])]
    columns = {name: getattr(sequence, name)[kept_L] for name in (*PER_TOKEN, "versions")}
    return replace(sequence, **columns, turns=_moved(turns, sequence.token_ids, num_stale_U))


def _kept(sequence: SampledSequence, oldest: int) -> NDArray[np.bool_]:
    """[L] tokens that stay sampled: in each turn those from its first young one, as versions rise within a call; all of
    a response without a young token."""
    young_L = sequence.versions >= oldest
    if not young_L.any():
        return np.ones_like(young_L)
    turns = sequence.turns or one_turn(len(young_L))
    pieces = np.split(young_L, np.cumsum(turns.num_sampled_U)[:-1])
    return np.concatenate([np.logical_or.accumulate(piece) for piece in pieces])


def _moved(turns: Turns, token_ids: Int32s, num_stale_U: Sequence[int]) -> Turns:
    """The first tokens of each turn as its context. A turn that is all context is read by those that continue it."""
    contexts = np.split(turns.context_ids, np.cumsum(turns.num_context_U)[:-1])
    sampled = np.split(token_ids, np.cumsum(turns.num_sampled_U)[:-1])
    left: dict[int, tuple[int, Int32s]] = {}  # turn -> what a turn that continues it does instead
    table, kept_contexts = list[tuple[int, int, int]](), list[Int32s]()
    for turn, parent in enumerate(turns.parents_U.tolist()):
        parent, before = left[parent] if parent >= 0 else (parent, token_ids[:0])
        num_stale = num_stale_U[turn]
        context = np.concatenate([before, contexts[turn], sampled[turn][:num_stale]])
        if num_stale == len(sampled[turn]):
            left[turn] = (parent, context)
            continue
        left[turn] = (len(table), token_ids[:0])
        table.append((parent, len(context), len(sampled[turn]) - num_stale))
        kept_contexts.append(context)
    parents, num_context, num_sampled = np.array(table, np.int32).T
    return Turns(
        parents_U=parents,
        num_context_U=num_context,
        num_sampled_U=num_sampled,
        context_ids=np.concatenate(kept_contexts).astype(np.int32),
    )
