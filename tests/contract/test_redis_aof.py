"""When a write is in the append-only file, told from looks at what Redis says of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import chain, count, repeat

import pytest
from redis.exceptions import ResponseError

from bapo.errors import StorageError, UnavailableError
from buffer_service.redis_aof import AofState, SharedLooks, Target, aof_state_of, is_always, until_written
from buffer_service.steps import Steps, finish
from tests.patience import PATIENCE_S, wait_until


def info(*lines: str) -> bytes:
    """As Redis writes it."""
    return "\r\n".join(["# Persistence", "loading:0", *lines, ""]).encode()


def test_a_look_is_read_from_what_redis_says() -> None:
    sizes = ("aof_current_size:120", "aof_base_size:88", "aof_pending_rewrite:0")
    quiet = ("aof_buffer_length:0", "aof_pending_bio_fsync:0", "aof_delayed_fsync:3")
    assert aof_state_of(info("aof_enabled:1", "aof_last_write_status:ok", *sizes, *quiet), "run") == AofState(
        server="run"
    )
    assert aof_state_of(info("aof_enabled:0", "aof_last_write_status:ok"), "run") == AofState(server="run")
    busy = ("aof_buffer_length:40", "aof_pending_bio_fsync:1", "aof_delayed_fsync:3")
    assert aof_state_of(info("aof_enabled:1", "aof_last_write_status:ok", *sizes, *busy), "run") == AofState(
        size=120, base_size=88, unwritten=40, is_postponed=True, server="run"
    )
    full = ("aof_buffer_length:40", "aof_pending_bio_fsync:0", "aof_delayed_fsync:3")
    assert aof_state_of(info("aof_enabled:1", "aof_last_write_status:err", *sizes, *full), "run") == AofState(
        size=120, base_size=88, unwritten=40, is_refused=True, server="run"
    )


def test_whether_redis_writes_before_it_answers_is_read_from_its_configuration() -> None:
    assert is_always([b"appendfsync", b"always"])
    assert is_always({b"appendfsync": b"always"})
    assert not is_always([b"appendfsync", b"everysec"])
    assert not is_always(ResponseError("NOPERM"))


def looks_of(*found: tuple[int, int] | tuple[int, int, int], **also: bool) -> Iterator[AofState]:
    """(size, bytes that are not written, size after the newest rewrite)."""
    for size, unwritten, *base in found:
        yield AofState(size=size, unwritten=unwritten, base_size=sum(base), **also)


@pytest.mark.parametrize(
    "looks",
    [
        [(100, 0)],
        [(100, 40), (100, 0)],
        [(100, 40), (140, 99)],  # ours is written, others' is not
        [(100, 40), (139, 1), (140, 5)],
        [(900, 40), (50, 7), (57, 1)],  # rewritten: the file starts small, with 7 bytes of ours or of others unwritten
        [(100, 40, 10), (200, 30, 200), (229, 1, 200), (230, 9, 200)],  # rewritten, and larger than before
        [(0, 40), (0, 60), (40, 20)],  # an empty file
    ],
)
def test_a_write_is_acknowledged_when_the_kernel_has_it(looks: list[tuple[int, int]]) -> None:
    target = Target()
    assert [target.is_reached(look) for look in looks_of(*looks)] == [False] * (len(looks) - 1) + [True]


def acknowledged(looks: Iterator[AofState], server: str = "") -> None:
    def look() -> Steps[AofState]:
        yield from ()
        return next(looks)

    finish(until_written(look, SharedLooks(lambda: next(looks)), "here", next(looks), server))


def test_looks_go_on_until_the_write_is_in_the_file() -> None:
    looks = looks_of((100, 40), (100, 40), (100, 50), (140, 10), (0, 0), is_postponed=True)
    acknowledged(looks)
    assert next(looks).unwritten == 0, "no look more than needed"


def test_a_disk_that_takes_no_more_is_named_at_once_unless_the_write_is_in_the_file() -> None:
    with pytest.raises(StorageError, match=r"Redis at here cannot write to its disk .* aof_last_write_status:err"):
        acknowledged(looks_of((100, 40), is_refused=True))
    acknowledged(looks_of((100, 0), is_refused=True))


def test_a_disk_that_takes_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("buffer_service.redis_aof.TIMEOUT_S", 0.02)
    with pytest.raises(UnavailableError, match="its disk is busy"):
        acknowledged(repeat(AofState(size=100, unwritten=40, is_postponed=True)))


@pytest.mark.parametrize("num_looks", [1, 2, 3])
def test_a_redis_that_was_started_again_proves_nothing(num_looks: int) -> None:
    """It has nothing unwritten; but what the one before had not written is gone."""
    before = repeat(AofState(size=100, unwritten=40, server="before"), num_looks - 1)
    with pytest.raises(UnavailableError, match="Redis at here was started again before it had written"):
        acknowledged(chain(before, repeat(AofState(server="after"))), server="before")


def test_one_look_serves_all_who_wait_when_it_begins() -> None:
    """The first thread's look is held up until seven others wait: they share the next one."""
    may_go, numbers = threading.Event(), count(1)

    def look() -> AofState:
        assert may_go.wait(PATIENCE_S)
        return AofState(size=next(numbers))

    shared, found = SharedLooks(look), []
    threads = [threading.Thread(target=lambda: found.append(shared.next().size)) for _ in range(8)]
    threads[0].start()
    wait_until(lambda: shared._begun == 1)
    for thread in threads[1:]:
        thread.start()
    wait_until(lambda: len(shared._changed._waiters) == 7)  # type: ignore[attr-defined]
    may_go.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert sorted(found) == [1] + [2] * 7


def test_a_look_that_fails_leaves_the_others_to_the_next_who_waits() -> None:
    answers = iter([UnavailableError("gone"), AofState(size=7)])

    def look() -> AofState:
        answer = next(answers)
        if isinstance(answer, UnavailableError):
            raise answer
        return answer

    shared = SharedLooks(look)
    with pytest.raises(UnavailableError, match="gone"):
        shared.next()
    assert shared.next().size == 7
