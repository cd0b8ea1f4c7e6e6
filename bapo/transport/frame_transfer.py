"""Frames on their way to and from the buffer: straight into its Redis, or through the service where that is out of
reach.

    PSETEX incoming:<random>  or  PUT /frames/<random>       a worker, before it pushes the headers of the groups
    MGET group:<id>, ...      or  GET /frames/<id>           the learner, for the groups that its batch names

The service alone says whether its Redis may be used, and as which user (`GET /frame-access`, by `buffer.direct`); a
client that cannot open it there asks again after ASK_AGAIN_S. Nothing else differs between the two.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import redis
from redis.backoff import NoBackoff
from redis.exceptions import OutOfMemoryError, RedisError
from redis.retry import Retry

from bapo.core.call_limits import in_parts
from bapo.core.errors import ContractError, FullError
from bapo.transport.service_client import Peer, quoted

log = logging.getLogger(__name__)

FRAME_TTL_MS = 600_000
"""A frame whose push never came is gone after this."""
ASK_AGAIN_S = 10.0
CONNECT_TIMEOUT_S = 3.0
AT_ONCE_BYTES = 4 << 20
"""Of the frames of one MGET, about: hiredis holds a whole answer before it makes frames of it."""
READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _Redis:
    client: Any
    prefix: str
    """Of the keys that this user may touch."""


class FrameTransfer:
    """Of one buffer service. Thread-safe; a forked process has connections of its own."""

    def __init__(self, peer: Peer, *, timeout_s: float, direct: Literal["auto", "off"]) -> None:
        """
        Args:
            timeout_s: longest silence of Redis.
            direct: auto: as the service says; off: all frames by HTTP.
        """
        self._peer, self._timeout_s, self._direct = peer, timeout_s, direct
        self._lock = threading.Lock()
        self._users: dict[str, _Redis] = {}
        self._ask_at = 0.0
        self._pid = os.getpid()

    def close(self) -> None:
        """Close what no call has open."""
        for user in self._users.values():
            user.client.close()

    def put(self, frames: Sequence[bytes | memoryview]) -> list[str]:
        """Write frames under names of their own, by which a push may name them for FRAME_TTL_MS.

        Raises: FullError when Redis has no room; UnavailableError.
        """
        names = [secrets.token_hex(16) for _ in frames]
        if (user := self._user("write")) is not None:
            pipe = user.client.pipeline(transaction=False)
            for name, frame in zip(names, frames, strict=True):
                pipe.psetex(user.prefix + name, FRAME_TTL_MS, frame)
            try:
                pipe.execute()
            except OutOfMemoryError:
                raise FullError("Redis has no room for the frames of a push") from None
            except RedisError as error:
                self._leave(error)
            else:
                return names
        for name, frame in zip(names, frames, strict=True):
            self._peer.call("PUT", f"/frames/{name}", body=frame, full_s=0.0)
        return names

    def get(self, group_ids: Sequence[str], num_bytes: int) -> list[bytes | None]:
        """The frames of stored groups, which have so many bytes, in order; None for what is not there.

        Raises: UnavailableError.
        """
        if (user := self._user("read")) is not None:
            frames: list[bytes | None] = []
            number = max(1, AT_ONCE_BYTES * len(group_ids) // max(1, num_bytes))
            try:
                for part in in_parts([user.prefix + name for name in group_ids], number) if group_ids else ():
                    frames += user.client.mget(part)
            except RedisError as error:
                self._leave(error)
            else:
                return frames
        return [self._get_by_http(group_id) for group_id in group_ids]

    def _get_by_http(self, group_id: str) -> bytes | None:
        try:
            return self._peer.call("GET", f"/frames/{quoted(group_id)}").body
        except ContractError:  # the service does not hold it
            return None

    def _user(self, right: Literal["write", "read"]) -> _Redis | None:
        """Redis, as the user that may do this; None: by HTTP. The one place that decides. Raises: UnavailableError."""
        with self._lock:
            if self._pid != os.getpid():
                self._users, self._pid = {}, os.getpid()
            if right not in self._users and self._direct == "auto" and time.monotonic() >= self._ask_at:
                self._ask_at = time.monotonic() + ASK_AGAIN_S
                access = self._peer.call("GET", "/frame-access").json()
                for name in ("write", "read"):
                    if login := access[name]:
                        self._users[name] = _Redis(self._opened(access["url"], login), login["prefix"])
            return self._users.get(right)

    def _opened(self, url: str, login: dict[str, str]) -> Any:
        return redis.Redis.from_url(
            url,
            username=login["user"],
            password=login["password"],
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            socket_timeout=self._timeout_s,
            socket_read_size=READ_BYTES,
            retry=Retry(NoBackoff(), 0),
        )

    def _leave(self, error: RedisError) -> None:
        """By HTTP for a while: Redis is away, cannot be opened from here, or has forgotten its users."""
        # redis-py repeats the whole command, frames included, before what Redis said.
        text = str(error).rpartition(" caused error: ")[2][:160]
        log.info("frames go through the buffer service: its Redis cannot be used from here: %s", text)
        with self._lock:
            self._users = {}
            self._ask_at = time.monotonic() + ASK_AGAIN_S
