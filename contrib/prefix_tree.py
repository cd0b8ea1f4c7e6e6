"""Credit per token without a critic: the responses to a prompt as a tree of shared prefixes.

    V(s) = mean reward of the responses of the group that begin with s           s: the tokens of a response up to t
    delta_t = V(s_{t+1}) - V(s_t)    not 0 only where responses with different rewards part

V of the last state of a response is its own reward. Of the advantage `tempo`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bapo.core.errors import ConfigError
from bapo.core.types import Group
from learner.advantages.formulas import gae

Float64s = NDArray[np.float64]


def tree_credit(group: Group, rewards: Float64s) -> Float64s:
    """[T] delta_t of each token; `rewards`: [G]."""
    if group.turns is not None:  # equal tokens after different tool outputs are different states
        raise ConfigError("advantages by shared prefixes (tempo) need responses of one turn, not episodes")
    ends = np.cumsum(group.lengths)
    values_M = np.concatenate(prefix_values(np.split(group.token_ids, ends[:-1]), rewards))
    reward_M = np.zeros(len(group.token_ids))
    reward_M[ends - 1] = rewards
    credit_M, _ = gae(reward_M, values_M, gamma=1.0, gae_lambda=0.0, lengths=group.lengths)
    return credit_M


def prefix_values(responses: Sequence[NDArray[Any]], rewards: Float64s) -> list[Float64s]:
    """V of the state before each token of each response.

    Args:
        responses: [G] token ids of each response, at least one token each.
        rewards: [G]
    Returns: [G] arrays [T_i]; the first entry of each is the mean reward of the group.
    """
    shared = shared_lengths(responses)
    values = []
    for i, tokens in enumerate(responses):
        passes = shared[i][:, None] >= np.arange(len(tokens))[None, :]
        values.append(rewards @ passes / passes.sum(axis=0))
    return values


def shared_lengths(responses: Sequence[NDArray[Any]]) -> NDArray[np.int64]:
    """[G, G] number of tokens that two responses share from their beginning; of one with itself all of them."""
    size = len(responses)
    shared = np.zeros((size, size), dtype=np.int64)
    for i, one in enumerate(responses):
        shared[i, i] = len(one)
        for j in range(i):
            other = responses[j]
            length = min(len(one), len(other))
            parted = np.flatnonzero(one[:length] != other[:length])
            shared[i, j] = shared[j, i] = parted[0] if len(parted) else length
    return shared
