"""The columns of tokens that groups are made of, and what no policy can put into them.

Suffix: T tokens of all responses of a group together.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bapo.core.errors import ContractError, Refusal

MAX_LOGPROB = 1e-3
"""A softmax in single precision gives log-probs a little above 0 for a token that is all but certain."""

Int32s = NDArray[np.int32]
Float32s = NDArray[np.float32]


def require_tokens(group_id: str, token_ids: Int32s, logprobs: Float32s, *, of: str = "rollout") -> None:
    """Refuse ids and log-probs that no policy can give. `of`: whose log-probs they are. Raises: ContractError."""
    # One pass over each column: as integers, finite negative floats are below _FINITE, and a negative id is huge.
    # `argmax` takes half the time of `max` on some thousand numbers.
    if len(logprobs) and _largest(np.asarray(logprobs, dtype=np.float32).view(np.int32)) >= _FINITE:
        _require_logprobs(group_id, logprobs, of)
    if len(token_ids) and _has_negative(token_ids):
        raise ContractError(f"group {group_id}: token ids must not be negative", Refusal.TOKEN_IDS)


_FINITE = int(np.float32(-math.inf).view(np.int32))
_MAX = (1 << 31) - 1


def _largest(numbers: NDArray[np.int32] | NDArray[np.uint32]) -> int:
    return numbers.item(numbers.argmax())


def _has_negative(token_ids: NDArray[np.integer[Any]]) -> bool:
    if token_ids.dtype.itemsize != 4:  # an engine's own kind, which travels as int32
        return int(token_ids.min()) < 0
    return _largest(token_ids.view(np.uint32)) > _MAX


def _require_logprobs(group_id: str, logprobs: Float32s, of: str) -> None:
    """Some of them are 0, positive or not finite."""
    lowest = float(np.minimum.reduce(logprobs, initial=0.0))
    highest = float(np.maximum.reduce(logprobs, initial=-math.inf))
    if not (lowest > -math.inf and highest <= MAX_LOGPROB):  # so that NaN is refused, too
        message = f"group {group_id}: {of} log-probs must be in (-inf, 0], got {lowest} to {highest}"
        raise ContractError(message, Refusal.LOGPROBS)


def runs_of(versions_T: Int32s) -> Int32s:
    """[S, 2] runs (tokens, version) of [T] versions; responses of one version may share a run."""
    changes = np.flatnonzero(np.diff(versions_T)) + 1
    starts = np.concatenate(([0], changes))
    counts = np.diff(np.concatenate((starts, [len(versions_T)])))
    return np.stack((counts, versions_T[starts]), axis=1).astype(np.int32)


def versions_of(spans: Int32s) -> Int32s:
    """[T] the version of each token."""
    return np.repeat(spans[:, 1], spans[:, 0])


def pairs_of(versions_T: Int32s, lengths: Int32s) -> Int32s:
    """[G, 2] oldest and newest version of each response."""
    starts = np.concatenate(([0], np.cumsum(lengths)[:-1]))
    oldest, newest = np.minimum.reduceat(versions_T, starts), np.maximum.reduceat(versions_T, starts)
    return np.stack((oldest, newest), axis=1).astype(np.int32)


def require_spans(group_id: str, spans: Int32s, lengths: Int32s, versions: Int32s) -> None:
    """Raises: ContractError when runs do not cover the tokens, or say other things than the pairs of each response."""
    if spans.ndim != 2 or spans.shape[1] != 2 or not len(spans) or int(spans[:, 0].min()) < 1:
        raise ContractError(f"group {group_id}: spans must be pairs (tokens, version) with at least one token each")
    if int(spans[:, 0].sum(dtype=np.int64)) != int(lengths.sum(dtype=np.int64)):
        message = f"group {group_id}: spans of {int(spans[:, 0].sum(dtype=np.int64))} tokens for {int(lengths.sum())}"
        raise ContractError(message, Refusal.VERSIONS)
    if not np.array_equal(pairs_of(versions_of(spans), lengths), versions):
        raise ContractError(f"group {group_id}: spans and versions are inconsistent", Refusal.VERSIONS)
