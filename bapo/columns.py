"""The columns of tokens that groups are made of, and what no policy can put into them.

Suffix: T tokens of all responses of a group together.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from bapo.errors import ContractError, Refusal

MAX_LOGPROB = 1e-3
"""A softmax in single precision gives log-probs a little above 0 for a token that is all but certain."""

Int32s = NDArray[np.int32]
Float32s = NDArray[np.float32]


def require_tokens(group_id: str, token_ids: Int32s, logprobs: Float32s) -> None:
    """Refuse ids and log-probs that no policy can give. Raises: ContractError."""
    # The ufuncs themselves: `array.min()` spends more time on its way to them than they do on some thousand numbers.
    lowest = float(np.minimum.reduce(logprobs, initial=0.0))
    highest = float(np.maximum.reduce(logprobs, initial=-math.inf))
    if not (lowest > -math.inf and highest <= MAX_LOGPROB):  # so that NaN is refused, too
        message = f"group {group_id}: rollout log-probs from {lowest} to {highest}, not in (-inf, 0]"
        raise ContractError(message, Refusal.LOGPROBS)
    if int(np.minimum.reduce(token_ids, initial=0)) < 0:
        raise ContractError(f"group {group_id}: token ids must not be negative", Refusal.TOKEN_IDS)
