"""What one run's buffer holds, in numbers and tables. Nothing here changes it."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from bapo.errors import UnavailableError
from bapo.messages import BufferStatus, hard_prompt_map
from buffer_service.bounded_look import BoundedLook
from buffer_service.metrics import Scrape
from buffer_service.store import Store
from buffer_service.values import Health, Tables

log = logging.getLogger(__name__)

SCRAPE_S = 3.0
"""Prometheus waits for five, and would call a service that waits for Redis down."""
READY_S = 2.0
"""A probe of Kubernetes waits for three: without an answer nobody would know that it is Redis that hangs."""


class Holdings:
    """Of one run. Raises, unless it says otherwise: UnavailableError."""

    def __init__(self, store: Store, max_staleness: int) -> None:
        self._store, self._max_staleness = store, max_staleness
        self._scrape = BoundedLook(self._look, SCRAPE_S)
        self._health = BoundedLook(store.health, READY_S)

    def status(self) -> BufferStatus:
        """Everything in numbers."""
        return replace(self._store.status(), max_staleness=self._max_staleness)

    def tables(self) -> Tables:
        """B_bad, B_high and thresholds after the newest assembly."""
        return self._store.tables()

    def hard_prompts(self) -> list[dict[str, Any]]:
        """B_bad with its prompts, oldest first."""
        prompts = self._store.bad_prompts()
        # An assembly between the two reads may have moved entries: what is in both is right.
        return [hard_prompt_map(e, prompts[e.prompt_id]) for e in self._store.tables().bad if e.prompt_id in prompts]

    def compositions(self, offset: int, limit: int) -> tuple[int, list[dict[str, Any]]]:
        """(how many, a page), newest first."""
        total, lines = self._store.compositions(offset, limit)
        return total, [dict(line) for line in lines]

    def counters(self) -> dict[str, int]:
        """Event -> count."""
        return self._store.counters()

    async def health(self) -> Health:
        """How the store keeps what was acknowledged, soon. Raises: UnavailableError also when it hangs."""
        try:
            return await self._health.soon()
        except TimeoutError as error:
            raise UnavailableError(f"Redis has not answered for {READY_S:.0f} s") from error

    async def scrape(self) -> Scrape | None:
        """What metrics show of it; None when the store does not answer soon."""
        try:
            return await self._scrape.soon()
        except TimeoutError:
            log.warning("the scrape found no store: it has not answered for %.0f s", SCRAPE_S)
        except UnavailableError as error:
            log.warning("the scrape found no store: %s", error)
        return None

    def _look(self) -> Scrape:
        status, memory = self._store.status(), self._store.memory()
        return Scrape(status=status, memory=memory, persistent=self._is_persistent())

    def _is_persistent(self) -> bool:
        try:
            return self._store.health().persistent
        except UnavailableError:  # it has just answered, but cannot write its append-only file
            return False
