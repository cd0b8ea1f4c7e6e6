"""Inspection of one run's buffer, and its maintenance by an operator."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from bapo.config.tree import Config
from bapo.core.errors import ContractError, UnavailableError
from bapo.core.json_values import to_map
from bapo.transport.messages import BufferStatus
from buffer_service.metrics import Scrape
from buffer_service.state import GroupRecord, Health, Tables
from buffer_service.store.invariants import Audit, Broken, violations
from buffer_service.store.redis.store import RedisStore
from buffer_service.store.run_image import EMPTY, Image

log = logging.getLogger(__name__)

SCRAPE_S = 3.0
"""Prometheus' timeout is 5 s; it would report a service that waits for Redis as down."""
READY_S = 2.0
"""Kubernetes' probe timeout is 3 s; the response must report Redis before that."""


class Inspection:
    """Status, hard prompts, health and metrics of one run. Methods raise UnavailableError unless stated otherwise."""

    def __init__(self, store: RedisStore, max_staleness: int) -> None:
        self._store, self._max_staleness = store, max_staleness
        self._scrape = BoundedRead(self._read_scrape, SCRAPE_S)
        self._health = BoundedRead(store.health, READY_S)

    def status(self) -> BufferStatus:
        """Read the status."""
        return replace(self._store.status(), max_staleness=self._max_staleness)

    def hard_prompts(self) -> list[dict[str, Any]]:
        """B_bad with its prompts, oldest first."""
        prompts = self._store.bad_prompts()
        # An assembly between the two reads may have moved entries: keep those that are in both.
        held = [entry for entry in self._store.tables().bad if entry.prompt_id in prompts]
        return [{**to_map(entry), "prompt": to_map(prompts[entry.prompt_id])} for entry in held]

    async def health(self) -> Health:
        """How the store persists acknowledged writes, within READY_S. Raises: UnavailableError, also if it hangs."""
        try:
            return await self._health.soon()
        except TimeoutError as error:
            raise UnavailableError(f"Redis has not responded for {READY_S:.0f} s") from error

    async def scrape(self) -> Scrape | None:
        """Read the values for the metrics; None if the store does not respond within SCRAPE_S."""
        try:
            return await self._scrape.soon()
        except TimeoutError:
            log.warning("scrape without store: Redis has not responded for %.0f s", SCRAPE_S)
        except UnavailableError as error:
            log.warning("scrape without store: %s", error)
        return None

    def _read_scrape(self) -> Scrape:
        status, memory = self._store.status(), self._store.memory()
        return Scrape(status=status, memory=memory, persistent=self._is_persistent())

    def _is_persistent(self) -> bool:
        try:
            return self._store.health().persistent
        except UnavailableError:  # it has just responded, but cannot write its append-only file
            return False


# Maintenance by an operator: each removal is one atomic operation of the store, which preserves its invariants; an
# assembly that has read removed groups fails at its fence and reads again.

