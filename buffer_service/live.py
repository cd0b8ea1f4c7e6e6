"""What the buffer knows of itself now, for the page: queues, leases, and how old the entries of its tables are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from bapo.messages import status_map
from buffer_service.service import BufferService

MOST_BATCHES = 1000
"""Compositions that are sent: enough where a run directory with more cannot be read."""


def live_numbers(service: BufferService) -> dict[str, Any]:
    """JSON values. Raises: UnavailableError."""
    status, tables = service.holdings.status(), service.holdings.tables()
    return {
        "status": status_map(status),
        "ages_bad": ages(tables.step, (entry.birth for entry in tables.bad)),
        "ages_high": ages(tables.step, (stat.birth for stat in tables.high)),
        "batches": service.holdings.compositions(0, MOST_BATCHES)[1][::-1],
    }


def ages(step: int, births: Iterable[int]) -> dict[str, int]:
    """Age in steps -> entries of that age, youngest first."""
    return {str(age): number for age, number in sorted(Counter(step - birth for birth in births).items())}
