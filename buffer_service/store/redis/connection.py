"""A connection to Redis: redis-py clients and Lua scripts, with errors translated to `bapo.core.errors`.

No automatic retries: callers retry whole use cases, which are idempotent; not all single scripts are.
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
"""Also applies to the handshake, so that calls release their threads soon while Redis hangs."""
ANSWER_TIMEOUT_S = 20.0
"""Less than the timeout of clients, so that they receive an error that identifies Redis."""
SOON_S = 1.5
"""Response timeout of health checks."""
OFF_S = 1.0
"""Interval for checking whether a Redis without an append-only file has one now."""
READ_BYTES = 1 << 20
"""One recv: frames are large."""
MAX_CONNECTIONS = 1 << 16
"""No effective limit: connections in use are bounded by the number of threads."""
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
        "append_journal",
    }
)
"""Scripts whose acknowledged effect must be durable. A lost lease, failure or release only costs time."""


class RedisLink:
    """One Redis, shared by threads. Raises only BapoErrors."""

    def __init__(
        self, url: str, *, on_error: Callable[[], None] = lambda: None, password_file: Path | None = None
    ) -> None:
        """
        Args:
            on_error: called for every failed call (for a metric).
            password_file: read for each connection; overrides the URL's password.
        Raises: ConfigError for a malformed URL.
        """
        self.where = address(url)
        self._on_error, self._password_file = on_error, password_file
        try:
            self._pool = _pool(url, CONNECT_TIMEOUT_S, ANSWER_TIMEOUT_S, password_file)
            soon = _pool(url, SOON_S, SOON_S, password_file)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"buffer.redis_url {self.where!r} is not a Redis URL: {error}") from error
        # Any: redis-py's types do not express that replies are bytes here.
        self.client: Any = redis.Redis(connection_pool=self._pool)
        self.soon: Any = redis.Redis(connection_pool=soon)
        """A client with timeout SOON_S, for health checks."""
        self._scripts = {name: self._script(name) for name in _script_names()}
        self._was_let_in = False
        self._off_until = 0.0
        """Monotonic time until which the append-only file is assumed to be off."""

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
        """Translate errors of Redis and of the network. Messages never contain arguments: they may be frames."""
        try:
            yield
        except RedisError as wrapped:
            self._on_error()
            error = unwrapped(wrapped)
            if isinstance(error, ReadOnlyError):
                self._pool.disconnect(inuse_connections=False)  # the host name may resolve to another primary by now
            raise named(error, self.where, was_let_in=self._was_let_in, password_file=self._password_file) from None

    def run(self, name: str, keys: Sequence[str], args: Sequence[Arg]) -> Any:
        """Run a script, reloading it if Redis has dropped it from its cache.

        Effects that must survive a crash of Redis (SURVIVES) are in its append-only file when this returns.
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
        """Wait until everything executed up to the last reply on this connection is in the append-only file.

        `one` has a single connection without reconnect: a restarted Redis cannot reply on it.
        """
        if time.monotonic() < self._off_until:
            return
        first = aof_state_of(one.info("persistence"))
        if first.is_off:
            self._off_until = time.monotonic() + OFF_S
            return
        until_written(first, lambda: aof_state_of(one.info("persistence")), self.where)

    def execute(self, pipe: Pipeline) -> list[Any]:
        """Execute a pipeline. Raises its first error, without the command."""
        with self.errors_named():
            replies = pipe.execute(raise_on_error=False)
            _raise_first(replies)
        return replies

    def at_once(self, *commands: Sequence[Arg], written: bool = False) -> list[Any]:
        """Replies of commands executed as one transaction. For reads: passing values through a script is much slower.

        Args:
            written: wait until everything that the replies show is in the append-only file.
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
        """Deadline of a command sent now, by Redis' clock; an argument of scripts that reset state.

        After a network stall such a command may arrive late, when its caller has already succeeded through another
        instance. Raises: UnavailableError.
        """
        with self.errors_named():
            seconds, microseconds = self.client.time()
        return 1000 * int(seconds) + int(microseconds) // 1000 + int(1000 * ANSWER_TIMEOUT_S)

    def load_scripts(self) -> None:
        """Load all scripts, so that no first call has to."""
        with self.errors_named():
            for script in self._scripts.values():
                self._load(script)
            self._was_let_in = True

    def _load(self, script: _Script) -> None:
        log.debug("loading script %s into Redis at %s", script.name, self.where)
        sha = self.client.script_load(script.source)
        if sha not in (script.sha, script.sha.encode()):
            raise ResponseError(f"script {script.name} has a different digest on the server: {sha!r}")


def _pool(
    url: str, connect_timeout_s: float, answer_timeout_s: float, password_file: Path | None
) -> redis.ConnectionPool:
    """Raises: ValueError, TypeError for a malformed URL."""

    def begin(connection: Any) -> None:
        if password_file is not None:
            with suppress(ConfigError):  # the file is being replaced: the previous password may still be valid
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
    pool.connection_class(**pool.connection_kwargs)  # raises for unknown URL options
    return pool


class _Script:
    """A Lua script and its SHA-1 digest in Redis."""

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
    """The URL without user, password and options, for messages; accepts any text."""
    scheme, separator, rest = url.partition("?")[0].partition("://")
    authority, slash, path = rest.partition("/")
    return f"{scheme}{separator}{authority.rpartition('@')[2]}{slash}{path}"
