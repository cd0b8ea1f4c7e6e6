"""Threads of a worker tell of their end; only what nobody foresaw comes with a traceback."""

from __future__ import annotations

import pytest

from bapo.core.errors import StorageError
from rollout_server.delivery import guarded_thread


@pytest.mark.parametrize(
    ("error", "number"), [(StorageError("the disk is full"), 0), (ZeroDivisionError("division by zero"), 1)]
)
def test_an_error_of_a_thread_is_handed_on_and_has_a_traceback_if_it_was_not_foreseen(
    error: Exception, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[BaseException] = []

    def fail() -> None:
        raise error

    thread = guarded_thread("claim", fail, heard.append)
    thread.start()
    thread.join(10)
    assert heard == [error]
    assert [record.getMessage() for record in caplog.records if record.exc_info] == ["claim ended"] * number


def test_a_thread_that_ends_by_itself_tells_nobody() -> None:
    heard: list[BaseException] = []
    thread = guarded_thread("claim", lambda: None, heard.append)
    thread.start()
    thread.join(10)
    assert heard == []
