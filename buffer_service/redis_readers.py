"""A user of Redis that may read the frames of one run and nothing else, for a learner on the same machine."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

from redis.exceptions import ResponseError

from bapo.named_frames import NamedFrames
from buffer_service.redis_keys import Keys
from buffer_service.redis_link import RedisLink

log = logging.getLogger(__name__)

SURE_S = 5.0
"""How long a user that was made is taken for granted. A learner that finds it gone asks for the whole batch."""


class FrameReaders:
    """Names frames, with the user that may read them."""

    def __init__(self, link: RedisLink, keys: Keys, run: str) -> None:
        parts = urlsplit(link.where)
        self._path = parts.path if parts.scheme == "unix" else ""
        """Empty: nothing is named. A Redis behind a port may be reached from elsewhere than we think."""
        self._link, self._keys = link, keys
        self._sure_until = 0.0
        # A user per process: replicas of the service know nothing of each other's passwords.
        self._user, self._password = f"bapo-reader-{run}-{secrets.token_hex(4)}", secrets.token_hex(32)

    def named(self, start: bytes, group_ids: Sequence[str], num_bytes: int) -> NamedFrames | None:
        """A batch without its frames; None where the learner cannot read them itself. Raises: UnavailableError."""
        if not self._path or not self._user_exists():
            return None
        return NamedFrames(
            path=self._path,
            user=self._user,
            password=self._password,
            start=start,
            keys=tuple(map(self._keys.group, group_ids)),
            num_bytes=num_bytes,
        )

    def _user_exists(self) -> bool:
        """Made anew now and then: a Redis that was started again has forgotten it. A second time changes nothing."""
        if time.monotonic() < self._sure_until:
            return True
        rights = ["reset", "on", f">{self._password}", f"~{self._keys.group('*')}", "-@all", "+mget"]
        with self._link.errors_named():
            try:
                self._link.client.execute_command("ACL", "SETUSER", self._user, *rights)
            except ResponseError as error:
                if str(error).startswith("BUSY "):  # with a script, for a while
                    raise
                log.info("learners read their batches through this service: Redis makes no user for them: %s", error)
                self._path = ""
                return False
        self._sure_until = time.monotonic() + SURE_S
        return True
