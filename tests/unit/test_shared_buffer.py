"""The learner's ranks while rank 0 waits for a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, cast

import pytest

from learner.distributed.shared_buffer import SharedBuffer
from learner.distributed.stopping import StopFlag, Stopped
from learner.distributed.world import World


class Wire:
    """What rank 0 shares, for one rank that follows and whose patience is counted in words."""

    def __init__(self, *, leads: bool, queue: SimpleQueue[Any]) -> None:
        self.leads = leads
        self._queue = queue

    def any(self, flag: bool) -> bool:
        return flag

    def share(self, data: Any) -> Any:
        if self.leads:
            self._queue.put(data)
            return data
        return self._queue.get(timeout=10)


class Slow:
    """A buffer that says three times what it waits for."""

    def __init__(self, end: Callable[[], bytes]) -> None:
        self._end = end

    def batch_frame(self, step: int, *, timeout_s: float, on_wait: Callable[[str], None]) -> bytes:
        for fresh in range(3):
            on_wait(f"{fresh}/4 fresh groups")
        return self._end()


def ranks(
    end: Callable[[], bytes], stops: Sequence[StopFlag] = (StopFlag(), StopFlag())
) -> tuple[SharedBuffer, SharedBuffer, SimpleQueue[Any]]:
    queue: SimpleQueue[Any] = SimpleQueue()
    worlds = [cast(World, Wire(leads=leads, queue=queue)) for leads in (True, False)]
    leader, follower = cast(Any, Slow(end)), None
    return SharedBuffer(leader, worlds[0], stops[0]), SharedBuffer(follower, worlds[1], stops[1]), queue


def test_each_time_rank_0_hears_not_yet_the_others_hear_from_it_and_then_get_the_batch() -> None:
    leader, follower, queue = ranks(lambda: b"the batch")
    heard: list[str] = []
    assert leader.batch_frame(1, timeout_s=9.0, on_wait=heard.append) == b"the batch"
    assert (len(heard), queue.qsize()) == (3, 4), "so none waits longer for a word than one answer takes"
    assert follower.batch_frame(1, timeout_s=9.0) == b"the batch"
    assert queue.empty()


def test_a_wait_that_fails_ends_the_others() -> None:
    def fail() -> bytes:
        raise RuntimeError("the buffer is away")

    leader, follower, _ = ranks(fail)
    with pytest.raises(RuntimeError):
        leader.batch_frame(1, timeout_s=9.0)
    with pytest.raises(Stopped):
        follower.batch_frame(1, timeout_s=9.0)


def test_a_rank_that_follows_ends_where_it_was_asked_to_only_at_a_word_of_rank_0_so_that_all_do() -> None:
    flag = StopFlag()
    flag._on_signal(15, None)
    leader, follower, queue = ranks(lambda: b"the batch", (StopFlag(), flag))
    leader.batch_frame(1, timeout_s=9.0)
    with pytest.raises(Stopped):
        follower.batch_frame(1, timeout_s=9.0)
    assert queue.qsize() == 3, "at the first of three words"


def test_a_signal_while_rank_0_talks_to_the_others_does_not_tear_what_it_says_and_they_hear_it_once() -> None:
    flag = StopFlag()
    leader, _, queue = ranks(lambda: b"the batch", (flag, StopFlag()))
    share = leader._world.share

    def interrupted(data: Any) -> Any:
        if not flag.asked:
            flag._on_signal(15, None)
        return share(data)

    leader._world.share = interrupted  # type: ignore[method-assign]
    with pytest.raises(Stopped):
        leader.batch_frame(1, timeout_s=9.0)
    assert (queue.get(), queue.empty()) == (b".", True)
