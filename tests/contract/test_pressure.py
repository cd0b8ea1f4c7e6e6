"""When the buffer is full: at each limit exactly, between two looks, and never while the next batch lacks something."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from buffer_service.memory_store import MemoryStore

from bapo.errors import UnavailableError
from buffer_service.pressure import Pressure
from buffer_service.values import Memory, Readiness
from tests.buffer_app import small_config
from tests.patience import wait_until


class Measured(MemoryStore):
    """A store that says of its memory and its bytes what the test wants, and counts looks."""

    def __init__(self) -> None:
        super().__init__("run", lease_s=60, max_attempts=3)
        self.held = Memory(used=0, limit=0)
        self.fresh_bytes: int | None = None
        self.round_left: int | None = None
        self.num_open = 0
        self.looks = 0
        self.meanwhile: Callable[[], None] = lambda: None
        """What others do while a look waits for the store's answer."""

    def memory(self) -> Memory:
        self.looks += 1
        other = threading.Thread(target=self.meanwhile, daemon=True)
        other.start()
        other.join(10)
        assert not other.is_alive(), "it waits until the store has answered the look"
        return self.held

    def readiness(self, step: int) -> Readiness:
        found = super().readiness(step)
        fresh_bytes = found.fresh_bytes if self.fresh_bytes is None else self.fresh_bytes
        return replace(found, round_left=self.round_left, num_open=self.num_open, fresh_bytes=fresh_bytes)


class Clock:
    """Seconds that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def pressure_of(store: Measured, clock: Clock | None = None, **limits: Any) -> Pressure:
    """B = 4, with slack."""
    return Pressure(store, small_config(buffer=limits, cadence={"slack": 1000}), now=clock or Clock())


def test_who_waits_for_a_look_that_fails_fails_with_it() -> None:
    """Each after the other would wait as long for a Redis that hangs: the fortieth claim for a quarter of an hour."""
    store, answers = Measured(), threading.Event()
    pressure, said = pressure_of(store), []

    def hang() -> None:
        store.looks += 1
        answers.wait(10)
        raise UnavailableError("Redis does not answer")

    def look() -> None:
        with pytest.raises(UnavailableError) as found:
            pressure.look()
        said.append(str(found.value))

    store.memory = hang  # type: ignore[method-assign, assignment]
    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: pressure._looking.locked())
    time.sleep(0.2)  # the others wait by then
    answers.set()
    for thread in threads:
        thread.join(30)
    assert (said, store.looks) == (["Redis does not answer"] * 4, 1)
    del store.memory  # type: ignore[method-assign]
    pressure.look()
    assert store.looks == 2, "who comes later asks anew"
