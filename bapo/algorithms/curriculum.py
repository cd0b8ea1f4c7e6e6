"""The order of prompts: epoch after epoch, each a new permutation, `drop_last` (docs/paper.md, Algorithm 1 line 6)."""

from __future__ import annotations

from bapo.algorithms.randomness import rng_for


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
