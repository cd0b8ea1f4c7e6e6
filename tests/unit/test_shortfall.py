"""When those who wait for a batch look again: when enough was stored here, or when others may have stored something."""

from __future__ import annotations

import asyncio

import pytest

from buffer_service.backpressure import Shortfall
from buffer_service.http.long_poll import Wakeups


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_look_is_worth_it_when_what_was_missing_has_been_stored(clock: Clock) -> None:
    lack = Shortfall(clock)
    lack.took(5)
    lack.found(1, missing=3, stored=5)
    assert not lack.may_be_over(1)
    lack.took(2)
    assert not lack.may_be_over(1)
    lack.took(1)
    assert lack.may_be_over(1)


def test_groups_that_were_stored_while_the_store_was_looked_at_count(clock: Clock) -> None:
    lack = Shortfall(clock)
    before = lack.stored
    lack.took(3)  # the look may have missed them
    lack.found(1, missing=3, stored=before)
    assert lack.may_be_over(1)


def test_enough_fresh_groups_but_an_open_round_is_looked_at_every_time(clock: Clock) -> None:
    lack = Shortfall(clock)
    lack.took(7)
    lack.found(1, missing=0, stored=7)
    assert lack.may_be_over(1)
    lack.found(1, missing=-2, stored=7)
    assert lack.may_be_over(1)


def test_a_poll_tries_again_only_when_that_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("buffer_service.http.long_poll.POLL_S", 60.0)
    wakeups = Wakeups()
    tried: asyncio.Queue[int] = asyncio.Queue()
    asked: asyncio.Queue[bool] = asyncio.Queue()
    answers = iter([False, True, False])

    async def main() -> list[int]:
        loop = asyncio.get_running_loop()

        def attempt() -> None:
            loop.call_soon_threadsafe(tried.put_nowait, 1)

        def is_worth() -> bool:
            asked.put_nowait(answer := next(answers))
            return answer

        async def is_gone() -> bool:
            return False

        poll = asyncio.create_task(wakeups.poll(attempt, wait_s=60, is_gone=is_gone, is_worth=is_worth))
        found = []
        for is_tried in (False, True, False):
            await tried.get() if not found or found[-1] else None
            await asyncio.sleep(0.05)  # the poll goes to sleep behind its attempt
            wakeups.wake()
            assert await asyncio.wait_for(asked.get(), 60) is is_tried
            found.append(is_tried)
        assert tried.empty()
        wakeups.interrupt()
        assert await asyncio.wait_for(poll, 60) is None
        return [await tried.get()]

    assert asyncio.run(main()) == [1], "an interruption is worth an attempt, whatever has happened"
