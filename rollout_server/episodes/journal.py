"""The journal of episodes in the buffer service."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from bapo.core.errors import UnavailableError
from bapo.transport.buffer_client import BufferClient
from rollout_server.episodes.manager import LeaseLostError

log = logging.getLogger(__name__)

NUM_THREADS = 16
"""Appends at a time: each waits for Redis' append-only file."""


class BufferJournal:
    """A `Journal` in the name of one holder of leases."""

    def __init__(self, holder_id: str, buffer: BufferClient) -> None:
        self._holder_id, self._buffer = holder_id, buffer
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="journal")

    async def read(self, request_id: str) -> list[bytes]:
        """Raises: UnavailableError."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._buffer.read_journal, request_id)

    async def append(self, request_id: str, number: int, entries: Sequence[bytes]) -> None:
        """Raises: LeaseLostError; UnavailableError."""
        loop = asyncio.get_running_loop()
        result, found = await loop.run_in_executor(
            self._threads, self._buffer.append_journal, self._holder_id, request_id, number, entries
        )
        if result == "not_held":
            raise LeaseLostError(f"request {request_id} is not ours any more")
        if result != "ok":
            raise UnavailableError(f"the journal of {request_id} has {found} entries, not {number}: it is read again")
