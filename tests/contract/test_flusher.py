"""What is appended to the embedded Redis' file reaches the disk soon, and a quiet disk is left alone."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from bapo.runtime.run_directory.layout import RunDirectory
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
