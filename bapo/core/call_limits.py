"""How much one call to the buffer may carry, so that no script keeps Redis from everybody else for long."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

MAX_GROUPS = 1024
"""Of one push: one script admits all of them, or none."""
MAX_REQUESTS = 4096
"""Of one call that asks for groups; a round of hard prompts is one call (`algorithm.max_reevaluated`)."""
MAX_REQUEST_BYTES = 16 << 20
"""Of one call that asks for groups, where the caller can cut it: half of what any JSON may have. Rows with test cases
or an expert's solution are long."""
MAX_RESPONSES = 4096
"""Of one group."""
MAX_STEPS = (1 << 21) - 2
"""Of a run: a queue's score has 21 bits for a step, and the last weights are one after it."""
MAX_RENEWALS = 4096
"""Of one call that keeps leases: as many as one claim may have."""


def in_parts(items: Sequence[T], most: int) -> Iterator[Sequence[T]]:
    """The items in parts of at most `most`; one empty part when there are none."""
    for first in range(0, max(1, len(items)), most):
        yield items[first : first + most]


def in_parts_by_size(items: Iterable[T], most: int, most_bytes: int, size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """The items in parts of at most `most`, and of at most `most_bytes` unless one alone has more; one empty part when
    there are none."""
    part: list[T] = []
    size = 0
    for item in items:
        if part and (len(part) == most or size + size_of(item) > most_bytes):
            yield part
            part, size = [], 0
        part.append(item)
        size += size_of(item)
    yield part
