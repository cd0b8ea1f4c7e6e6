"""One Redis: connections and scripts, and its errors in the words of `bapo.errors`.

Blocking sockets in threads: the asyncio client costs four times more per byte on large values. Redis is not asked
twice on its own: callers repeat whole use cases, which are idempotent, and single scripts are not all.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.client import Pipeline
from redis.exceptions import (
    NoScriptError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.retry import Retry

from bapo.errors import ConfigError
from bapo.redis_secrets import read_password
from buffer_service.redis_aof import AofState, SharedLooks, aof_state_of, is_always, is_off, until_written
from buffer_service.redis_errors import named, unwrapped
from buffer_service.redis_idle import Connections, Held
from buffer_service.redis_keys import INDEX
from buffer_service.redis_sockets import Arg, Gathering, GatheringUnixConnection, connection_options
from buffer_service.resp import BulkReader, command, receiver, set_pieces
from buffer_service.steps import BLOCKS, Steps, finish

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 3.0
"""Also for what is said at the beginning of a connection: while Redis hangs, calls give their threads back soon."""
ANSWER_TIMEOUT_S = 20.0
"""Less than our callers wait for us: they hear that it is Redis that hangs."""
SOON_S = 1.5
"""Longest silence of Redis for who only asks whether it is there."""
OFF_S = 1.0
"""A Redis without an append-only file is not asked after it for so long."""
READ_BYTES = 1 << 20
"""One recv: frames are large."""
MOST_CONNECTIONS = 1 << 16
"""No bound of ours: what threads and pushes that wait hold at once is bounded by their number, and redis-py counts
those that `Connections` keeps idle as taken: at its own bound of 100 it would make no new one for good."""
MULTI, EXEC = command("MULTI"), command("EXEC")
INFO, FSYNC = command("INFO", "persistence"), command("CONFIG", "GET", "appendfsync")
TIME = command("TIME")
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
    }
)
"""Scripts whose effect somebody relies on once they are acknowledged. A lost lease, failure or release costs time."""


class RedisLink:
    """Connections to one Redis, shared by threads. Raises only errors of the tree."""

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
            pool = _pool(url, CONNECT_TIMEOUT_S, ANSWER_TIMEOUT_S, password_file)
            soon = _pool(url, SOON_S, SOON_S, password_file)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"buffer.redis_url {self.where!r} is not a Redis URL: {error}") from error
        # Any: redis-py's types do not know that replies are bytes here.
        self.client: Any = redis.Redis(connection_pool=pool)
        self.soon: Any = redis.Redis(connection_pool=soon)
        """The same for who must know soon: it gives up a Redis that says nothing for SOON_S."""
        self.connections = Connections(pool)
        self._scripts = {name: self._script(name) for name in _script_names()}
        self._looks = SharedLooks(lambda: finish(self._look()))
        self._was_let_in = False
        self._is_always = False
        """Redis wrote before it answered when the scripts were loaded: it is asked again with each answer."""
        self._off_until = 0.0
        """Until then there is no append-only file to look at, by the monotonic clock."""

    def _script(self, name: str) -> _Script:
        folder = files("buffer_service") / "lua"
        keys = ", ".join(f"{key} = KEYS[{number}]" for number, key in enumerate(INDEX, 1))
        parts = [
            f"local K, NUM_INDEX = {{{keys}}}, {len(INDEX)}",
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
                self.connections.drop_idle()  # the primary of that name may be another server by now
            raise named(error, self.where, was_let_in=self._was_let_in, password_file=self._password_file) from None

    def run(self, name: str, keys: Sequence[str], args: Sequence[Arg]) -> Any:
        """One script, loaded again when Redis has forgotten it.

        What must survive a killed Redis (SURVIVES) is in its append-only file when this returns.
        """
        return self.set_then_run({}, 0, name, keys, args)

    def set_then_run(
        self, values: Mapping[str, bytes | memoryview], ttl_ms: int, name: str, keys: Sequence[str], args: Sequence[Arg]
    ) -> Any:
        """SET values that expire, then one script, in one round trip. The script sees which of them are missing.

        Raises: UnavailableError when Redis is full.
        """
        return finish(self.setting_then_running(values, ttl_ms, name, keys, args))

    def setting_then_running(
        self,
        values: Mapping[str, bytes | memoryview],
        ttl_ms: int,
        name: str,
        keys: Sequence[str],
        args: Sequence[Arg],
        begun: tuple[Held | None, int] = (None, 0),
    ) -> Steps[Any]:
        """`set_then_run` in steps, on the connection of `begun`, where so many answers to earlier SETs are to come."""
        script = self._scripts[name]
        pieces: list[bytes | memoryview] = []
        for key, value in values.items():
            pieces += set_pieces(key, value, ttl_ms)
        survives = name in SURVIVES
        asks = survives and self._is_always
        looks = survives and not asks and time.monotonic() >= self._off_until
        pieces.append(command("EVALSHA", script.sha, len(keys), *keys, *args) + (FSYNC if asks else b""))
        held, unanswered = begun
        at = unanswered + len(values)
        with self.errors_named():
            held, replies = yield from self._exchanging(pieces, at + 1 + asks, held, behind=INFO if looks else b"")
            if isinstance(replies[at], NoScriptError):
                yield BLOCKS
                self._load(script)
                return self.run(name, keys, args)
            _raise_first(replies if looks else replies[: at + 1])
            if looks:
                if is_off(replies[-1]):
                    self._off_until = time.monotonic() + OFF_S
                yield from self._until_written(aof_state_of(replies[-1], held.server), held)
            elif asks and not is_always(replies[-1]):
                yield from self._until_written((yield from self._look()), held)
            return replies[at]

    def _until_written(self, first: AofState, held: Held) -> Steps[None]:
        return until_written(self._look, self._looks, self.where, first, held.server)

    def _look(self) -> Steps[AofState]:
        held, (reply,) = yield from self._exchanging([INFO], 1)
        _raise_first([reply])
        return aof_state_of(reply, held.server)

    def _exchanging(
        self, pieces: Sequence[bytes | memoryview], number: int, held: Held | None = None, behind: bytes = b""
    ) -> Steps[tuple[Held, list[Any]]]:
        """Send commands, and read so many replies; errors that Redis answers are among them. A command that is to be
        sent `behind` the answers has one more. The connection is told, and another's by then."""
        held = held or self.connections.take_idle()
        if held is None or not isinstance(held.connection, GatheringUnixConnection):
            yield BLOCKS  # to connect, or to send more than what TCP has room for
        held = held or self.connections.take()
        with self._connection(held) as connection:
            connection.send_packed_command(pieces)
            yield connection._sock.fileno()
            replies = _replies(connection, number)
            if behind:
                connection.send_packed_command([behind])
                yield connection._sock.fileno()
                replies += _replies(connection, 1)
            return held, replies

    def read_answers(self, held: Held, number: int) -> None:
        """To SETs that were sent before. Raises: UnavailableError; FullError."""
        with self.errors_named(), self._connection(held) as connection:
            _raise_first(_replies(connection, number))

    @contextmanager
    def _connection(self, held: Held | None = None) -> Iterator[Any]:
        """One connection for this thread; closed when anything goes wrong: replies may still be on their way."""
        held = held or self.connections.take()
        try:
            yield held.connection
        except BaseException:
            self.connections.drop(held)
            raise
        self.connections.give_back(held)

    @contextmanager
    def reading(self) -> Iterator[BulkStream]:
        """A connection on which values are asked for and read in place."""
        with self.errors_named(), self._connection() as connection:
            yield BulkStream(connection)

    def values(self, keys: Sequence[str]) -> list[memoryview | None]:
        """Of string keys, in order."""
        with self.reading() as stream:
            stream.ask(keys)
            return stream.read(len(keys))

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
        with self.errors_named():
            pieces = [MULTI, *(command(*parts) for parts in commands), EXEC, *([INFO] if written else [])]
            held, replies = finish(self._exchanging([b"".join(pieces)], len(pieces)))
            _raise_first(replies)
            found: list[Any] = replies[len(commands) + 1]
            _raise_first(found)
            if written:
                finish(self._until_written(aof_state_of(replies[-1], held.server), held))
        return found

    def latest_ms(self) -> int:
        """When a command that is sent now is given up, by Redis' clock: an argument of scripts that set something back.

        One may come later, from a way to Redis that was cut and mended, when its caller has had it done by another
        service. Raises: UnavailableError.
        """
        with self.errors_named():
            _, (found,) = finish(self._exchanging([TIME], 1))
            _raise_first([found])
        seconds, microseconds = found
        return 1000 * int(seconds) + int(microseconds) // 1000 + int(1000 * ANSWER_TIMEOUT_S)

    def load_scripts(self) -> None:
        """All of them, so that no first call pays for it."""
        with self.errors_named():
            for script in self._scripts.values():
                self._load(script)
            _, (setting,) = finish(self._exchanging([FSYNC], 1))
            self._is_always = is_always(setting)
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
        max_connections=MOST_CONNECTIONS,
        retry=Retry(NoBackoff(), 0),
        redis_connect_func=begin,
        **connection_options(url),
    )
    pool.connection_class(**pool.connection_kwargs)  # refuses an option of the URL that it does not know
    return pool


