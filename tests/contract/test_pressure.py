"""When the buffer is full: at each limit exactly, between two looks, and never while the next batch lacks something."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from bapo.core.errors import FullError, UnavailableError
from buffer_service.backpressure import Backpressure
from buffer_service.state import Memory, Readiness
from buffer_service.store.redis.connection import RedisLink
from tests.support.buffer import PuttingRedisStore as RedisStore
from tests.support.buffer import an_assembly, stored
from tests.support.buffer_app import small_config
from tests.support.clock import Clock
from tests.support.wait import wait_until

MB = 1 << 20


class Measured(RedisStore):
    """A store that says of its memory and its bytes what the test wants, and counts looks."""

    def __init__(self, redis_url: str) -> None:
        super().__init__(RedisLink(redis_url), "run", lease_s=60, max_attempts=3)
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


def pressure_of(store: Measured, clock: Clock | None = None, **limits: Any) -> Backpressure:
    """B = 4, with sampling ahead."""
    return Backpressure(store, small_config(buffer=limits, cadence={"max_steps_ahead": 1000}), now=clock or Clock())


def why(pressure: Backpressure) -> str:
    pressure.forget()
    pressure.poll()
    return pressure.full_reason()


def test_the_limit_of_groups_is_reached_at_its_number(redis_url: str) -> None:
    store = Measured(redis_url)
    pressure = pressure_of(store, max_fresh_groups=5)
    stored(store, "abcd")
    assert why(pressure) == ""
    stored(store, "e")
    assert why(pressure) == "5 fresh groups queued, buffer.max_fresh_groups = 5"
    with pytest.raises(FullError):
        pressure.admit(0)


@pytest.mark.parametrize(("num_bytes", "is_full"), [(2 * MB - 1, False), (2 * MB, True)])
def test_the_limit_of_megabytes_is_reached_at_its_last_byte(redis_url: str, num_bytes: int, is_full: bool) -> None:
    store = Measured(redis_url)
    stored(store, "abcd")
    store.fresh_bytes = num_bytes
    assert bool(why(pressure_of(store, max_fresh_mb=2))) is is_full


LIMIT = "maxmemory is 100.0 MB (embedded Redis: 90 % of buffer.max_memory_mb)"


@pytest.mark.parametrize(("used", "is_full"), [(94 * MB, False), (95 * MB, True)])
def test_a_twentieth_of_redis_memory_is_kept(redis_url: str, used: int, is_full: bool) -> None:
    store = Measured(redis_url)
    stored(store, "abcd")
    store.held = Memory(used=used, limit=100 * MB)
    said = why(pressure_of(store))
    assert said == (f"Redis uses 95.0 MB; {LIMIT}" if is_full else "")


PAPER = {"weight_sync_interval": 1, "reevaluation_interval": 1, "max_steps_ahead": 1000, "wait_for_reevaluation": True}


def test_memory_is_kept_for_the_round_that_the_next_batch_waits_for(redis_url: str) -> None:
    """All 4 fresh groups are there, of 1 MB each, and 10 re-evaluations are open: 10 of 100 MB are kept for them."""
    store = Measured(redis_url)
    pressure = Backpressure(store, small_config(cadence=PAPER, buffer={"max_fresh_groups": 4}), now=Clock())
    store.fresh_bytes, store.held = 4 * MB, Memory(used=95 * MB, limit=100 * MB)
    stored(store, "abc")
    assert why(pressure) == "", "the batch lacks a fresh group"
    stored(store, "d")
    assert why(pressure) == f"Redis uses 95.0 MB; {LIMIT}", "no round was issued yet"
    store.round_left, store.held = 10, Memory(used=85 * MB, limit=100 * MB)
    kept = f"Redis uses 85.0 MB and reserves 10.0 MB for re-evaluations; {LIMIT}"
    assert why(pressure) == kept
    assert pressure.shortage_reason() == kept
    store.held = Memory(used=85 * MB - 1, limit=100 * MB)
    assert why(pressure) == "", "the limit of groups counts when the whole batch is there"
    store.round_left = 0
    assert why(pressure) == "4 fresh groups queued, buffer.max_fresh_groups = 4"


def test_in_step_order_the_last_open_group_of_a_step_is_taken_when_memory_is_short(redis_url: str) -> None:
    store = Measured(redis_url)
    store.held = Memory(used=99, limit=100)
    pressure = Backpressure(
        store,
        small_config(cadence={"weight_sync_interval": 1, "reevaluation_interval": 1, "max_steps_ahead": 0}),
        now=Clock(),
    )
    stored(store, "abcde")
    store.num_open = 1
    assert why(pressure) == ""
    store.num_open = 0
    assert why(pressure).startswith("Redis uses ")


def test_without_limits_nothing_is_ever_full(redis_url: str) -> None:
    store = Measured(redis_url)
    stored(store, [f"p{i}" for i in range(50)])
    store.held = Memory(used=1 << 40, limit=0)
    assert why(pressure_of(store)) == ""


def test_what_the_next_batch_lacks_is_taken_and_a_starved_learner_hears_why(redis_url: str) -> None:
    store = Measured(redis_url)
    store.held = Memory(used=99, limit=100)
    pressure = pressure_of(store, max_fresh_groups=4)
    stored(store, "abc")
    assert why(pressure) == ""
    pressure.admit(1000)
    assert pressure.shortage_reason().startswith("Redis uses ")
    stored(store, "d")
    assert why(pressure) != ""
    assert pressure.shortage_reason() == ""


def test_pushes_do_not_wait_for_a_store_that_is_slow_to_answer_a_look_and_are_counted_behind_it(redis_url: str) -> None:
    store = Measured(redis_url)
    stored(store, "abcd")
    store.fresh_bytes = MB
    pressure = pressure_of(store, max_fresh_mb=2)

    def push() -> None:
        pressure.admit(MB - 1)
        pressure.took(0)

    store.meanwhile = push
    pressure.poll()
    assert pressure.is_known
    pressure.admit(1)
    with pytest.raises(FullError):
        pressure.admit(1)


@pytest.mark.parametrize(
    ("used_mb", "limit_mb", "checkpointed", "is_wanted"),
    [
        (75, 100, 0, True),  # three quarters are used, and 24 of them wait for a checkpoint
        (74, 100, 0, False),  # there is room
        (75, 100, 2, True),  # 20 of them: what a checkpoint must free at least
        (75, 100, 3, False),  # 12 of them: it would not help
        (900, 0, 0, False),  # no limit
    ],
)
def test_a_checkpoint_is_wanted_when_what_waits_for_one_fills_redis(
    redis_url: str, used_mb: int, limit_mb: int, checkpointed: int, is_wanted: bool
) -> None:
    store = Measured(redis_url)
    for step, num_mb in enumerate([2, 2, 8, 12], start=1):
        names = [f"{step}{name}" for name in "abcd"]
        stored(store, names, step=step)
        ids = [f"g-{name}" for name in names]
        assembly = an_assembly(step=step, fresh=ids, before=store.tables())
        assert store.commit_assembly(replace(assembly, batch=replace(assembly.batch, num_bytes=num_mb * MB)))
    store.commit(4, checkpointed)
    store.held = Memory(used=used_mb * MB, limit=limit_mb * MB)
    assert pressure_of(store).wants_checkpoint() is is_wanted


def test_who_waits_for_a_look_that_fails_fails_with_it(redis_url: str) -> None:
    """Each after the other would wait as long for a Redis that hangs: the fortieth claim for a quarter of an hour."""
    store, answers = Measured(redis_url), threading.Event()
    pressure, said = pressure_of(store), []

    def hang() -> None:
        store.looks += 1
        answers.wait(10)
        raise UnavailableError("Redis does not answer")

    def look() -> None:
        with pytest.raises(UnavailableError) as found:
            pressure.poll()
        said.append(str(found.value))

    store.memory = hang  # type: ignore[method-assign, assignment]
    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: pressure._polling.locked())
    time.sleep(0.2)  # the others wait by then
    answers.set()
    for thread in threads:
        thread.join(30)
    assert (said, store.looks) == (["Redis does not answer"] * 4, 1)
    del store.memory  # type: ignore[method-assign]
    pressure.poll()
    assert store.looks == 2, "who comes later asks anew"
