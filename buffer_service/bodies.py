"""How a request's body is read: into one block, by a worker thread where that is possible.

Memory and time follow what came, never what was declared: anybody with a token can declare 16 GiB in one line.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect

from bapo.errors import Refusal
from bapo.gate import BodyError
from buffer_service.blocks import new_block
from buffer_service.direct import Direct, SilentError, direct_of, readable, receive
from buffer_service.threads import in_thread

T = TypeVar("T")
Body = bytes | bytearray | memoryview

MOST_PUSH_BYTES = 64 << 20
MOST_RESTORE_BYTES = 16 << 30
MOST_STATE_BYTES = 256 << 20
"""Of a prompt selector: two numbers for each of ten million prompts."""


def declared_bytes(request: Request, most_bytes: int) -> int:
    """Length of the body. Raises: BodyError when it is not declared, or is more than `most_bytes`."""
    declared = request.headers.get("content-length", "")
    if not declared.isdigit():  # the gate has refused it already
        raise BodyError("the length of the body must be declared: send Content-Length, not chunks", Refusal.LENGTH)
    size = int(declared)
    if size > most_bytes:
        message = f"a body of {size} bytes is more than the {most_bytes} that are taken: send it in parts"
        raise BodyError(message, Refusal.TOO_LARGE)
    return size


async def read_body(request: Request, most_bytes: int) -> bytearray:
    """The whole body, by the event loop.

    Raises: BodyError when the length is not declared, is not what comes, or is more than `most_bytes`.
    """
    size = declared_bytes(request, most_bytes)
    body = bytearray()  # grows without copies: the kernel moves the pages of large blocks
    try:
        async for chunk in request.stream():
            if len(body) + len(chunk) > size:
                raise BodyError(f"the body is longer than the declared {size} bytes", Refusal.TOO_LARGE)
            body += chunk
    except ClientDisconnect:
        raise _cut_off(len(body), size) from None
    if len(body) != size:
        raise _cut_off(len(body), size)
    return body


async def use_body(request: Request, most_bytes: int, use: Callable[[Body], T]) -> T:
    """What `use` makes of the whole body, in a worker thread that has also read it. Raises: as `read_body`."""
    direct = direct_of(request.scope)
    if direct is None:
        return await in_thread(use, await read_body(request, most_bytes))
    size = declared_bytes(request, most_bytes)
    if direct.is_whole:
        return await in_thread(use, direct.take_whole())
    return await Intake(direct, size, use).run()


class Watcher(Protocol):
    """Looks at a body while it comes; in a worker thread."""

    def came(self, body: memoryview) -> None:
        """This much is here."""
        ...

    def paused(self) -> None:
        """Nothing comes for a while."""
        ...


class Intake(Generic[T]):
    """One body on its way from the socket to `use`."""

    def __init__(self, direct: Direct, size: int, use: Callable[[Body], T], watcher: Watcher | None = None) -> None:
        self._direct, self._use, self._watcher = direct, use, watcher
        self._body = new_block(size)
        begun = direct.take_begun()
        self._body[: len(begun)] = begun
        self._filled = len(begun)

    async def run(self) -> T:
        """Threads work while bytes come; between them the event loop waits."""
        try:
            with self._direct.descriptor() as descriptor:
                while not (done := await in_thread(self._work, os.dup(descriptor))):
                    await readable(descriptor)
        except SilentError as error:
            raise BodyError(str(error), Refusal.TOO_SLOW) from error
        except ConnectionError as error:
            raise _cut_off(self._filled, len(self._body)) from error
        finally:
            if self._filled == len(self._body):
                self._direct.body_was_read()
        return done[0]

    def _work(self, descriptor: int) -> tuple[T] | None:
        """With a descriptor of its own: `run` closes the other one when it is cancelled, at the end of the server."""
        try:
            return self._came(descriptor)
        finally:
            os.close(descriptor)

    def _came(self, descriptor: int) -> tuple[T] | None:
        for received in receive(descriptor, self._body[self._filled :]):
            self._filled += received
            if self._watcher is not None:
                self._watcher.came(self._body[: self._filled])
        if self._filled == len(self._body):
            return (self._use(self._body),)
        if self._watcher is not None:
            self._watcher.paused()
        return None


def _cut_off(end: int, size: int) -> BodyError:
    return BodyError(f"the body is cut off: {end} of {size} bytes", Refusal.LENGTH)
