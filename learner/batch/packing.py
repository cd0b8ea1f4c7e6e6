"""Pack the batch D_t into micro-batches (docs/paper.md, Algorithm 1 line 18).

    Batch --columns_of--> Columns --deal--> each rank's share --cut--> pieces --build--> MicroBatch (tensors)

Suffixes: E groups of the batch, R responses, M response tokens (trained), N packed tokens (computed).

Nothing is padded. A prompt, with its images, is packed once per micro-batch for all responses of its group that are in
it, and the last token of a response is not packed, because nothing is predicted from it. Neither cutting nor dealing
changes the loss: each response token carries its weight over the whole mini-batch (`losses.objective.token_weights`).
"""

from __future__ import annotations

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
from learner.batch.advantages import left_out, of_kind_sft, row_advantages
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
        left_out_R=left_out(batch, config),
        images_E=tuple(group.prompt.images for group in groups),
        reader=reader,
    )


def token_spans(batch: Batch) -> list[slice]:
    """Slice of each entry's tokens in the batch's columns."""
    ends = np.cumsum([0, *(len(entry.group.token_ids) for entry in batch.entries)]).tolist()
    return [slice(start, end) for start, end in pairwise(ends)]


def minibatches(num_groups: int, minibatch_size: int, *, seed: int, step: int, epoch: int) -> list[list[int]]:
    """Groups of each optimizer step: shuffled, then split near-equally (docs/paper.md, Decisions)."""
    order = list(range(num_groups))
    rng_for(seed, step, f"minibatches/{epoch}").shuffle(order)
    ends = list(accumulate(near_equal_split(num_groups, minibatch_size)))
    return [order[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def microbatches_of(
    columns: Columns, responses: Int64s, *, budget: int, rank: int, num_ranks: int, device: torch.device
) -> Iterator[MicroBatch]:
    """This rank's share of some responses, split by a budget of packed tokens.

    Every rank computes the shares of all ranks, so that all run the same number of micro-batches, as FSDP's
    collectives require. A rank with less work runs micro-batches of one token and no response. There is always at
    least one, so that every parameter gets a gradient.
    """
    shares = [cut(columns, share, budget) for share in deal(columns, responses, num_ranks)]
    longest = max(1, *(len(share) for share in shares))
    for i in range(longest):
        yield build(columns, shares[rank][i] if i < len(shares[rank]) else [], device)


def deal(columns: Columns, responses: Int64s, num_ranks: int) -> list[list[Piece]]:
    """Assign whole groups to ranks: largest first, each to the rank with the fewest tokens so far."""
    lengths_R = columns.lengths_R
    members: dict[int, list[int]] = {}
    for response in responses.tolist():
        members.setdefault(int(columns.group_R[response]), []).append(response)
    pieces = [Piece(group=group, responses=tuple(found)) for group, found in members.items()]
    sizes = [sum(int(lengths_R[r]) for r in piece.responses) for piece in pieces]
    shares: list[list[Piece]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for i in sorted(range(len(pieces)), key=lambda i: (-sizes[i], pieces[i].group)):
        rank = loads.index(min(loads))
        shares[rank].append(pieces[i])
        loads[rank] += sizes[i]
    return shares


def cut(columns: Columns, share: Sequence[Piece], budget: int) -> list[list[Piece]]:
    """Micro-batches of at most `budget` packed tokens; a group that does not fit is split, repeating its prompt.

    A response longer than the budget gets its own micro-batch (the config rejects that case).
    """
    lengths_R = columns.lengths_R
    cuts: list[list[Piece]] = []
    room = 0
    for piece in share:
        prompt = len(columns.prompts_E[piece.group])
        part: list[int] = []
        for response in piece.responses:
            cost = int(lengths_R[response]) - 1
            opening = 0 if part else prompt
            if not cuts or opening + cost > room:
                if part:
                    cuts[-1].append(Piece(group=piece.group, responses=tuple(part)))
                cuts.append([])
                part, opening, room = [], prompt, budget
            part.append(response)
            room -= opening + cost
        cuts[-1].append(Piece(group=piece.group, responses=tuple(part)))
    return cuts


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
