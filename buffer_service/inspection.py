"""What one run's buffer holds, and its maintenance by an operator."""

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
from bapo.transport.messages import BufferStatus, hard_prompt_map
from buffer_service.metrics import Scrape
from buffer_service.state import GroupRecord, Health, Tables
from buffer_service.store.invariants import Audit, Broken, violations
from buffer_service.store.redis.store import RedisStore
from buffer_service.store.run_image import EMPTY, Image

log = logging.getLogger(__name__)

SCRAPE_S = 3.0
"""Prometheus waits for 5 s, and would report a service that waits for Redis as down."""
READY_S = 2.0
"""A Kubernetes probe waits for 3 s; the answer must name Redis before that."""


class Inspection:
    """Status, hard prompts, health and metrics of one run. Raises, unless stated otherwise: UnavailableError."""

    def __init__(self, store: RedisStore, max_staleness: int) -> None:
        self._store, self._max_staleness = store, max_staleness
        self._scrape = BoundedRead(self._look, SCRAPE_S)
        self._health = BoundedRead(store.health, READY_S)

    def status(self) -> BufferStatus:
        """Everything in numbers."""
        return replace(self._store.status(), max_staleness=self._max_staleness)

    def hard_prompts(self) -> list[dict[str, Any]]:
        """B_bad with its prompts, oldest first."""
        prompts = self._store.bad_prompts()
        # An assembly between the two reads may have moved entries: what is in both is right.
        return [hard_prompt_map(e, prompts[e.prompt_id]) for e in self._store.tables().bad if e.prompt_id in prompts]

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


# Maintenance by an operator: each removal is one atomic operation of the store, which keeps its invariants; an assembly
# that had read what is gone finds its fence broken and reads again.

ATTEMPTS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A group of the buffer, and where it is."""

    record: GroupRecord
    places: tuple[str, ...]
    """`fresh`, `reevaluated`, `evaluation LABEL`, `high`, `batch STEP`."""


class Maintenance:
    """Lists, checks and removes what one run's buffer holds, for its operator."""

    def __init__(self, store: RedisStore, config: Config) -> None:
        self._store, self._config = store, config

    def verify(self) -> tuple[Audit, list[Broken]]:
        """The facts, and what does not fit together."""
        audit = self._store.audit()
        broken = violations(audit, self._config.algorithm)
        if broken:
            log.error("the buffer breaks %d invariants: %s", len(broken), "; ".join(b.detail for b in broken[:5]))
        return audit, broken

    def held(self) -> list[Held]:
        """Every group, in the order of their ids."""
        image = self._store.image()
        places = _places(image)
        records = image.all_records
        for label in self._store.status().evaluations:
            for record in filter(None, self._store.records(self._store.evaluated(label))):
                records[record.group_id] = record
                places[record.group_id] = [f"evaluation {label}"]
        return [Held(record=records[key], places=tuple(places[key])) for key in sorted(records)]

    def drop_group(self, group_id: str) -> str:
        """Delete a group that no batch needs; returns the table that it was in.

        Raises: ContractError when the buffer does not hold it, or only for a batch, which must stay what it was.
        """
        if table := self._store.drop_group(group_id):
            log.warning("group %s dropped by hand table=%s", group_id, table)
            return table
        if self._edit(lambda now: replace(now, high=tuple(stat for stat in now.high if stat.group_id != group_id))):
            log.warning("group %s dropped by hand table=high", group_id)
            return "high"
        if self._store.records([group_id]) != [None]:
            raise ContractError(
                f"group {group_id} is needed by a batch that the learner may request once more; it is deleted at the "
                "checkpoint after that batch"
            )
        raise ContractError(f"the buffer does not hold group {group_id}")

    def leave_high(self, group_ids: Collection[str]) -> None:
        """Take groups whose frames are bad out of B_high, where they are in it."""
        if group_ids:
            self._edit(
                lambda now: replace(now, high=tuple(stat for stat in now.high if stat.group_id not in group_ids))
            )

    def drop_request(self, request_id: str) -> None:
        """Withdraw an open request, queued or leased, so that nothing waits for its group any more.

        Raises: ContractError when no such request is open; it says whether a group of that id is held.
        """
        if self._store.drop_request(request_id):
            log.warning("request %s dropped by hand", request_id)
            return
        is_held = self._store.records([request_id]) != [None]
        held = "the buffer holds its group" if is_held else "the buffer holds no group of that id either"
        raise ContractError(f"no request {request_id} is open; {held}")

    def drop_prompt(self, prompt_id: str) -> None:
        """Take a prompt out of B_bad. Raises: ContractError when it is not there."""
        if not self._edit(lambda now: replace(now, bad=tuple(e for e in now.bad if e.prompt_id != prompt_id))):
            raise ContractError(f"prompt {prompt_id} is not in B_bad")
        log.warning("prompt %s dropped from B_bad by hand", prompt_id)

    def drop_run(self, name: str) -> None:
        """Everything: the buffer begins at step 1 again. Raises: ContractError for the name of another run."""
        if name != self._config.run.name:
            raise ContractError(f"this buffer belongs to run {self._config.run.name!r}, not {name!r}")
        self._store.restore(EMPTY, ())
        log.warning("run %s dropped by hand", name)

    def _edit(self, change: Callable[[Tables], Tables]) -> bool:
        """Whether `change` removes anything from the newest tables. Raises: UnavailableError when they never rest."""
        for _ in range(ATTEMPTS):
            before = self._store.tables()
            after = change(before)
            if after == before:
                return False
            if self._store.edit_tables(before, after):
                return True
        raise UnavailableError("the tables changed each time while an entry was removed: try again")


def _places(image: Image) -> dict[str, list[str]]:
    """Group id -> where it is, for all that the image refers to."""
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


# Reads of something that may hang, for a caller that must answer soon.

T = TypeVar("T")


class BoundedRead(Generic[T]):
    """One read at a time, in its own thread: callers that come while one hangs wait for that one, and hold no thread.

    Not in a worker thread of the service: while Redis hangs, waiting calls occupy all of those.
    """

    def __init__(self, read: Callable[[], T], patience_s: float) -> None:
        """`patience_s`: how long a caller waits."""
        self._read, self._patience_s = read, patience_s
        self._lock = threading.Lock()
        self._newest: Future[T] | None = None

    async def soon(self) -> T:
        """What the read returns, or raises. Raises: TimeoutError when it takes too long."""
        return await asyncio.wait_for(asyncio.wrap_future(self._begun()), self._patience_s)

    def _begun(self) -> Future[T]:
        with self._lock:
            newest = self._newest
            if newest is None or newest.done():
                newest = self._newest = Future()
                newest.set_running_or_notify_cancel()  # a caller that gives up cancels it for nobody
                threading.Thread(target=self._settle, args=(newest,), name="bounded-read", daemon=True).start()
        return newest

    def _settle(self, future: Future[T]) -> None:
        try:
            found = self._read()
        except BaseException as error:  # noqa: BLE001 - it is raised for who waits
            future.set_exception(error)
        else:
            future.set_result(found)
