"""Pieces of a batch as tensors: the input of one forward and backward pass.

    prompt P, response of three turns, where turn 2 continues turn 0 as turn 1 does:

    packed   P P P | c0 s0 s0 | c1 s1 | c2 c2 s2      each turn once; the last token of a row is not packed
    rows     P P P   c0 s0 s0   c1 s1                 what attention reads: from the root to each leaf
             P P P   c0 s0 s0           c2 c2 s2

Suffixes: R responses, M response tokens (trained), N packed tokens (computed).

A prompt, with its images, is packed once for all responses of its group, and a turn once for all that continue it.
Context is read and predicts the token after it, but no context token is a target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bapo.core.turns import FROM_PROMPT, Turns
from bapo.runtime.vision import Patches
from learner.batch.columns import Columns, Int64s
from learner.batch.packed_attention import Packing, pack_rows
from learner.losses.base import Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Responses of one group in the same micro-batch; their prompt is packed once."""

    group: int
    responses: tuple[int, ...]


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


def build(columns: Columns, pieces: Sequence[Piece], device: torch.device) -> MicroBatch:
    """Pack pieces into tensors. Without pieces: one token that predicts nothing."""
    if not pieces:
        return _idle(device)
    packer = _Packer(axes=() if columns.reader is None else (3,))
    patches: list[Patches] = []
    for piece in pieces:
        turns = [columns.turns.get(response) for response in piece.responses]
        prompt = NOTHING
        if any(own is None or own.reads_prompt for own in turns):
            positions, pictures = _positions(columns, piece.group)
            patches += pictures
            prompt = packer.add_prompt(columns.prompts_E[piece.group], positions)
        for response, own in zip(piece.responses, turns, strict=True):
            start, end = columns.starts_R[response : response + 2]
            tokens = columns.token_ids_M[start:end]
            if own is None:  # most responses: the general way takes twice as long
                packer.add_turn(prompt, tokens)
            else:
                packer.add_response(prompt, tokens, own)
    responses = [response for piece in pieces for response in piece.responses]
    slots = np.concatenate([np.arange(columns.starts_R[r], columns.starts_R[r + 1]) for r in responses])
    return packer.packed(
        columns.token_ids_M[slots], slots, columns.lengths_R[responses], packed_images(patches, device), device
    )


def build_texts(groups: Sequence[tuple[Int64s, Sequence[Int64s]]], device: torch.device) -> MicroBatch:
    """Pack prompts of text, each with its responses of one turn, that belong to no batch."""
    packer = _Packer(axes=())
    for prompt_ids, responses in groups:
        prompt = packer.add_prompt(prompt_ids, np.arange(len(prompt_ids)))
        for token_ids in responses:
            packer.add_turn(prompt, token_ids)
    targets = [token_ids for _, responses in groups for token_ids in responses]
    lengths_R = np.array([len(token_ids) for token_ids in targets])
    return packer.packed(np.concatenate(targets), np.arange(lengths_R.sum()), lengths_R, None, device)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Path:
    """Packed tokens from the first one that attention reads to the end of a turn."""

    places: Int64s
    next_position: int


NOTHING = _Path(places=np.zeros(0, dtype=np.int64), next_position=0)


class _Packer:
    """The tokens of a micro-batch, and what is said of them, while it is packed."""

    def __init__(self, axes: tuple[int, ...]) -> None:
        """`axes`: of positions besides the tokens."""
        self._axes = axes
        self.num_packed = 0
        self.token_ids: list[Int64s] = []
        self.positions: list[Int64s] = []
        self.predict: list[Int64s] = []
        """Packed token that predicts each response token."""
        self.rows: list[Int64s] = []

    def add_prompt(self, token_ids: Int64s, positions: Int64s) -> _Path:
        """Pack a prompt. `positions`: [P], or [3, P] with images."""
        return _Path(places=self._pack(token_ids, positions), next_position=int(positions[..., -1].max()) + 1)

    def add_turn(self, before: _Path, token_ids: Int64s) -> None:
        """Pack a response of one turn without context."""
        path = self._extended(before, token_ids[:-1])
        self.rows.append(path.places)
        self.predict.append(path.places[len(before.places) - 1 :])

    def add_response(self, prompt: _Path, token_ids: Int64s, turns: Turns) -> None:
        """Pack the turns of a response. `token_ids`: its sampled tokens."""
        leaves, paths = turns.leaves, list[_Path]()
        sampled = np.split(token_ids, np.cumsum(turns.num_sampled_U)[:-1])
        contexts = np.split(turns.context_ids.astype(np.int64), np.cumsum(turns.num_context_U)[:-1])
        for turn, parent in enumerate(turns.parents_U.tolist()):
            before = paths[parent] if parent >= 0 else prompt if parent == FROM_PROMPT else NOTHING
            path = self._extended(
                before, np.concatenate((contexts[turn], sampled[turn][: len(sampled[turn]) - leaves[turn]]))
            )
            paths.append(path)
            if leaves[turn]:
                self.rows.append(path.places)
            first = len(before.places) + len(contexts[turn]) - 1
            self.predict.append(path.places[first : first + len(sampled[turn])])

    def packed(
        self, targets_M: Int64s, slots_M: Int64s, lengths_R: Int64s, images: PackedImages | None, device: torch.device
    ) -> MicroBatch:
        """All of it as tensors."""
        return MicroBatch(
            token_ids_N=_tensor(np.concatenate(self.token_ids), device),
            positions_N=_tensor(np.concatenate(self.positions, axis=-1), device),
            packing=pack_rows(self.rows, self.num_packed, device),
            predict_M=_tensor(np.concatenate(self.predict), device),
            target_M=_tensor(targets_M, device),
            slot_M=_tensor(slots_M, device),
            rows=rows_of(lengths_R, device),
            images=images,
        )

    def _extended(self, path: _Path, token_ids: Int64s) -> _Path:
        start, num = path.next_position, len(token_ids)
        positions = np.broadcast_to(np.arange(start, start + num), (*self._axes, num))
        places = np.concatenate((path.places, self._pack(token_ids, positions)))
        return _Path(places=places, next_position=start + num)

    def _pack(self, token_ids: Int64s, positions: Int64s) -> Int64s:
        places = np.arange(self.num_packed, self.num_packed + len(token_ids))
        self.token_ids.append(token_ids)
        self.positions.append(positions)
        self.num_packed += len(token_ids)
        return places


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
