"""What the fresh groups of one step gave: all that a prompt selector learns from, a few bytes per group.

Packed as a msgpack row: step, prompt ids, reward sums as f32 [N], group sizes as u16 [N].
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from bapo.core.errors import ContractError
from bapo.core.frames import pack, unpacked
from bapo.core.types import Version

_F4, _U2 = np.dtype("<f4"), np.dtype("<u2")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SuccessCounts:
    """N groups of one step, in the order of their requests. A prompt may occur twice."""

    step: int
    """Step whose batch consumed them."""
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


class _KeptState(msgspec.Struct):
    round: Version
    through: Version
    data: bytes


_ROW = msgspec.msgpack.Decoder(tuple[Version, tuple[str, ...], bytes, bytes])
_PAGE = msgspec.msgpack.Decoder(list[bytes])
_KEPT = msgspec.msgpack.Decoder(_KeptState)


def pack_success_counts(success_counts: SuccessCounts) -> bytes:
    sums, sizes = success_counts.reward_sums.astype(_F4).tobytes(), success_counts.sizes.astype(_U2).tobytes()
    return pack((success_counts.step, success_counts.prompt_ids, sums, sizes))


def unpack_success_counts(data: bytes) -> SuccessCounts:
    """Inverse of `pack_success_counts`. Raises: ContractError for anything that it could not have written."""
    step, prompt_ids, sums, sizes = unpacked(data, _ROW, "success counts")
    if not len(prompt_ids) * 4 == len(sums) == len(sizes) * 2:
        raise ContractError(f"success counts of step {step} have columns of different lengths")
    return SuccessCounts(
        step=step,
        prompt_ids=prompt_ids,
        reward_sums=np.frombuffer(sums, dtype=_F4),
        sizes=np.frombuffer(sizes, dtype=_U2),
    )


def unpack_packed_list(data: bytes) -> list[bytes]:
    """The values of a page. Raises: ContractError."""
    return unpacked(data, _PAGE, "success counts")


def unpack_kept_state(data: bytes) -> tuple[int, int, bytes]:
    """(round, through, data) of a kept state. Raises: ContractError."""
    kept = unpacked(data, _KEPT, "selector state")
    return kept.round, kept.through, kept.data
