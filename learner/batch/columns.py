"""A batch as columns, responses concatenated in group order (docs/paper.md, Algorithm 1 line 18).

Suffixes: E groups of the batch, R responses, M response tokens (trained).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from bapo.config.tree import Config
from bapo.core.errors import ContractError
from bapo.core.sequences import sequences_of
from bapo.core.turns import Turns, one_turn
from bapo.core.types import Batch, Group
from bapo.runtime.vision import ImageReader
from learner.advantages.of_batch import left_out, of_kind_sft, row_advantages

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
    """A_j of eq. 2, times the weight of the entry; 0 for an entry of kind sft."""
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
    turns: Mapping[int, Turns] = field(default_factory=dict)
    """Of each response that has several; the others are one turn after the prompt."""

    def responses_of(self, groups: Sequence[int]) -> Int64s:
        """Indices of the responses of these groups."""
        return np.flatnonzero(np.isin(self.group_R, np.asarray(groups, dtype=np.int64)))

    def turns_of(self, response: int) -> Turns:
        """The turns of a response, at least one."""
        return self.turns.get(response) or one_turn(int(self.lengths_R[response]))


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
        if len(group.prompt_token_ids) == 0 and group.turns is None:
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
        turns=_turns(groups),
    )


def _turns(groups: Sequence[Group]) -> dict[int, Turns]:
    found: dict[int, Turns] = {}
    start = 0
    for group in groups:
        if group.turns is not None:
            turns = (sequence.turns for sequence in sequences_of(group))
            found |= {start + row: own for row, own in enumerate(turns) if own is not None}
        start += group.size
    return found


def token_spans(batch: Batch) -> list[slice]:
    """Slice of each entry's tokens in the batch's columns."""
    ends = np.cumsum([0, *(len(entry.group.token_ids) for entry in batch.entries)]).tolist()
    return [slice(start, end) for start, end in pairwise(ends)]
