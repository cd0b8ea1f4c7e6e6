"""Whether an engine has the learner's weights: how far its log-probs may be from the learner's.

Engine and learner run other kernels, in bfloat16 with differences of hundredths of a nat that no table predicts. So a
worker measures them: its first update must agree within the learner's bound for the precision, which only a wrong model
exceeds, and later updates within `FACTOR` times the largest differences so far. An engine whose weights are one update
old is then noticed as soon as the update has changed the log-probs by more than that;
smaller steps: `engines/_kernel_probe.py`.
"""

from __future__ import annotations

import numpy as np

from bapo.core.errors import ContractError, WeightMismatchError
from bapo.core.token_arrays import Float32s
from bapo.core.types import Canary

FACTOR = 3.0
"""Differences follow the weights slowly; a limit that grows with them ends no healthy worker."""
LARGEST_SHARE = 4.0
"""Bound of the largest difference, in bounds of the root mean square: of 64 normal differences the largest is 2.5."""
FLOOR_SHARE = 0.05
"""Smallest limit, in bounds: an engine that agreed exactly may later be off by some roundings."""


class Agreement:
    """The differences of one engine, from its first update on."""

    def __init__(self) -> None:
        self._rms = self._largest = 0.0
        self._is_measured = False

    def check(self, canary: Canary, logprobs: Float32s | None, version: int) -> float:
        """Root mean square difference in nats between the engine's and the learner's log-probs; 0 without weights.

        Raises: ContractError if the canary is inconsistent; WeightMismatchError beyond the limits.
        """
        if logprobs is None:
            return 0.0
        expected = np.asarray(canary.logprobs, np.float32)
        if len(expected) != len(canary.token_ids) - 1 or len(logprobs) != len(expected):
            raise ContractError(
                f"canary of version {version}: {len(canary.token_ids)} tokens need {len(canary.token_ids) - 1} "
                f"log-probs; got {len(expected)} from the learner, {len(logprobs)} from the engine"
            )
        differences = np.abs(logprobs - expected)
        rms, largest = float(np.sqrt(np.mean(differences**2))), float(differences.max())
        rms_limit = self._limit(self._rms, canary.tolerance)
        largest_limit = self._limit(self._largest, canary.tolerance * LARGEST_SHARE)
        if not (rms <= rms_limit and largest <= largest_limit):  # also true for NaN
            raise WeightMismatchError(
                f"after the update to version {version} the engine's log-probs differ from the learner's by {rms:.3g} "
                f"nats (root mean square; limit {rms_limit:.3g}), at most {largest:.3g} (limit {largest_limit:.3g}): "
                "the engine does not have these weights"
            )
        self._rms, self._largest, self._is_measured = max(self._rms, rms), max(self._largest, largest), True
        return rms

    def _limit(self, so_far: float, bound: float) -> float:
        return min(bound, max(FACTOR * so_far, FLOOR_SHARE * bound)) if self._is_measured else bound
