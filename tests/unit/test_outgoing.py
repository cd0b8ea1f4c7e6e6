"""A body that is on its way out and breaks off: the receiver must see that it is not whole."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager

import pytest

from bapo.errors import UnavailableError
from buffer_service import outgoing
from buffer_service.outgoing import Outgoing, OutgoingResponse


class Connection:
    """What a response needs of a connection: where to write, and what uvicorn would write first."""

    is_open, has_unsent = True, False

    def __init__(self, writer: socket.socket) -> None:
        self._writer = writer
        self.is_aborted = self.is_answered = False

    def head(self, status: int, headers: object) -> bytes:
        return b"HEAD %d;" % status

    @contextmanager
    def descriptor(self) -> Iterator[int]:
        yield self._writer.fileno()

    def answer_begins(self) -> None:
        pass

    def answer_was_written(self) -> None:
        self.is_answered = True

    def abort(self) -> None:
        self.is_aborted = True


@pytest.mark.parametrize("error", [UnavailableError("gone"), ZeroDivisionError("a bug")], ids=["known", "bug"])
def test_a_body_that_breaks_off_in_its_thread_is_cut_and_has_no_answer_behind_it(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def chunks() -> Generator[Sequence[bytes], None, None]:
        yield [b"second"]
        raise error

    sent: list[object] = []

    async def send(message: object) -> None:
        sent.append(message)

    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection = Connection(ours)
        body = Outgoing(what="batch 1", start=b"start;", num_bytes=99, chunks=chunks())
        response = OutgoingResponse(body, [b"first;"])
        response.write(connection)  # type: ignore[arg-type]
        assert theirs.recv(1000) == b"HEAD 200;start;first;second"
    monkeypatch.setattr(outgoing, "direct_of", lambda scope: connection)
    asyncio.run(response({}, None, send))  # type: ignore[arg-type]
    assert (connection.is_aborted, connection.is_answered, sent) == (True, False, [])
