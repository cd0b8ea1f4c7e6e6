"""Frames on their way into Redis, before the script that admits them: sent one by one, answers read at the end."""

from __future__ import annotations

import contextlib
import secrets

from bapo.errors import BapoError
from buffer_service.redis_idle import Held
from buffer_service.redis_keys import Keys
from buffer_service.redis_link import RedisLink
from buffer_service.resp import set_pieces

AT_ONCE_BYTES = 1 << 18
"""Sent together: each time wakes Redis. What is left of a push goes with its script."""


class RedisUpload:
    """The frames of one push. Used by one thread at a time."""

    def __init__(self, link: RedisLink, keys: Keys, ttl_ms: int) -> None:
        """`ttl_ms` is how long a frame stays that nobody admits."""
        self._link, self._keys, self._ttl_ms = link, keys, ttl_ms
        self._nonce = secrets.token_hex(8)
        self.sent = 0
        """Frames that Redis has been sent."""
        self._held: Held | None = None
        self._unanswered = 0
        self._waiting: list[bytes | memoryview] = []
        self._waiting_bytes = 0

    def key(self, index: int) -> str:
        """Of the frame number `index`, until it is admitted."""
        return self._keys.incoming(f"{self._nonce}-{index}")

    def put(self, frame: bytes | memoryview) -> None:
        """The next frame. Blocks when it is sent, until it is with the kernel. Raises: UnavailableError."""
        self._waiting.append(frame)
        self._waiting_bytes += len(frame)
        if self._waiting_bytes >= AT_ONCE_BYTES:
            self._send()

    def _send(self) -> None:
        pieces: list[bytes | memoryview] = []
        for index, frame in enumerate(self._waiting, self.sent):
            pieces += set_pieces(self.key(index), frame, self._ttl_ms)
        with self._link.errors_named():
            self._held = self._held or self._link.connections.take()
            try:
                self._held.connection.send_packed_command(pieces)
            except BaseException:
                self._let_go()
                raise
        self.sent += len(self._waiting)
        self._unanswered += len(self._waiting)
        self._waiting, self._waiting_bytes = [], 0

    def pause(self) -> None:
        """Hold no connection until the next frame. Raises: UnavailableError; FullError."""
        held, unanswered = self.take_over()
        if held is not None:
            self._link.read_answers(held, unanswered)

    def take_over(self) -> tuple[Held | None, int]:
        """(the connection, how many answers are to come on it): from here on the caller's."""
        held, unanswered = self._held, self._unanswered
        self._held, self._unanswered = None, 0
        return held, unanswered

    def drop(self) -> None:
        """Nothing of this is wanted."""
        self._let_go()
        if self.sent:
            with contextlib.suppress(BapoError), self._link.errors_named():  # they expire anyway
                self._link.client.unlink(*(self.key(index) for index in range(self.sent)))
        self.sent = 0

    def _let_go(self) -> None:
        held, _ = self.take_over()
        if held is not None:
            self._link.connections.drop(held)