class _Script:
    """A Lua script and the digest under which Redis knows it."""

    def __init__(self, name: str, source: bytes) -> None:
        self.name, self.source = name, source
        self.sha = hashlib.sha1(source, usedforsecurity=False).hexdigest()


class BulkStream:
    """Asks for values and reads them; the next question may be sent before the last answer is read."""

    def __init__(self, connection: Any) -> None:
        if not connection._sock:
            connection.connect()
        self._connection = connection
        self._reader = BulkReader(receiver(connection._sock), connection._parser.parse_error)

    def ask(self, keys: Sequence[str]) -> None:
        """MGET."""
        self._connection.send_packed_command([command("MGET", *keys)])

    def read(self, number: int, *, expected_bytes: int = 0, reuse: bool = False) -> list[memoryview | None]:
        """See `BulkReader.read`."""
        return self._reader.read(number, expected_bytes=expected_bytes, reuse=reuse)


def _replies(connection: Any, number: int) -> list[Any]:
    if isinstance(connection, Gathering):
        return connection.read_replies(number)
    return [_reply(connection) for _ in range(number)]


def _reply(connection: Any) -> Any:
    try:
        return connection.read_response()
    except ResponseError as error:
        return error


def _raise_first(replies: Sequence[Any]) -> None:
    for reply in replies:
        if isinstance(reply, RedisError):
            raise reply


def _script_names() -> list[str]:
    names = (entry.name for entry in (files("buffer_service") / "lua").iterdir())
    return sorted(name.removesuffix(".lua") for name in names if name.endswith(".lua") and name != "prelude.lua")


def address(url: str) -> str:
    """For messages: without user, password and options; of any text."""
    scheme, separator, rest = url.partition("?")[0].partition("://")
    authority, slash, path = rest.partition("/")
    return f"{scheme}{separator}{authority.rpartition('@')[2]}{slash}{path}"
