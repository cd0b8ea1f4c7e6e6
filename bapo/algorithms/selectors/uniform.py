"""The data order: epoch after epoch, each a new permutation (docs/paper.md, Algorithm 1 line 6). Learns nothing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from bapo.algorithms.randomness import rng_for
from bapo.algorithms.selectors.base import Indices, PromptSelector


class Uniform(PromptSelector):
    """Step h takes the prompts at the cursors (h - 1) B .. h B - 1."""

    learns = False

    def propose(self, step: int, n: int) -> Indices:
        """The step's prompts, then those of the same epoch that come after them, then those before."""
        epoch, start = position((step - 1) * self._batch_size, len(self._pool), self._batch_size)
        return np.roll(_order(self._seed, epoch, len(self._pool)), -start)[:n]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOrder:
    """The same order, by cursor."""

    num_prompts: int
    seed: int
    batch_size: int

    def at(self, cursor: int) -> int:
        """The prompt of the cursor-th fresh request, from 0."""
        epoch, place = position(cursor, self.num_prompts, self.batch_size)
        return int(_order(self.seed, epoch, self.num_prompts)[place])


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, num_prompts: int) -> Indices:
    """Made once: two epochs are in use when a batch lies near the seam."""
    return np.array(epoch_order(seed, epoch, num_prompts), dtype=np.int64)


def position(cursor: int, num_prompts: int, batch_size: int) -> tuple[int, int]:
    """(epoch, index within the epoch) of the cursor-th fresh request, both from 0.

    An epoch holds only whole batches, so that no batch holds a prompt twice.
    Raises: ValueError when there are fewer prompts than one batch.
    """
    per_epoch = num_prompts // batch_size * batch_size
    if per_epoch == 0:
        raise ValueError(f"{num_prompts} prompts are fewer than one batch of {batch_size}")
    return divmod(cursor, per_epoch)


def epoch_order(seed: int, epoch: int, num_prompts: int) -> list[int]:
    """The permutation of prompt indices in one epoch."""
    order = list(range(num_prompts))
    rng_for(seed, epoch, "epoch_order").shuffle(order)
    return order
