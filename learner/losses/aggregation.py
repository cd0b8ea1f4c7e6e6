"""Aggregation of token losses: a weight per token over the whole mini-batch of all ranks.

So the loss is a plain sum over tokens, independent of packing, order and distribution over ranks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bapo.config.objective import Aggregation

Int64s = NDArray[np.int64]
Float64s = NDArray[np.float64]


def token_weights(
    lengths_R: Int64s,
    aggregation: Aggregation,
    max_response_tokens: int,
    *,
    group_R: Int64s | None = None,
    replayed_R: NDArray[np.bool_] | None = None,
) -> Float64s:
    """[R] weight of each token of a response in the mini-batch's loss.

    token_mean           1 / all tokens                                      DAPO
    seq_mean_token_mean  1 / (responses * own length)                        GRPO, eq. 1
    seq_mean_token_sum   1 / responses                                       Kimi k1.5
    const_len            1 / (responses * L_max)                             Dr. GRPO
    group_const_len      1 / (groups * L_max)                                LUFFY
    two_term             1 / (groups * own kind's rows in the group * own length)    RePO: fresh plus replayed

    Args:
        lengths_R: tokens of every response of the mini-batch, on all ranks; 0 for an excluded one.
        group_R: group of each response, for the last two.
        replayed_R: responses sampled for an earlier batch, for the last.
    Returns: 0 where the length is 0.
    """
    counts_R = lengths_R > 0
    weights_R = np.zeros(len(lengths_R))
    if not counts_R.any():
        return weights_R
    lengths = lengths_R[counts_R].astype(np.float64)
    if aggregation == "token_mean":
        weights_R[counts_R] = 1.0 / lengths.sum()
    elif aggregation == "seq_mean_token_mean":
        weights_R[counts_R] = 1.0 / (len(lengths) * lengths)
    elif aggregation == "seq_mean_token_sum":
        weights_R[counts_R] = 1.0 / len(lengths)
    elif aggregation == "const_len":
        weights_R[counts_R] = 1.0 / (len(lengths) * max_response_tokens)
    else:
        weights_R[counts_R] = _by_group(aggregation, lengths, max_response_tokens, group_R, replayed_R, counts_R)
    return weights_R


def _by_group(
    aggregation: str,
    lengths: Float64s,
    max_response_tokens: int,
    group_R: Int64s | None,
    replayed_R: NDArray[np.bool_] | None,
    counts_R: NDArray[np.bool_],
) -> Float64s | float:
    assert group_R is not None
    groups, number_R = np.unique(group_R[counts_R], return_inverse=True)
    if aggregation == "group_const_len":
        return 1.0 / (len(groups) * max_response_tokens)
    assert replayed_R is not None
    kind_R = 2 * number_R + replayed_R[counts_R]
    rows_R = np.bincount(kind_R)[kind_R]
    return 1.0 / (len(groups) * rows_R * lengths)
