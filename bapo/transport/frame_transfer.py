"""Frames to and from the buffer: directly to its Redis, or through the service where Redis is not reachable.

    PSETEX incoming:<random>  or  PUT /frames/<random>       a worker, before it pushes the headers of the groups
    MGET group:<id>, ...      or  GET /frames/<id>           the learner, for the groups of its batch

The service decides whether Redis may be used, and as which user (`GET /frame-access`, by `buffer.direct`); after an
error of Redis, frames go through the service for ASK_AGAIN_S.
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
from bapo.transport.service_client import ServiceClient, quoted

log = logging.getLogger(__name__)

FRAME_TTL_MS = 600_000
"""Expiry of a frame that no push references."""
ASK_AGAIN_S = 10.0
CONNECT_TIMEOUT_S = 3.0
AT_ONCE_BYTES = 4 << 20
"""Approximate size of one MGET: hiredis buffers a whole answer before it is parsed."""
READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _Redis:
    client: Any
    prefix: str
    """Prefix of the keys that this user may access."""


class FrameTransfer:
    """Transfer frames to and from one buffer service. Thread-safe; a forked process opens its own connections."""

    def __init__(self, peer: ServiceClient, *, timeout_s: float, direct: Literal["auto", "off"]) -> None:
        """
        Args:
            timeout_s: longest silence of Redis.
            direct: auto: as the service allows; off: all frames by HTTP.
        """
        self._service, self._timeout_s, self._direct = peer, timeout_s, direct
        self._lock = threading.Lock()
        self._users: dict[str, _Redis] = {}
        self._ask_at = 0.0
        self._pid = os.getpid()

    def close(self) -> None:
        for user in self._users.values():
            user.client.close()

    def put(self, frames: Sequence[bytes | memoryview]) -> list[str]:
        """Write frames under new names, which a push may use for FRAME_TTL_MS.

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
                raise FullError("Redis is full, cannot store frames of a push; raise buffer.max_memory_mb") from None
            except RedisError as error:
                self._leave(error)
            else:
                return names
        for name, frame in zip(names, frames, strict=True):
            self._service.call("PUT", f"/frames/{name}", body=frame, full_s=0.0)
        return names

    def get(self, group_ids: Sequence[str], num_bytes: int) -> list[bytes | None]:
        """The frames of stored groups, in order; None for one that is missing. Raises: UnavailableError.

        Args:
            num_bytes: of all these frames.
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
            return self._service.call("GET", f"/frames/{quoted(group_id)}").body
        except ContractError:  # the service does not hold it
            return None

    def _user(self, right: Literal["write", "read"]) -> _Redis | None:
        """Redis, as the user with this right; None: use HTTP. Raises: UnavailableError."""
        with self._lock:
            if self._pid != os.getpid():
                self._users, self._pid = {}, os.getpid()
            if right not in self._users and self._direct == "auto" and time.monotonic() >= self._ask_at:
                self._ask_at = time.monotonic() + ASK_AGAIN_S
                access = self._service.call("GET", "/frame-access").json()
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
        """Use HTTP for a while: Redis is down, not reachable from here, or has lost its users in a restart."""
        # redis-py puts the whole command, frames included, before the message of Redis.
        text = str(error).rpartition(" caused error: ")[2][:160]
        log.info("transferring frames through the buffer service, cannot use its Redis directly: %s", text)
        with self._lock:
            self._users = {}
            self._ask_at = time.monotonic() + ASK_AGAIN_S
