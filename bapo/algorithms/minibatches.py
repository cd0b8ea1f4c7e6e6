"""How a batch is cut into mini-batches, one optimizer step each (docs/paper.md, Algorithm 1 line 18)."""

from __future__ import annotations


def near_equal_split(num_groups: int, minibatch_size: int) -> list[int]:
    """Sizes of the ceil(num_groups / minibatch_size) mini-batches; they differ by at most one, larger ones first.

    Example: 179 groups by 64 -> [60, 60, 59], not [64, 64, 51]: every optimizer step weighs the same.
    Returns: [] for an empty batch.
    Raises: ValueError for a negative batch or an empty mini-batch.
    """
    if num_groups < 0 or minibatch_size < 1:
        raise ValueError(f"cannot cut {num_groups} groups into mini-batches of {minibatch_size}")
    if num_groups == 0:
        return []
    num_minibatches = -(-num_groups // minibatch_size)
    smaller, num_larger = divmod(num_groups, num_minibatches)
    return [smaller + 1] * num_larger + [smaller] * (num_minibatches - num_larger)
