"""What the fresh groups of one step gave: all that a prompt selector learns from, a few bytes per group.

Packed as a msgpack row: step, prompt ids, reward sums as f32 [N], group sizes as u16 [N].
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
from msgpack.exceptions import UnpackException
from numpy.typing import NDArray

from bapo.core.errors import ContractError

_F4, _U2 = np.dtype("<f4"), np.dtype("<u2")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SuccessCounts:
    """N groups of one step, in the order of their requests. A prompt may occur twice."""

    step: int
    """Step whose batch consumed them; for reference prompts, the step that they were asked for."""
    prompt_ids: tuple[str, ...]
    reward_sums: NDArray[np.float32]
    """[N] k, for rewards in {0, 1}."""
    sizes: NDArray[np.uint16]
    """[N] G of each group."""


def success_counts_of(step: int, groups: Iterable[tuple[str, float, int]]) -> SuccessCounts:
    """SuccessCounts of (prompt id, k, G)."""
    rows = list(groups)
    return SuccessCounts(
        step=step,
        prompt_ids=tuple(prompt_id for prompt_id, _, _ in rows),
        reward_sums=np.array([total for _, total, _ in rows], dtype=np.float32),
        sizes=np.array([size for _, _, size in rows], dtype=np.uint16),
    )


def pack_success_counts(success_counts: SuccessCounts) -> bytes:
    sums, sizes = success_counts.reward_sums.astype(_F4).tobytes(), success_counts.sizes.astype(_U2).tobytes()
    data: bytes = msgpack.packb((success_counts.step, success_counts.prompt_ids, sums, sizes))
    return data


def unpack_success_counts(data: bytes) -> SuccessCounts:
    """Inverse of `pack_success_counts`. Raises: ContractError for anything that it could not have written."""
    try:
        step, prompt_ids, sums, sizes = msgpack.unpackb(data)
        success_counts = SuccessCounts(
            step=int(step),
            prompt_ids=tuple(prompt_ids),
            reward_sums=np.frombuffer(sums, dtype=_F4),
            sizes=np.frombuffer(sizes, dtype=_U2),
        )
    except (TypeError, ValueError, UnpackException) as error:
        raise ContractError(f"success counts are malformed: {error!r}") from error
    if not len(success_counts.prompt_ids) == len(success_counts.reward_sums) == len(success_counts.sizes):
        raise ContractError(f"success counts of step {success_counts.step} have columns of different lengths")
    return success_counts


def unpack_packed_list(data: bytes) -> list[bytes]:
    """The values of a page. Raises: ContractError."""
    return [bytes(item) for item in _plain(data, list)]


def unpack_kept_state(data: bytes) -> tuple[int, int, bytes]:
    """(round, through, data) of a kept state. Raises: ContractError."""
    fields = _plain(data, dict)
    try:
        return int(fields["round"]), int(fields["through"]), bytes(fields["data"])
    except (KeyError, TypeError, ValueError) as error:
        raise ContractError(f"the stored selector state is malformed: {error!r}") from error


def _plain(data: bytes, kind: type) -> Any:
    try:
        value = msgpack.unpackb(data)
    except (ValueError, UnpackException) as error:
        raise ContractError(f"success counts are malformed: {error!r}") from error
    if not isinstance(value, kind):
        raise ContractError(f"success counts are malformed: expected {kind.__name__}, got {type(value).__name__}")
    return value