ATTEMPTS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A stored group and its locations."""

    record: GroupRecord
    places: tuple[str, ...]
    """`fresh`, `reevaluated`, `evaluation LABEL`, `high`, `batch STEP`."""


class Maintenance:
    """List, verify and delete the contents of one run's buffer, for its operator."""

    def __init__(self, store: RedisStore, config: Config, on_drop: Callable[[], None] = lambda: None) -> None:
        """`on_drop`: called when an operator has deleted something."""
        self._store, self._config, self._on_drop = store, config, on_drop

    def verify(self) -> tuple[Audit, list[Broken]]:
        """Read the audit and check its invariants."""
        audit = self._store.audit()
        broken = violations(audit, self._config.algorithm)
        if broken:
            log.error("the buffer violates %d invariants: %s", len(broken), "; ".join(b.detail for b in broken[:5]))
        return audit, broken

    def held(self) -> list[Held]:
        """All groups, sorted by id."""
        image = self._store.image()
        places = _places(image)
        records = image.all_records
        for label in self._store.status().evaluations:
            for record in filter(None, self._store.records(self._store.evaluated(label))):
                records[record.group_id] = record
                places[record.group_id] = [f"evaluation {label}"]
        return [Held(record=records[key], places=tuple(places[key])) for key in sorted(records)]

    def drop_group(self, group_id: str) -> str:
        """Delete a group that no batch needs; returns the table it was in.

        Raises: ContractError if it is not in the buffer, or is retained for a batch, which must not change.
        """
        if table := self._store.drop_group(group_id):
            self._on_drop()
            log.warning("group %s dropped by operator table=%s", group_id, table)
            return table
        if self._edit(lambda now: replace(now, high=tuple(stat for stat in now.high if stat.group_id != group_id))):
            self._on_drop()
            log.warning("group %s dropped by operator table=high", group_id)
            return "high"
        if self._store.records([group_id]) != [None]:
            raise ContractError(
                f"group {group_id} is part of a batch that the learner may request again; it is deleted at the "
                "checkpoint after that batch"
            )
        raise ContractError(f"group {group_id} is not in the buffer")

    def leave_high(self, group_ids: Collection[str]) -> None:
        """Remove groups with corrupt frames from B_high."""
        if group_ids:
            self._edit(
                lambda now: replace(now, high=tuple(stat for stat in now.high if stat.group_id not in group_ids))
            )

    def drop_request(self, request_id: str) -> None:
        """Cancel an open request, queued or leased, so that nothing waits for its group any more.

        Raises: ContractError if no such request is open; the message states whether its group is stored.
        """
        if self._store.drop_request(request_id):
            self._on_drop()
            log.warning("request %s dropped by operator", request_id)
            return
        is_held = self._store.records([request_id]) != [None]
        held = "its group is in the buffer" if is_held else "nor is there a group with that id"
        raise ContractError(f"request {request_id} is not open; {held}")

    def drop_prompt(self, prompt_id: str) -> None:
        """Remove a prompt from B_bad. Raises: ContractError if it is not there."""
        if not self._edit(lambda now: replace(now, bad=tuple(e for e in now.bad if e.prompt_id != prompt_id))):
            raise ContractError(f"prompt {prompt_id} is not in B_bad")
        self._on_drop()
        log.warning("prompt %s dropped from B_bad by operator", prompt_id)

    def drop_run(self, name: str) -> None:
        """Delete everything; the buffer starts again at step 1. Raises: ContractError for the name of another run."""
        if name != self._config.run.name:
            raise ContractError(f"this buffer belongs to run {self._config.run.name!r}, not {name!r}")
        self._store.restore(EMPTY, ())
        self._on_drop()
        log.warning("run %s dropped by operator", name)

    def _edit(self, change: Callable[[Tables], Tables]) -> bool:
        """Apply `change` to the tables; whether it removed anything. Raises: UnavailableError after ATTEMPTS."""
        for _ in range(ATTEMPTS):
            before = self._store.tables()
            after = change(before)
            if after == before:
                return False
            if self._store.edit_tables(before, after):
                return True
        raise UnavailableError("the tables kept changing while an entry was removed: try again")


def _places(image: Image) -> dict[str, list[str]]:
    """Group id -> locations, for every group the image references."""
    found: dict[str, list[str]] = {}
    for group_id, place in _references(image):
        found.setdefault(group_id, []).append(place)
    return found


def _references(image: Image) -> Iterator[tuple[str, str]]:
    yield from ((group.record.group_id, "fresh") for group in image.fresh)
    yield from ((record.group_id, "reevaluated") for record in image.reevaluated)
    yield from ((stat.group_id, "high") for stat in image.tables.high)
    for batch in image.batches:
        yield from ((group_id, f"batch {batch.step}") for group_id in batch.group_ids)
        yield from ((group_id, f"not trained in {batch.step}") for group_id in batch.untrained)


# Reads with a deadline, for callers that must respond even if Redis hangs.

T = TypeVar("T")


class BoundedRead(Generic[T]):
    """One read at a time, in its own thread: callers that arrive while one hangs share it and occupy no thread.

    Does not use a worker thread of the service: while Redis hangs, waiting calls occupy all of those.
    """

    def __init__(self, read: Callable[[], T], patience_s: float) -> None:
        """`patience_s`: timeout of a caller."""
        self._read, self._patience_s = read, patience_s
        self._lock = threading.Lock()
        self._newest: Future[T] | None = None

    async def soon(self) -> T:
        """The result or exception of the read. Raises: TimeoutError."""
        return await asyncio.wait_for(asyncio.wrap_future(self._begun()), self._patience_s)

    def _begun(self) -> Future[T]:
        with self._lock:
            newest = self._newest
            if newest is None or newest.done():
                newest = self._newest = Future()
                newest.set_running_or_notify_cancel()  # so that a caller that times out does not cancel it for others
                threading.Thread(target=self._settle, args=(newest,), name="bounded-read", daemon=True).start()
        return newest

    def _settle(self, future: Future[T]) -> None:
        try:
            found = self._read()
        except BaseException as error:  # noqa: BLE001 - re-raised in the waiting callers
            future.set_exception(error)
        else:
            future.set_result(found)
