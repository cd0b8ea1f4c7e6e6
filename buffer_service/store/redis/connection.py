"""One Redis: redis-py's clients and our scripts, and its errors in the words of `bapo.core.errors`.

Redis is not asked twice on its own: callers repeat whole use cases, which are idempotent, and single scripts are not
all.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.client import Pipeline
from redis.exceptions import NoScriptError, ReadOnlyError, RedisError, ResponseError
from redis.retry import Retry

from bapo.core.errors import ConfigError
from bapo.runtime.auth.redis_password import read_password
from buffer_service.store.redis.durability import aof_state_of, until_written
from buffer_service.store.redis.errors import named, unwrapped
from buffer_service.store.redis.keys import FORMAT, INDEX

log = logging.getLogger(__name__)

Arg = str | bytes | int | float | memoryview

CONNECT_TIMEOUT_S = 3.0
"""Also for what is said at the beginning of a connection: while Redis hangs, calls give their threads back soon."""
ANSWER_TIMEOUT_S = 20.0
"""Less than our callers wait for us: they hear that it is Redis that hangs."""
SOON_S = 1.5
"""Longest silence of Redis for who only asks whether it is there."""
OFF_S = 1.0
"""Pause before a Redis without an append-only file is asked for one again."""
READ_BYTES = 1 << 20
"""One recv: frames are large."""
MAX_CONNECTIONS = 1 << 16
"""Not bounded here: those in use are bounded by the number of threads."""
SURVIVES = frozenset(
    {
        "enqueue",
        "push",
        "replace_stale",
        "commit_assembly",
        "commit",
        "resume",
        "report",
        "drop_group",
        "drop_request",
        "edit_tables",
        "bad_frame",
    }
)
"""Scripts whose effect callers rely on once they are acknowledged. A lost lease, failure or release costs time."""


class RedisLink:
    """One Redis, shared by threads. Raises only errors of the tree."""

    def __init__(
        self, url: str, *, on_error: Callable[[], None] = lambda: None, password_file: Path | None = None
    ) -> None:
        """
        Args:
            on_error: called for every call that failed (a metric).
            password_file: is read again for each connection, instead of the URL's password.
        Raises: ConfigError for a malformed URL.
        """
        self.where = address(url)
        self._on_error, self._password_file = on_error, password_file
        try:
            self._pool = _pool(url, CONNECT_TIMEOUT_S, ANSWER_TIMEOUT_S, password_file)
            soon = _pool(url, SOON_S, SOON_S, password_file)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"buffer.redis_url {self.where!r} is not a Redis URL: {error}") from error
        # Any: redis-py's types do not know that replies are bytes here.
        self.client: Any = redis.Redis(connection_pool=self._pool)
        self.soon: Any = redis.Redis(connection_pool=soon)
        """The same for who must know soon: it gives up a Redis that says nothing for SOON_S."""
        self._scripts = {name: self._script(name) for name in _script_names()}
        self._was_let_in = False
        self._off_until = 0.0
        """Until then there is no append-only file to read, by the monotonic clock."""

    def _script(self, name: str) -> _Script:
        folder = files("buffer_service.store.redis") / "lua"
        keys = ", ".join(f"{key} = KEYS[{number}]" for number, key in enumerate(INDEX, 1))
        parts = [
            f"local K, NUM_INDEX, FORMAT = {{{keys}}}, {len(INDEX)}, '{FORMAT}'",
            *((folder / f"{part}.lua").read_text() for part in ("prelude", name)),
        ]
        return _Script(name, "\n".join(parts).encode())

    @contextmanager
    def errors_named(self) -> Iterator[None]:
        """Translate what Redis or the way to it does. Messages never repeat arguments: they may be frames."""
        try:
            yield
        except RedisError as wrapped:
            self._on_error()
            error = unwrapped(wrapped)
            if isinstance(error, ReadOnlyError):
                self._pool.disconnect(inuse_connections=False)  # the primary of that name may be another server by now
            raise named(error, self.where, was_let_in=self._was_let_in, password_file=self._password_file) from None

    def run(self, name: str, keys: Sequence[str], args: Sequence[Arg]) -> Any:
        """One script, loaded again when Redis has forgotten it.

        What must survive a killed Redis (SURVIVES) is in its append-only file when this returns.
        """
        script = self._scripts[name]
        with self.errors_named(), self.client.client() as one:
            try:
                reply = one.evalsha(script.sha, len(keys), *keys, *args)
            except NoScriptError:
                self._load(script)
                reply = one.evalsha(script.sha, len(keys), *keys, *args)
            if name in SURVIVES:
                self._until_written(one)
            return reply

    def _until_written(self, one: Any) -> None:
        """Return when all that Redis has answered on this connection, and so all before it, is in its append-only file.

        `one` has one connection, which is not opened again: a restarted Redis cannot answer on it.
        """
        if time.monotonic() < self._off_until:
            return
        first = aof_state_of(one.info("persistence"))
        if first.is_off:
            self._off_until = time.monotonic() + OFF_S
            return
        until_written(first, lambda: aof_state_of(one.info("persistence")), self.where)

    def execute(self, pipe: Pipeline) -> list[Any]:
        """A pipeline's replies. Raises its first error as Redis said it, without the command."""
        with self.errors_named():
            replies = pipe.execute(raise_on_error=False)
            _raise_first(replies)
        return replies

    def at_once(self, *commands: Sequence[Arg], written: bool = False) -> list[Any]:
        """Replies of commands between which Redis does nothing else: for reads, which a script passes on many times
        dearer.

        Args:
            written: return when all that the replies show is in the append-only file.
        Raises: UnavailableError; StorageError.
        """
        with self.errors_named(), self.client.client() as one:
            one.execute_command("MULTI")
            for parts in commands:
                one.execute_command(*parts)
            found: list[Any] = one.execute_command("EXEC")
            _raise_first(found)
            if written:
                self._until_written(one)
        return found

    def latest_ms(self) -> int:
        """When a command that is sent now is given up, by Redis' clock: an argument of scripts that set something back.

        One may come later, from a connection to Redis that was cut and restored, when its caller has had it done by
        another service. Raises: UnavailableError.
        """
        with self.errors_named():
            seconds, microseconds = self.client.time()
        return 1000 * int(seconds) + int(microseconds) // 1000 + int(1000 * ANSWER_TIMEOUT_S)

    def load_scripts(self) -> None:
        """All of them, so that no first call pays for it."""
        with self.errors_named():
            for script in self._scripts.values():
                self._load(script)
            self._was_let_in = True

    def _load(self, script: _Script) -> None:
        log.debug("loading script %s into Redis at %s", script.name, self.where)
        sha = self.client.script_load(script.source)
        if sha not in (script.sha, script.sha.encode()):
            raise ResponseError(f"script {script.name} has another digest on the server: {sha!r}")


