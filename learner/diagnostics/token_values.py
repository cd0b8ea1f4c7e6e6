"""Per-token values collected during the passes of a step, so that recording needs no extra pass.

If several mini-batches or epochs compute a response, the last pass counts. Suffix: M tokens of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.distributed.world import World
from learner.losses.objective import TokenLosses

Float32s = NDArray[np.float32]
NUM_VALUES = 4
"""log-prob, entropy, ratio, clipped."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenValues:
    """All [M], on the host; NaN for responses that no pass computed."""

    logprobs_M: Float32s
    entropy_M: Float32s
    ratio_M: Float32s
    clipped_M: Float32s
    """1 where clipping changed the objective."""
    advantage_M: Float32s


class TokenTrace:
    """Collects values on the device over all ranks; every rank must have one in the same steps."""

    def __init__(self, num_tokens: int, world: World) -> None:
        self._world = world
        self._values = torch.full((NUM_VALUES, num_tokens), torch.nan, device=world.device)
        self._pass = torch.zeros((NUM_VALUES + 1, num_tokens), device=world.device)

    @torch.no_grad()
    def add(self, slot_M: Tensor, logprobs_M: Tensor, entropy_M: Tensor, losses: TokenLosses) -> None:
        """Add one micro-batch of this rank."""
        seen_M = torch.ones_like(losses.ratio_M)
        found = (logprobs_M.detach(), entropy_M.detach(), losses.ratio_M, losses.clipped_M, seen_M)
        self._pass[:, slot_M] = torch.stack(found)

    def end_minibatch(self) -> None:
        """Merge the ranks: which of them computes a response differs between mini-batches."""
        found = self._world.sum(self._pass)
        self._values = torch.where(found[NUM_VALUES] > 0, found[:NUM_VALUES], self._values)
        self._pass.zero_()

    def values(self, advantage_M: Tensor) -> TokenValues:
        """Values of the whole step."""
        logprobs_M, entropy_M, ratio_M, clipped_M = self._values.cpu().numpy()
        return TokenValues(
            logprobs_M=logprobs_M,
            entropy_M=entropy_M,
            ratio_M=ratio_M,
            clipped_M=clipped_M,
            advantage_M=advantage_M.cpu().numpy(),
        )
