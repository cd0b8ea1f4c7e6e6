"""Pack the batch D_t into micro-batches (docs/paper.md, Algorithm 1 line 18).

    Batch --columns_of--> Columns --plan_passes--> pieces of each rank --build--> MicroBatch (tensors)

Suffixes: E groups of the batch, R responses, M response tokens (trained), N packed tokens (computed).

Nothing is padded. A prompt, with its images, is packed once per micro-batch for all responses of its group that are in
it, and the last token of a response is not packed, because nothing is predicted from it. The plan does not change the
loss: each response token carries its weight over the whole mini-batch (`losses.objective.token_weights`).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bapo.algorithms.randomness import rng_for
from bapo.config.tree import Config
from bapo.core.errors import ContractError
from bapo.core.types import Batch
from bapo.runtime.vision import ImageReader, Patches
from learner.advantages.of_batch import left_out, of_kind_sft, row_advantages
from learner.batch.packed_attention import Packing, pack_rows
from learner.losses.base import Rows

Int64s = NDArray[np.int64]
Float32s = NDArray[np.float32]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Columns:
    """A batch as columns: responses concatenated in group order."""

    prompts_E: tuple[Int64s, ...]
    """[P] token ids of each group's prompt."""
    group_R: Int64s
    """Group index of each response."""
    starts_R: Int64s
    """[R + 1] start of each response in the token columns; the last entry is M."""
    lengths_R: Int64s
    """Tokens per response."""
    token_ids_M: Int64s
    rollout_logprobs_M: Float32s
    """log alpha in nats."""
    advantage_R: Float32s
    """A_j of eq. 2, times the weights of the entry and of its origin; 0 for an entry of kind sft."""
    replayed_R: Bools
    """Whether the response was sampled for an earlier batch."""
    expert_R: Bools
    """Whether it is an expert solution (not sampled, rollout log-probs 0)."""
    sft_R: Bools
    """Whether it is trained with cross-entropy instead of the surrogate."""
    left_out_R: Bools
    """Excluded from loss and denominators."""
    images_E: tuple[tuple[str, ...], ...]
    """Digests of the images of each group's prompt."""
    reader: ImageReader | None = None
    """Reads their patches when a micro-batch is built: those of a whole batch may not fit in memory."""

    def responses_of(self, groups: Sequence[int]) -> Int64s:
        """Indices of the responses of these groups."""
        return np.flatnonzero(np.isin(self.group_R, np.asarray(groups, dtype=np.int64)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedImages:
    """The images of a micro-batch, once per prompt, in the order of their tokens."""

    pixels: Tensor
    """[patches, values per patch] float32."""
    grid: Tensor
    """[images, 3] int64: 1, height and width in patches."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """Input of one forward and backward pass."""

    token_ids_N: Tensor
    """[N] int64."""
    positions_N: Tensor
    """[N] int64, from 0 in each sequence; [3, N] time, row and column for a model that reads images."""
    packing: Packing
    predict_M: Tensor
    """[M] int64: the packed token whose hidden state predicts each response token."""
    target_M: Tensor
    """[M] int64: the response token."""
    slot_M: Tensor
    """[M] int64: position of the response token in the batch's columns."""
    rows: Rows
    """Response of this micro-batch that each response token belongs to."""
    images: PackedImages | None = None

    @property
    def num_tokens(self) -> int:
        """N."""
        return len(self.token_ids_N)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Responses of one group in the same micro-batch; their prompt is packed once."""

    group: int
    responses: tuple[int, ...]


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


def columns_of(batch: Batch, config: Config, reader: ImageReader | None = None) -> Columns:
    """Convert a batch to columns, with advantages (eq. 2).

    Args:
        reader: reads the images of its prompts; None: the model reads text only.
    Raises: ContractError for a group without prompt tokens: its first token cannot be predicted; and for one with
        images if the model reads text only.
    """
    groups = [entry.group for entry in batch.entries]
    if reader is None and any(group.prompt.images for group in groups):
        raise ContractError(f"prompts have images, and model.path={config.model.path} reads text only")
    for group in groups:
        if len(group.prompt_token_ids) == 0:
            raise ContractError(f"group {group.group_id} has no prompt tokens, so its first token has no log-prob")
    lengths_R = np.concatenate([group.lengths for group in groups]).astype(np.int64)
    return Columns(
        prompts_E=tuple(group.prompt_token_ids.astype(np.int64) for group in groups),
        group_R=np.repeat(np.arange(len(groups)), [group.size for group in groups]),
        starts_R=np.concatenate(([0], np.cumsum(lengths_R))),
        lengths_R=lengths_R,
        token_ids_M=np.concatenate([group.token_ids for group in groups]).astype(np.int64),
        rollout_logprobs_M=np.concatenate([group.rollout_logprobs for group in groups]),
        advantage_R=row_advantages(batch, config).astype(np.float32),
        replayed_R=np.concatenate([entry.replayed_rows for entry in batch.entries]),
        expert_R=np.concatenate([entry.expert_rows for entry in batch.entries]),
        sft_R=of_kind_sft(batch),
        left_out_R=left_out(batch, config.shaping),
        images_E=tuple(group.prompt.images for group in groups),
        reader=reader,
    )


def token_spans(batch: Batch) -> list[slice]:
    """Slice of each entry's tokens in the batch's columns."""
    ends = np.cumsum([0, *(len(entry.group.token_ids) for entry in batch.entries)]).tolist()
    return [slice(start, end) for start, end in pairwise(ends)]


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
        tokens_R = columns.lengths_R - 1  # the last token of a response is not packed
        whole_R = (tokens_R + prompts_E[columns.group_R]).astype(np.float64)
        flops_R = tokens_R + cost.head * columns.lengths_R + cost.attention * whole_R**2
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


def build(columns: Columns, pieces: Sequence[Piece], device: torch.device) -> MicroBatch:
    """Pack pieces into tensors. Without pieces: one token that predicts nothing."""
    if not pieces:
        return _idle(device)
    token_ids, positions, predict, rows, patches, num_packed = [], [], [], [], [], 0
    axes = () if columns.reader is None else (3,)
    for piece in pieces:
        prompt = columns.prompts_E[piece.group]
        prompt_places = np.arange(num_packed, num_packed + len(prompt))
        prompt_positions, pictures = _positions(columns, piece.group)
        start = int(prompt_positions[..., -1].max()) + 1
        token_ids.append(prompt)
        positions.append(prompt_positions)
        patches += pictures
        num_packed += len(prompt)
        for response in piece.responses:
            tokens = columns.token_ids_M[columns.starts_R[response] : columns.starts_R[response + 1] - 1]
            places = np.arange(num_packed, num_packed + len(tokens))
            token_ids.append(tokens)
            positions.append(np.broadcast_to(np.arange(start, start + len(tokens)), (*axes, len(tokens))))
            predict += [prompt_places[-1:], places]
            rows.append(np.concatenate((prompt_places, places)))
            num_packed += len(tokens)
    responses = [response for piece in pieces for response in piece.responses]
    slots = np.concatenate([np.arange(columns.starts_R[r], columns.starts_R[r + 1]) for r in responses])
    return MicroBatch(
        token_ids_N=_tensor(np.concatenate(token_ids), device),
        positions_N=_tensor(np.concatenate(positions, axis=-1), device),
        packing=pack_rows(rows, num_packed, device),
        predict_M=_tensor(np.concatenate(predict), device),
        target_M=_tensor(columns.token_ids_M[slots], device),
        slot_M=_tensor(slots, device),
        rows=rows_of(columns.lengths_R[responses], device),
        images=packed_images(patches, device),
    )


def _positions(columns: Columns, group: int) -> tuple[Int64s, list[Patches]]:
    """Positions of a prompt's tokens, [P] or [3, P], and its images. Raises: ContractError if they do not match."""
    prompt, reader = columns.prompts_E[group], columns.reader
    if reader is None:
        return np.arange(len(prompt)), []
    pictures = [reader.patches(digest) for digest in columns.images_E[group]]
    return reader.model.positions(prompt, pictures), pictures


def packed_images(pictures: Sequence[Patches], device: torch.device) -> PackedImages | None:
    """Images as tensors; None without any."""
    if not pictures:
        return None
    grid = np.array([[1, picture.height, picture.width] for picture in pictures])
    pixels = torch.from_numpy(np.concatenate([picture.pixels for picture in pictures]))
    return PackedImages(pixels=pixels.to(device), grid=_tensor(grid, device))


def rows_of(lengths_R: Int64s, device: torch.device) -> Rows:
    """Rows of concatenated responses of these lengths."""
    return Rows(index_M=_tensor(np.repeat(np.arange(len(lengths_R)), lengths_R), device), count=len(lengths_R))


def _idle(device: torch.device) -> MicroBatch:
    one, none = np.zeros(1, dtype=np.int64), np.zeros(0, dtype=np.int64)
    return MicroBatch(
        token_ids_N=_tensor(one, device),
        positions_N=_tensor(one, device),
        packing=pack_rows([one], 1, device),
        predict_M=_tensor(none, device),
        target_M=_tensor(none, device),
        slot_M=_tensor(none, device),
        rows=rows_of(none, device),
    )


def _tensor(array: NDArray[np.int64], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(device)


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
