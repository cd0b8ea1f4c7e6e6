"""Translation of Redis errors to `bapo.core.errors`, which decides what is retried."""

from __future__ import annotations

from pathlib import Path

from redis._parsers.base import BaseParser
from redis.exceptions import (
    AskError,
    AuthenticationError,
    ClusterDownError,
    ConnectionError,
    InvalidResponse,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    TimeoutError,
    TryAgainError,
    WatchError,
)

from bapo.core.errors import BapoError, ConfigError, FullError, UnavailableError
from buffer_service.store.redis.durability import disk_refuses
from buffer_service.store.redis.keys import FORMAT

MAX_ERROR_CHARS = 160
RESTORING = "a restore of the buffer is in progress or was interrupted: restore the snapshot again"
OVERTAKEN = "another restore has started and supersedes this one"


NO_WRITES_NOW = (ReadOnlyError, ClusterDownError, TryAgainError)
"""redis-py strips the error code (READONLY, MASTERDOWN, CLUSTERDOWN or TRYAGAIN) from the text of these."""


BEFORE_7 = "Error running script"
"""Prefix of script errors in Redis 6.2; the error of the command follows after `: -`."""


class RestoringError(UnavailableError):
    """A restore is in progress or was interrupted: the state is incomplete. Callers of the service see the parent."""


def unwrapped(error: RedisError) -> RedisError:
    """The error of a command inside a script, as newer servers report it."""
    before, found, said = str(error).rpartition(": -")
    if not found or not before.startswith(BEFORE_7):
        return error
    parsed: RedisError = BaseParser.parse_error(said.strip())  # type: ignore[no-untyped-call]
    return parsed


def named(error: RedisError, where: str, *, was_let_in: bool = False, password_file: Path | None = None) -> BapoError:
    """Translate an error of the Redis at this address. Messages never contain arguments: they may be frames.

    Args:
        was_let_in: it accepted the password before, so the password was changed, or the user is being created.
        password_file: read at each connection.
    """
    # redis-py prefixes pipeline errors with the whole command, including frames.
    text = str(error).rpartition(" caused error: ")[2][:MAX_ERROR_CHARS]
    if isinstance(error, AuthenticationError | NoPermissionError):
        return _denied(error, text, where, was_let_in=was_let_in, password_file=password_file)
    if isinstance(error, AskError):
        return UnavailableError(f"Redis at {where} is now a Cluster node that does not serve this run's keys: {text}")
    if isinstance(error, InvalidResponse):  # for example a gateway while Redis is unreachable
        return UnavailableError(f"the server at {where} does not speak the Redis protocol: {text}")
    if isinstance(error, ConnectionError | TimeoutError):
        return UnavailableError(f"Redis at {where} does not respond: {text}")
    if isinstance(error, WatchError):  # only restores use WATCH
        return UnavailableError(OVERTAKEN)
    if isinstance(error, OutOfMemoryError) or text.startswith("OOM"):
        return FullError(
            f"Redis at {where} is full: groups are accepted again once the learner consumes some; "
            "raise buffer.max_memory_mb (or its maxmemory) if this persists"
        )
    if text.startswith("MISCONF"):
        return disk_refuses(where, text)
    if (found := _script_error(text, where)) is not None:
        return found
    if isinstance(error, NO_WRITES_NOW) or text.startswith("BUSY "):
        return UnavailableError(f"Redis at {where} rejects writes at the moment: {text}")
    return BapoError(f"Redis at {where} rejected a command of the buffer service: {text}")


def other_format(where: str, found: str) -> ConfigError:
    """The error for a run stored in another format."""
    return ConfigError(
        f"Redis at {where} has this run in format {found or '1'}, but this version of BAPO reads format {FORMAT}: "
        "use the version that wrote it, or start a new run"
    )


def _script_error(text: str, where: str) -> BapoError | None:
    """Translate the errors returned by BAPO's Lua scripts."""
    if text.startswith("FORMAT "):
        return other_format(where, text.split()[1])
    if "RESTORING" in text:
        return RestoringError(RESTORING)
    if text.startswith("LATE"):
        return UnavailableError(f"Redis at {where} received the command after its deadline: retry")
    return None


def _denied(error: RedisError, text: str, where: str, *, was_let_in: bool, password_file: Path | None) -> BapoError:
    """Permission errors. If Redis allowed access before, callers retry: its users may be changing right now."""
    if isinstance(error, NoPermissionError):
        kind = UnavailableError if was_let_in else BapoError
        return kind(f"Redis at {where} denies permissions that the buffer service needs: {text}")
    if was_let_in:
        instead = f"write the new one to {password_file}" if password_file else "restart the buffer service with it"
        return UnavailableError(
            f"Redis at {where} rejects a password that it accepted before: set it there again, or {instead}: {text}"
        )
    return ConfigError(
        f"Redis at {where} rejects the password of buffer.redis_url, which comes from "
        f"BAPO_REDIS_PASSWORD_FILE, BAPO_REDIS_PASSWORD or BAPO_REDIS_URL: {text}"
    )
