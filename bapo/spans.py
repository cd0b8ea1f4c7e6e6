"""Which policy version sampled each token, as runs: [S, 2] (tokens, version), in the order of the tokens.

A response that is continued under other weights has several runs; two responses of one version may share one.
"""

from __future__ import annotations

import numpy as np

from bapo.columns import Int32s
from bapo.errors import ContractError, Refusal


def runs_of(versions_T: Int32s) -> Int32s:
    """[T] versions as runs."""
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
        raise ContractError(f"group {group_id}: spans must be pairs (tokens, version), each of one token or more")
    if int(spans[:, 0].sum(dtype=np.int64)) != int(lengths.sum(dtype=np.int64)):
        message = f"group {group_id}: spans of {int(spans[:, 0].sum(dtype=np.int64))} tokens for {int(lengths.sum())}"
        raise ContractError(message, Refusal.VERSIONS)
    if not np.array_equal(pairs_of(versions_of(spans), lengths), versions):
        raise ContractError(f"group {group_id}: spans and versions contradict each other", Refusal.VERSIONS)
