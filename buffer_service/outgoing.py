"""Many frames on their way out, a batch or a snapshot: sent while they are still being read from the store.

A worker thread writes to the socket itself where that is possible (`buffer_service.direct`); else it reads and the
event loop sends. What cannot be read any more after the status is sent cuts the body off: the receiver asks again.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass

from fastapi import Response
from starlette.types import Receive, Scope, Send

from bapo.errors import BapoError
from buffer_service.direct import Direct, direct_of, transmit
from buffer_service.threads import in_thread

log = logging.getLogger(__name__)

OCTETS = "application/octet-stream"
Frames = Sequence[bytes | memoryview]
Chunks = Generator[Frames, None, None]
NOTHING: Frames = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """A body whose length is known before it is read."""

    what: str
    """For messages."""
    start: bytes
    num_bytes: int
    """Of all chunks together, without `start`."""
    chunks: Chunks
    """Blocks when asked for the next; each is valid until the next one."""


class OutgoingResponse(Response):
    """Sends an `Outgoing`."""

    media_type = OCTETS

    def __init__(self, outgoing: Outgoing, first: Frames | None = None) -> None:
        """`first` is the first chunk, if that is read already."""
        super().__init__(headers={"content-length": str(len(outgoing.start) + outgoing.num_bytes)})
        self._outgoing, self._first = outgoing, first
        self._is_written: bool | None = None
        """False: cut off."""

    def write(self, direct: Direct) -> None:
        """All of it, head included, from this worker thread. Does nothing while the event loop has something to send
        on the connection: it sends this, too, when the response is called.

        Raises: UnavailableError when the first chunk cannot be read; nothing is sent then.
        """
        if direct.has_unsent:
            return
        with closing(self._outgoing.chunks) as chunks:
            first = next(chunks, NOTHING) if self._first is None else self._first
            head, self._is_written = direct.head(200, self.raw_headers), False
            if not direct.is_open:
                return
            direct.answer_begins()
            try:
                with direct.descriptor() as descriptor:
                    _write_all(descriptor, (head, self._outgoing.start, *first), chunks)
                self._is_written = True
            except (OSError, BapoError) as error:
                log.warning("%s was cut off: %s", self._outgoing.what, error)
            except Exception:  # an error's answer behind half a body would be read as the rest of it
                log.exception("%s was cut off", self._outgoing.what)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The first chunk is read before the status is sent: a store that is away is an error, not a cut body."""
        direct = direct_of(scope)
        if direct is not None and self._is_written is None:
            await in_thread(self.write, direct)
        if direct is None or self._is_written is None:
            await self._send_in_turns(send)
        elif self._is_written:
            direct.answer_was_written()
        else:
            direct.abort()
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_in_turns(self, send: Send) -> None:
        with closing(self._outgoing.chunks) as chunks:
            first = await in_thread(next, chunks, NOTHING) if self._first is None else self._first
            frames = _kept(first)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._outgoing.start, "more_body": True})
            while frames:
                for frame in frames:
                    await send({"type": "http.response.body", "body": frame, "more_body": True})
                frames = await in_thread(lambda: _kept(next(chunks, NOTHING)))


def _write_all(descriptor: int, first: Frames, chunks: Chunks) -> None:
    transmit(descriptor, first)
    for frames in chunks:
        transmit(descriptor, frames)


def _kept(frames: Frames) -> list[bytes]:
    """Copies: what the event loop has not sent yet must outlive the next chunk."""
    return [bytes(frame) for frame in frames]
