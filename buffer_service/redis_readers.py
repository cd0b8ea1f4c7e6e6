"""A user of Redis that may read the frames of one run and nothing else, for a learner on the same machine.

Each service process has one, and a connection that bears its name. The kernel closes that, however the process ends, so
that the next service finds whose users nobody needs any more; no network is between that could cut off a living one.
"""

from __future__ import annotations

import logging
import re
import secrets
import threading
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

from redis.exceptions import ResponseError

from bapo.named_frames import NamedFrames
from buffer_service.redis_idle import Held
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
        self._user, self._password = f"bapo-reader-{run}-{secrets.token_hex(8)}", secrets.token_hex(32)
        self._readers = re.compile(f"bapo-reader-{re.escape(run)}-[0-9a-f]{{16}}")
        self._presence = _Presence(link, self._user)
        self._making = threading.Lock()

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
        with self._making:
            if time.monotonic() < self._sure_until and self._presence.is_there:
                return True
            rights = ["reset", "on", f">{self._password}", f"~{self._keys.group('*')}", "-@all", "+mget"]
            with self._link.errors_named():
                try:
                    if is_new := not self._presence.is_there:
                        self._presence.begin()  # before there is a user of this name, so that nobody removes it
                    self._link.client.execute_command("ACL", "SETUSER", self._user, *rights)
                except ResponseError as error:
                    if str(error).startswith("BUSY "):  # with a script, for a while
                        raise
                    log.info(
                        "learners read their batches through this service: Redis makes no user for them: %s", error
                    )
                    self._path = ""
                    return False
                if is_new:
                    self._remove_gone()
            self._sure_until = time.monotonic() + SURE_S
            return True

    def _remove_gone(self) -> None:
        """Users of processes of this run that were killed."""
        try:
            users = [user.decode() for user in self._link.client.execute_command("ACL", "USERS")]
            present = {client["name"] for client in self._link.client.client_list()}  # asked for behind the users
            gone = [user for user in users if self._readers.fullmatch(user) and user not in present]
            if gone:
                self._link.client.execute_command("ACL", "DELUSER", *gone)
        except ResponseError as error:
            log.info("Redis users of services that are gone stay until Redis ends: %s", error)


class _Presence:
    """A connection that bears a name as long as this process lives."""

    def __init__(self, link: RedisLink, name: str) -> None:
        self._link, self._name = link, name
        self._held: Held | None = None

    @property
    def is_there(self) -> bool:
        return self._held is not None and not self._held.has_news

    def begin(self) -> None:
        """Raises: RedisError."""
        if self._held is not None:
            self._link.connections.drop(self._held)
            self._held = None
        held = self._link.connections.take()
        try:
            held.connection.send_command("CLIENT", "SETNAME", self._name)
            held.connection.read_response()
        except BaseException:
            self._link.connections.drop(held)
            raise
        self._held = held
