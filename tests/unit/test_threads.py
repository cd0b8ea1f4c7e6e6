"""Worker threads of the buffer service."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from buffer_service.threads import MOST_THREADS, in_thread


def test_a_result_comes_back_from_another_thread() -> None:
    def who(name: str, *, end: str) -> tuple[str, int]:
        return name + end, threading.get_ident()

    text, thread = asyncio.run(in_thread(who, "a", end="b"))
    assert text == "ab"
    assert thread != threading.get_ident()


def test_an_error_is_raised_where_it_is_awaited() -> None:
    def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError, match="x"):
        asyncio.run(in_thread(fail))


def test_jobs_run_at_the_same_time() -> None:
    together = threading.Barrier(8)

    async def all_of_them() -> list[int]:
        return await asyncio.gather(*(in_thread(together.wait, 60.0) for _ in range(8)))

    assert sorted(asyncio.run(all_of_them())) == [0, 1, 2, 3, 4, 5, 6, 7]


def test_more_jobs_than_threads_wait_for_their_turn() -> None:
    lock, running, most = threading.Lock(), 0, 0

    def job() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.005)
        with lock:
            running -= 1

    async def all_of_them() -> None:
        await asyncio.gather(*(in_thread(job) for _ in range(3 * MOST_THREADS)))

    asyncio.run(all_of_them())
    assert 1 < most <= MOST_THREADS


def test_a_job_whose_caller_has_gone_harms_nobody() -> None:
    begun, go = threading.Event(), threading.Event()

    def job() -> None:
        begun.set()
        go.wait(60.0)

    async def cancelled_then_another() -> int:
        waiting = asyncio.ensure_future(in_thread(job))
        await in_thread(begun.wait, 60.0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        go.set()
        return await in_thread(lambda: 7)

    assert asyncio.run(cancelled_then_another()) == 7
