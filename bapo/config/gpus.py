"""How a configuration names GPUs of one machine."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator


def distinct_indices(indices: tuple[int, ...]) -> tuple[int, ...]:
    """Raises: ValueError."""
    if not indices or min(indices) < 0 or len(set(indices)) < len(indices):
        raise ValueError(f"{list(indices)}: write one or more different indices from 0 on, such as [0, 1], or null")
    return indices


GpuIndices = Annotated[tuple[int, ...], AfterValidator(distinct_indices)]
