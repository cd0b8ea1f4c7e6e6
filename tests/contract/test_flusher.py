"""The embedded Redis' file: what is appended reaches the disk soon, and when a write is in it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from bapo.core.errors import StorageError, UnavailableError
from bapo.runtime.run_directory.layout import RunDirectory
from buffer_service.store.redis.durability import AofState, Target, until_written
from services.launcher.embedded_redis import Flusher
from services.launcher.scenarios import start_buffer
from services.launcher.session import Session
from tests.support.buffer_app import small_config
from tests.support.wait import wait_until


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were written to the disk, in order."""
    names: list[str] = []
    really = os.fdatasync

    def fdatasync(descriptor: int) -> None:
        names.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        really(descriptor)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    return names


def append(folder: Path, name: str) -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    with path.open("ab") as file:
        file.write(b"x")
    return path


@pytest.mark.parametrize("name", ["appendonlydir/appendonly.aof.1.incr.aof", "appendonly.aof"])
def test_a_file_is_written_when_it_has_grown_and_then_no_more(tmp_path: Path, written: list[str], name: str) -> None:
    flusher, path = Flusher(tmp_path), append(tmp_path, name)
    flusher.flush()
    flusher.flush()
    assert written == [path.name]
    append(tmp_path, name)
    flusher.flush()
    assert written == [path.name] * 2


def test_the_next_file_of_a_rewriting_is_written_and_one_that_is_gone_is_no_error(
    tmp_path: Path, written: list[str]
) -> None:
    flusher = Flusher(tmp_path)
    flusher.flush()
    first = append(tmp_path, "appendonlydir/appendonly.aof.1.incr.aof")
    flusher.flush()
    first.unlink()
    append(tmp_path, "appendonlydir/appendonly.aof.2.incr.aof")
    flusher.flush()
    assert written == ["appendonly.aof.1.incr.aof", "appendonly.aof.2.incr.aof"]


def test_a_disk_that_fails_ends_nothing_and_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append(tmp_path, "appendonly.aof")
    tries: list[int] = []

    def fails(descriptor: int) -> None:
        tries.append(descriptor)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fails)
    flusher = Flusher(tmp_path)
    flusher.flush()
    flusher.flush()
    assert len(tries) == 2


@pytest.mark.parametrize(("policy", "is_flushed"), [("everysec", True), ("always", False)])
def test_the_embedded_redis_of_a_run_is_flushed_unless_it_writes_before_it_answers(
    tmp_path: Path, written: list[str], policy: str, is_flushed: bool
) -> None:
    config = small_config(buffer={"appendfsync": policy})
    run = RunDirectory.create(tmp_path / "run")
    append(run.redis_path, "appendonly.aof")
    with ExitStack() as alongside:
        children = SimpleNamespace(start=lambda spec: spec)
        starter = SimpleNamespace(env={}, buffer=lambda redis_url: redis_url)
        session = SimpleNamespace(config=config, run=run, children=children, starter=starter, alongside=alongside)
        start_buffer(cast(Session, session), is_new=False)
        names = [thread.name for thread in threading.enumerate()]
        assert ("flusher" in names) is is_flushed
        if is_flushed:
            wait_until(lambda: bool(written), what="the file is written")


# -- when a write is in the file


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
    with pytest.raises(StorageError, match="aof_last_write_status"):
        acknowledged(looks_of((100, 40), is_refused=True))
    acknowledged(looks_of((100, 0), is_refused=True))


def test_a_disk_that_takes_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("buffer_service.store.redis.durability.TIMEOUT_S", 0.02)
    with pytest.raises(UnavailableError):
        acknowledged(repeat(AofState(size=100, unwritten=40)))
