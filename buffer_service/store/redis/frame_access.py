"""The two Redis users for clients of a run: one writes new frames, one reads stored ones.

    bapo-RUN-write   PSETEX of incoming:*   a frame of a worker, which expires unless a push references it
    bapo-RUN-read    MGET of group:*        the frames of a batch, for the learner

Both are created on every request, because a restarted Redis has lost its users. Their password is stored with the run,
so that all service instances return the same. Redis before version 7 has no read-only or write-only key permissions,
and managed services may not allow creating users; all frames then go through the service.
"""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass

from redis.exceptions import ResponseError

from buffer_service.store.redis.connection import RedisLink
from buffer_service.store.redis.keys import Keys

log = logging.getLogger(__name__)

WRITE, READ = "%W", "%R"
"""Key permissions; not supported by Redis before version 7."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameLogin:
    """A Redis user with a single permission."""

    user: str
    password: str
    prefix: str
    """Prefix of the keys it may access."""


class FrameAccess:
    """Creates the two users of one run."""

    def __init__(self, link: RedisLink, keys: Keys, run: str) -> None:
        self.url = link.where
        """URL without password and options; clients cannot reach a Redis that requires them."""
        self._link, self._keys, self._run = link, keys, run

    def writer(self) -> FrameLogin | None:
        """Login for workers; None if Redis cannot create the user. Raises: UnavailableError."""
        return self._login("write", self._keys.incoming(""), WRITE, "+psetex")

    def reader(self) -> FrameLogin | None:
        """Login for learners; None if Redis cannot create the user. Raises: UnavailableError."""
        return self._login("read", self._keys.group(""), READ, "+mget")

    def _login(self, right: str, prefix: str, access: str, command: str) -> FrameLogin | None:
        user = f"bapo-{self._run}-{right}"
        with self._link.errors_named():
            self._link.client.set(self._keys.access, secrets.token_hex(32), nx=True)
            password = self._link.client.get(self._keys.access).decode()
            rules = ["reset", "on", f">{password}", f"{access}~{prefix}*", "-@all", command]
            try:
                self._link.client.execute_command("ACL", "SETUSER", user, *rules)
            except ResponseError as error:
                if str(error).startswith("BUSY "):  # temporarily busy with a script
                    raise
                log.info("frames go through this service: Redis at %s cannot create a user: %s", self.url, error)
                return None
        return FrameLogin(user=user, password=password, prefix=prefix)
