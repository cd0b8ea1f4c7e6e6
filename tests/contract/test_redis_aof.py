"""When a write is in the append-only file, told from looks at what Redis says of it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat

import pytest

from bapo.core.errors import StorageError, UnavailableError
from buffer_service.store.redis.durability import AofState, Target, until_written


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


def acknowledged(looks: Iterator[AofState]) -> None:
    until_written(next(looks), lambda: next(looks), "here")


def test_looks_go_on_until_the_write_is_in_the_file() -> None:
    looks = looks_of((100, 40), (100, 40), (100, 50), (140, 10), (0, 0))
    acknowledged(looks)
    assert next(looks).unwritten == 0, "no look more than needed"


def test_a_disk_that_takes_no_more_is_named_at_once_unless_the_write_is_in_the_file() -> None:
    with pytest.raises(StorageError, match=r"Redis at here cannot write to its disk .* aof_last_write_status:err"):
        acknowledged(looks_of((100, 40), is_refused=True))
    acknowledged(looks_of((100, 0), is_refused=True))


def test_a_disk_that_takes_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("buffer_service.store.redis.durability.TIMEOUT_S", 0.02)
    with pytest.raises(UnavailableError, match="its disk is busy"):
        acknowledged(repeat(AofState(size=100, unwritten=40)))
