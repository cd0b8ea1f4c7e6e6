"""Links between the parts of a run that can be cut, frozen, torn and starved: proxies for TCP and unix sockets.

client --> proxy (one thread, asyncio) --> server

open         bytes pass
frozen       no byte passes, nothing is closed: a cable that was pulled
refused      connections are refused, those that are there are closed
dribbling    a few bytes at a time
reset        now, once: all connections end with RST
half_closed  now, once: the server hears the end of what the client sends, the client hears nothing
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

LASTING = ("frozen", "refused", "dribbling")
MOMENTARY = ("reset", "half_closed")
CHUNK = 1 << 16
DRIBBLE_BYTES, DRIBBLE_PAUSE_S = 97, 0.002
LINGER_0 = struct.pack("ii", 1, 0)
Address = tuple[str, int] | Path


def needs_ipv6() -> None:
    """Skip where this machine has no ::1."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return
    except OSError as error:
        pytest.skip(f"this machine has no ::1: {error.strerror}")


class Link:
    """One proxy. Methods but `open` run in the network's thread."""

    def __init__(self, target: Address, listen: Address) -> None:
        self._target, self._listen = target, listen
        self._state = "open"
        self._moved = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._pairs: dict[asyncio.StreamWriter, asyncio.StreamWriter] = {}
        """Connection of a client -> connection to the server."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self) -> Address:
        """Accept; returns where."""
        if isinstance(self._listen, Path):
            self._server = await asyncio.start_unix_server(self._accept, self._listen, limit=CHUNK)
            return self._listen
        self._server = await asyncio.start_server(self._accept, *self._listen, limit=CHUNK)
        self._listen = self._server.sockets[0].getsockname()[:2]
        return self._listen

    async def set(self, state: str) -> None:
        """From now on, or at once."""
        if state in MOMENTARY:
            self._tear() if state == "reset" else self._half_close()
            return
        if state == "refused":
            await self.close()
        elif self._state == "refused":
            await self.listen()
        self._state = state
        self._moved.set()
        self._moved = asyncio.Event()

    async def close(self) -> None:
        """Listen no more, end all connections."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self._tear()

    def _tear(self) -> None:
        for pair in list(self._pairs.items()):
            for writer in pair:
                handle: socket.socket = writer.get_extra_info("socket")
                if handle is not None and handle.family != socket.AF_UNIX:
                    with suppress(OSError):
                        handle.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_0)
                writer.transport.abort()

    def _half_close(self) -> None:
        for upstream in list(self._pairs.values()):
            with suppress(OSError, RuntimeError):
                upstream.write_eof()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if isinstance(self._target, Path):
                theirs = await asyncio.open_unix_connection(self._target, limit=CHUNK)
            else:
                theirs = await asyncio.open_connection(*self._target, limit=CHUNK)
        except OSError:
            writer.transport.abort()
            return
        self._pairs[writer] = theirs[1]
        pumps = [
            asyncio.ensure_future(self._pump(reader, theirs[1])),
            asyncio.ensure_future(self._pump(theirs[0], writer)),
        ]
        self._tasks.update(pumps)
        # As soon as one direction has ended the whole connection has: HTTP and Redis know no half of one.
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in pumps:
            pump.cancel()
        self._tasks.difference_update(pumps)
        del self._pairs[writer]
        for end in (writer, theirs[1]):
            end.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, RuntimeError):
            while data := await reader.read(CHUNK):
                while data:
                    while self._state == "frozen":
                        await self._moved.wait()
                    size = DRIBBLE_BYTES if self._state == "dribbling" else len(data)
                    writer.write(data[:size])
                    await writer.drain()
                    data = data[size:]
                    if self._state == "dribbling":
                        await asyncio.sleep(DRIBBLE_PAUSE_S)


class Network:
    """The links of one run, by name, and the thread that they live in."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="network", daemon=True)
        self._thread.start()
        self._links: dict[str, Link] = {}

    def add(self, name: str, target: Address, listen: Address = ("127.0.0.1", 0)) -> Address:
        """A new link to `target`; returns where it listens."""

        async def make() -> Address:
            self._links[name] = Link(target, listen)
            return await self._links[name].listen()

        return self._run(make)

    def set(self, name: str, state: str) -> None:
        """See the top of the file."""
        self._run(lambda: self._links[name].set(state))

    def close(self) -> None:
        """End all links and the thread."""
        for link in self._links.values():
            self._run(link.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    def _run(self, make: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        return asyncio.run_coroutine_threadsafe(make(), self._loop).result(10.0)
