"""The two users of Redis that clients of a run may be: one that writes new frames, one that reads stored ones.

    bapo-RUN-write   PSETEX of incoming:*   a frame of a worker, which expires unless a push names it
    bapo-RUN-read    MGET of group:*        the frames of a batch, for the learner

Both are made whenever they are asked for, because a Redis that was started again has forgotten its users. Their
password is kept with the run, so that all its services say the same. Redis before version 7 has no rights on keys for
reading or writing alone, and a managed one may make no users: there, all frames go through the service.
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
"""Which use of a key is allowed; Redis before version 7 knows no such words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameLogin:
    """A user of Redis that may do one thing."""

    user: str
    password: str
    prefix: str
    """Of the keys that it may touch."""


class FrameAccess:
    """Make the two users of one run."""

    def __init__(self, link: RedisLink, keys: Keys, run: str) -> None:
        self.url = link.where
        """Without a password, and without options: a Redis that needs them is not reached by clients."""
        self._link, self._keys, self._run = link, keys, run

    def writer(self) -> FrameLogin | None:
        """For workers; None: Redis makes no such user. Raises: UnavailableError."""
        return self._login("write", self._keys.incoming(""), WRITE, "+psetex")

    def reader(self) -> FrameLogin | None:
        """For learners; None: Redis makes no such user. Raises: UnavailableError."""
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
                if str(error).startswith("BUSY "):  # with a script, for a while
                    raise
                log.info("frames go through this service: Redis at %s makes no user for them: %s", self.url, error)
                return None
        return FrameLogin(user=user, password=password, prefix=prefix)
