"""Small parts of the buffer service: why a batch waits, when a poll looks again, errors of Redis in our words."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from redis._parsers.base import BaseParser
from redis.exceptions import ResponseError

from bapo.core.errors import BapoError, FullError, UnavailableError
from buffer_service.backpressure import Shortfall
from buffer_service.http.long_poll import Wakeups
from buffer_service.store.redis.connection import RedisLink
from buffer_service.store.redis.rows import pack, unpack, unpack_record
from tests.support.buffer import answer, incoming
from tests.support.clock import Clock
from tests.support.factories import make_request


def test_a_record_is_a_row_and_comes_back() -> None:
    """push.lua reads the 6th and the 11th field, and Redis' msgpack knows texts but no bytes."""
    record = msgspec.structs.replace(incoming(answer(make_request(prompt_id="a"))).record, outcome_chars="\0\xff")
    row = unpack(pack(record))
    assert (row[5], row[10]) == (record.worker_id, record.claimed_at)
    assert unpack_record(pack(record)) == record
    assert record.outcomes == bytes((0, 255))


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

        poll = asyncio.create_task(wakeups.poll(attempt, wait_s=60, is_gone=is_gone, is_worth=is_worth, caller="w"))
        found = []
        for is_tried in (False, True, False):
            await tried.get() if not found or found[-1] else None
            await asyncio.sleep(0.05)  # the poll goes to sleep behind its attempt
            wakeups.wake()
            assert await asyncio.wait_for(asked.get(), 60) is is_tried
            found.append(is_tried)
        assert tried.empty()
        wakeups.interrupt("w")
        assert await asyncio.wait_for(poll, 60) is None
        return [await tried.get()]

    assert asyncio.run(main()) == [1], "an interruption is worth an attempt, whatever has happened"


# -- errors of Redis


def named(error: Exception) -> BapoError:
    with pytest.raises(BapoError) as found, RedisLink("redis://127.0.0.1:1/0").errors_named():
        raise error
    return found.value


@pytest.mark.parametrize(
    "said",
    [
        "LOADING Redis is loading the dataset in memory",
        "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
        "READONLY You can't write against a read only replica.",
        "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
        "CLUSTERDOWN The cluster is down",
        "TRYAGAIN Multiple keys request during rehashing of slot",
        "ERR max number of clients reached",
        "ERR RESTORING script: f_1, on @user_script:3.",
    ],
)
def test_what_passes_is_asked_again(said: str) -> None:
    # By redis-py's own parser, which takes the first word of some of these away.
    assert isinstance(named(BaseParser.parse_error(said)), UnavailableError)


def test_a_full_redis_is_told_apart_and_an_unknown_error_is_never_repeated() -> None:
    assert type(named(ResponseError("OOM command not allowed when used memory > 'maxmemory'."))) is FullError
    assert type(named(ResponseError("WRONGTYPE Operation against a key"))) is BapoError
