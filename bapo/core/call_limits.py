"""Limits of one call to the buffer, so that no script blocks Redis for long."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

MAX_GROUPS = 1024
"""Groups per push: one script stores all of them or none."""
MAX_REQUESTS = 4096
"""Requests per call; a re-evaluation round is one call (`algorithm.max_reevaluated`)."""
MAX_REQUEST_BYTES = 16 << 20
"""Bytes of requests per call, if the caller can split it: half of the limit of JSON bodies. Rows with test cases or an
expert solution are long."""
MAX_RESPONSES = 4096
"""Responses per group."""
MAX_STEPS = (1 << 21) - 2
"""Steps per run: queue scores have 21 bits for a step, and the last version is one higher."""
MAX_RENEWALS = 4096
"""Leases per renewal: as many as one claim may have."""


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
