"""Split the batch D_t into mini-batches and micro-batches (docs/paper.md, Algorithm 1 line 18).

    Batch --columns.py--> Columns --plan_passes--> pieces of each rank --microbatch.py--> MicroBatch (tensors)

Suffixes: E groups of the batch, R responses, S turns of all responses.

Nothing is padded. A prompt, with its images, is packed once per micro-batch for all responses of its group that are in
it, and the last token of a response is not packed, because nothing is predicted from it. The plan does not change the
loss: each response token carries its weight over the whole mini-batch (`losses.objective.token_weights`).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from bapo.algorithms.randomness import rng_for
from learner.batch.columns import Columns, Int64s
from learner.batch.microbatch import MicroBatch, Piece, build


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCost:
    """FLOPs of a pass, in units of one packed token in the linear layers of the decoder."""

    head: float = 0.0
    """Per response token, in the output head."""
    attention: float = 0.0
    """Per squared length of a sequence."""


TOKENS_ONLY = PassCost()
"""Costs are numbers of packed tokens."""

PIECE_SIZES = (1.0, 0.85, 0.7, 0.6, 0.5, 0.4, 0.3, 0.25)
"""Maximum sizes of a piece that are tried, as shares of the budget."""


def minibatches(num_groups: int, minibatch_size: int | None, *, seed: int, step: int, epoch: int) -> list[list[int]]:
    """Groups of each optimizer step: shuffled, then split near-equally (docs/paper.md, Decisions); None: all in one."""
    order = list(range(num_groups))
    rng_for(seed, step, f"minibatches/{epoch}").shuffle(order)
    ends = list(accumulate(near_equal_split(num_groups, minibatch_size or max(1, num_groups))))
    return [order[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def microbatches_of(
    columns: Columns,
    responses: Int64s,
    *,
    budget: int,
    rank: int,
    num_ranks: int,
    device: torch.device,
    cost: PassCost = TOKENS_ONLY,
) -> Iterator[MicroBatch]:
    """This rank's share of some responses, split by a budget of packed tokens.

    Every rank plans for all ranks, so that all run the same number of micro-batches, as FSDP's collectives require. A
    rank without work runs a micro-batch of one token and no response. There is always at least one, so that every
    parameter gets a gradient.
    """
    for turn in plan_passes(columns, responses, budget=budget, num_ranks=num_ranks, cost=cost):
        yield build(columns, turn[rank], device)


def plan_passes(
    columns: Columns, responses: Int64s, *, budget: int, num_ranks: int, cost: PassCost = TOKENS_ONLY
) -> list[list[list[Piece]]]:
    """Assign responses to micro-batches of all ranks: a list of turns, each with one micro-batch per rank.

    FSDP makes ranks wait for each other in every turn, so a turn takes as long as its most expensive micro-batch. The
    micro-batches are packed over all ranks at once and sorted by cost, so that those of a turn are alike. Large pieces
    of groups repeat few prompts, small ones balance well: several sizes are tried, and the fastest plan is taken.

    Args:
        budget: packed tokens of a micro-batch; a response longer than it gets its own (the config rejects that case).
        cost: of a pass, for the balance.
    """
    weights = _Weights(columns, cost)
    members: dict[int, list[int]] = {}
    for response in responses.tolist():
        members.setdefault(int(columns.group_R[response]), []).append(response)
    groups = [Piece(group=group, responses=tuple(found)) for group, found in members.items()]
    plans = []
    for share in PIECE_SIZES:
        pieces = [piece for group in groups for piece in _split(group, int(share * budget), weights)]
        packed = _pack(pieces, budget, num_ranks, weights)
        plans.append([packed[i : i + num_ranks] for i in range(0, len(packed), num_ranks)])
    return min(plans, key=lambda turns: sum(max(map(weights.flops, turn)) for turn in turns))


class _Weights:
    """Size and cost of pieces."""

    def __init__(self, columns: Columns, cost: PassCost) -> None:
        prompts_E = np.array([len(prompt) for prompt in columns.prompts_E], dtype=np.int64)
        prompts_R = prompts_E[columns.group_R]
        tokens_R = columns.lengths_R - 1  # the last token of a response is not packed
        squared_R = (tokens_R + prompts_R).astype(np.float64) ** 2
        for response, turns in columns.turns.items():
            tokens_R[response] = turns.num_computed.sum()
            ends = turns.offsets(int(prompts_R[response])) + turns.num_computed
            squared_R[response] = (ends[turns.leaves].astype(np.float64) ** 2).sum()
        flops_R = tokens_R + cost.head * columns.lengths_R + cost.attention * squared_R
        self.prompts: list[int] = prompts_E.tolist()
        self.responses: list[int] = tokens_R.tolist()
        self._flops: list[float] = flops_R.tolist()

    def tokens(self, piece: Piece) -> int:
        """Packed tokens."""
        return self.prompts[piece.group] + sum(self.responses[response] for response in piece.responses)

    def flops(self, pieces: Sequence[Piece]) -> float:
        """Cost of a micro-batch, in packed tokens."""
        return sum(self.prompts[piece.group] + sum(self._flops[r] for r in piece.responses) for piece in pieces)


def _split(group: Piece, limit: int, weights: _Weights) -> list[Piece]:
    """Split a group into few pieces of similar size with at most `limit` packed tokens, or a single response.

    Every piece has a response: a response of one token adds none, so of pieces of one size the one with
    fewer responses gets the next.
    """
    prompt = weights.prompts[group.group]
    order = sorted(group.responses, key=lambda response: -weights.responses[response])
    num = max(1, -(-sum(weights.responses[response] for response in order) // max(1, limit - prompt)))
    while True:
        num = min(num, len(order))
        parts = [list[int]() for _ in range(num)]
        smallest = [(prompt, 0, i) for i in range(num)]
        for response in order:
            size, count, i = smallest[0]
            parts[i].append(response)
            heapq.heapreplace(smallest, (size + weights.responses[response], count + 1, i))
        if max(smallest)[0] <= limit or num == len(order):
            return [Piece(group=group.group, responses=tuple(sorted(part))) for part in parts]
        num += 1


def _pack(pieces: Sequence[Piece], budget: int, num_ranks: int, weights: _Weights) -> list[list[Piece]]:
    """Pack pieces into the fewest micro-batches that `_fill` finds, a multiple of the ranks; most expensive first."""
    ordered = sorted(pieces, key=lambda piece: (-weights.flops([piece]), piece.group, piece.responses))
    least = sum(min(budget, weights.tokens(piece)) for piece in pieces)
    turns = max(1, -(-least // (budget * num_ranks)))
    while (found := _fill(ordered, turns * num_ranks, budget, weights)) is None:
        turns += max(1, turns // 50)
    return sorted(map(_merged, found), key=lambda pieces: -weights.flops(pieces))


def _fill(pieces: Sequence[Piece], num: int, budget: int, weights: _Weights) -> list[list[Piece]] | None:
    """Put each piece into the cheapest of `num` micro-batches that has room for it; None if none has."""
    cheapest = [(0.0, i) for i in range(num)]
    tokens, filled = [0] * num, [list[Piece]() for _ in range(num)]
    for piece in pieces:
        size, full = weights.tokens(piece), []
        while cheapest:
            load, i = heapq.heappop(cheapest)
            if not filled[i] or tokens[i] + size <= budget:
                break
            full.append((load, i))
        else:
            return None
        tokens[i] += size
        filled[i].append(piece)
        for entry in (*full, (load + weights.flops([piece]), i)):
            heapq.heappush(cheapest, entry)
    return filled


def _merged(pieces: Sequence[Piece]) -> list[Piece]:
    """The same responses with one piece per group."""
    members: dict[int, tuple[int, ...]] = {}
    for piece in pieces:
        members[piece.group] = members.get(piece.group, ()) + piece.responses
    return [Piece(group=group, responses=found) for group, found in members.items()]


# Splitting a batch into mini-batches, one optimizer step each (docs/paper.md, Algorithm 1 line 18).


def near_equal_split(num_groups: int, minibatch_size: int) -> list[int]:
    """Sizes of the ceil(num_groups / minibatch_size) mini-batches; they differ by at most one, larger ones first.

    Example: 179 groups by 64 -> [60, 60, 59], not [64, 64, 51]: every optimizer step has the same weight.
    Returns: [] for an empty batch.
    Raises: ValueError for a negative batch or an empty mini-batch.
    """
    if num_groups < 0 or minibatch_size < 1:
        raise ValueError(f"cannot split {num_groups} groups into mini-batches of {minibatch_size}")
    if num_groups == 0:
        return []
    num_minibatches = -(-num_groups // minibatch_size)
    smaller, num_larger = divmod(num_groups, num_minibatches)
    return [smaller + 1] * num_larger + [smaller] * (num_minibatches - num_larger)
