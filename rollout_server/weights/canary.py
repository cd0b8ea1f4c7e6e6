"""Whether an engine has the learner's weights: how far its log-probs may be from the learner's.

Engine and learner run other kernels, in bfloat16 with differences of hundredths of a nat that no table predicts. So a
worker measures them: its first update must agree within the learner's bound for the precision, which only a wrong model
exceeds, and later updates within `FACTOR` times the largest differences so far. An engine whose weights are one update
old is then noticed as soon as the update has changed the log-probs by more than that;
smaller steps: `engines/_kernel_probe.py`.

With LoRA, an engine that samples from the base model is noticed earlier, by the direction of the adapter's effect:

    t = <e - b, l - b> / |l - b|^2        e engine, l learner, b learner without the adapter; 1 with it, 0 without
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

HALF = 0.5
NO_NOISE = 1e-5
"""Nats: smallest noise that is assumed."""
DECIDABLE = 6.0
"""|l - b| over the noise of one log-prob, from which on t is within 1/6 of its value; below, t says nothing."""


class Agreement:
    """The differences of one engine, from its first update on."""

    def __init__(self) -> None:
        self._rms = self._largest = 0.0
        self._is_measured = False
        self.decides = True
        """Whether the last check could tell the adapter from the base model; true without LoRA."""

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
        self._refuse_base(canary, logprobs, version)
        self._rms, self._largest, self._is_measured = max(self._rms, rms), max(self._largest, largest), True
        return rms

    def _refuse_base(self, canary: Canary, logprobs: Float32s, version: int) -> None:
        self.decides = True
        if not canary.base_logprobs:
            return
        base = np.asarray(canary.base_logprobs)
        effect = np.asarray(canary.logprobs) - base
        noise = max(self._rms, NO_NOISE) if self._is_measured else canary.tolerance
        if (size := float(np.linalg.norm(effect))) < DECIDABLE * noise:
            self.decides = False
            return
        t = float((logprobs - base) @ effect) / size**2
        if not t >= HALF:
            raise WeightMismatchError(
                f"after the update to version {version} the engine's log-probs are those of the base model "
                f"(t = {t:.2f}, which is 1 with the adapter): the engine does not have it"
            )

    def _limit(self, so_far: float, bound: float) -> float:
        return min(bound, max(FACTOR * so_far, FLOOR_SHARE * bound)) if self._is_measured else bound