def _pool(
    url: str, connect_timeout_s: float, answer_timeout_s: float, password_file: Path | None
) -> redis.ConnectionPool:
    """Raises: ValueError, TypeError for a malformed URL."""

    def begin(connection: Any) -> None:
        if password_file is not None:
            with suppress(ConfigError):  # it is being replaced: the password before it may still do
                connection.password = read_password(password_file)
        connection._sock.settimeout(connect_timeout_s)
        connection.on_connect()
        connection._sock.settimeout(answer_timeout_s)

    pool = redis.ConnectionPool.from_url(
        url,
        socket_connect_timeout=connect_timeout_s,
        socket_timeout=answer_timeout_s,
        socket_read_size=READ_BYTES,
        max_connections=MAX_CONNECTIONS,
        retry=Retry(NoBackoff(), 0),
        redis_connect_func=begin,
    )
    pool.connection_class(**pool.connection_kwargs)  # refuses an option of the URL that it does not know
    return pool


class _Script:
    """A Lua script and the digest under which Redis knows it."""

    def __init__(self, name: str, source: bytes) -> None:
        self.name, self.source = name, source
        self.sha = hashlib.sha1(source, usedforsecurity=False).hexdigest()


def _raise_first(replies: Sequence[Any]) -> None:
    for reply in replies:
        if isinstance(reply, RedisError):
            raise reply


def _script_names() -> list[str]:
    names = (entry.name for entry in (files("buffer_service.store.redis") / "lua").iterdir())
    return sorted(name.removesuffix(".lua") for name in names if name.endswith(".lua") and name != "prelude.lua")


def address(url: str) -> str:
    """For messages: without user, password and options; of any text."""
    scheme, separator, rest = url.partition("?")[0].partition("://")
    authority, slash, path = rest.partition("/")
    return f"{scheme}{separator}{authority.rpartition('@')[2]}{slash}{path}"
