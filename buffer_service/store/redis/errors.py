"""What Redis says, in the words of `bapo.core.errors`: which calls are made again, and which are not."""

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
RESTORING = "a restore of the buffer is under way or was cut off: restore the snapshot again"
OVERTAKEN = "another restore has begun: it replaces what this one would have brought"


NO_WRITES_NOW = (ReadOnlyError, ClusterDownError, TryAgainError)
"""Of redis-py, which takes the word READONLY, MASTERDOWN, CLUSTERDOWN or TRYAGAIN off the text of these."""


BEFORE_7 = "Error running script"
"""How Redis 6.2 begins what it says of an error in a script; `: -` and the words of the command's error end it."""


class RestoringError(UnavailableError):
    """A restore is under way or was cut off: what is there is not whole. Callers of the service see its parent."""


def unwrapped(error: RedisError) -> RedisError:
    """The error of a command inside a script, as newer servers give it to the caller."""
    before, found, said = str(error).rpartition(": -")
    if not found or not before.startswith(BEFORE_7):
        return error
    named_anew: RedisError = BaseParser.parse_error(said.strip())  # type: ignore[no-untyped-call]
    return named_anew


def named(error: RedisError, where: str, *, was_let_in: bool = False, password_file: Path | None = None) -> BapoError:
    """What a call of the Redis at this address ended with. Messages never repeat arguments: they may be frames.

    Args:
        was_let_in: it has taken our password before, so that it was changed there, or is not all there yet.
        password_file: read at each connection.
    """
    # redis-py puts the whole command, frames included, before what Redis said in a pipeline.
    text = str(error).rpartition(" caused error: ")[2][:MAX_ERROR_CHARS]
    if isinstance(error, AuthenticationError | NoPermissionError):
        return _no_right(error, text, where, was_let_in=was_let_in, password_file=password_file)
    if isinstance(error, AskError):
        return UnavailableError(f"Redis at {where} is a node of a Cluster now, and what we need is elsewhere: {text}")
    if isinstance(error, InvalidResponse):  # a gateway, for example, while the way to Redis is cut
        return UnavailableError(f"what answers at {where} does not speak Redis' protocol: {text}")
    if isinstance(error, ConnectionError | TimeoutError):
        return UnavailableError(f"Redis at {where} does not answer: {text}")
    if isinstance(error, WatchError):  # of what restores watch alone
        return UnavailableError(OVERTAKEN)
    if isinstance(error, OutOfMemoryError) or text.startswith("OOM"):
        return FullError(
            f"Redis at {where} is full: groups are taken again when the learner has consumed some; "
            "raise buffer.max_memory_mb (or its maxmemory) if this stays so"
        )
    if text.startswith("MISCONF"):
        return disk_refuses(where, text)
    if (found := _our_own_word(text, where)) is not None:
        return found
    if isinstance(error, NO_WRITES_NOW) or text.startswith("BUSY "):
        return UnavailableError(f"Redis at {where} takes no writes now: {text}")
    return BapoError(f"Redis at {where} refused a command of the buffer service: {text}")


def other_format(where: str, found: str) -> ConfigError:
    """What is stored for this run has another format number."""
    return ConfigError(
        f"Redis at {where} holds this run in format {found or '1'}, and this version of BAPO reads format {FORMAT}: "
        "continue with the version that wrote it, or start another run"
    )


def _our_own_word(text: str, where: str) -> BapoError | None:
    """What our scripts refuse."""
    if text.startswith("FORMAT "):
        return other_format(where, text.split()[1])
    if "RESTORING" in text:
        return RestoringError(RESTORING)
    if text.startswith("LATE"):
        return UnavailableError(f"Redis at {where} was asked longer ago than the caller waits: retry")
    return None


def _no_right(error: RedisError, text: str, where: str, *, was_let_in: bool, password_file: Path | None) -> BapoError:
    """Of what Redis had allowed before, all callers wait: rights are changed one after the other."""
    if isinstance(error, NoPermissionError):
        kind = UnavailableError if was_let_in else BapoError
        return kind(f"Redis at {where} does not allow the user of the buffer service what it needs: {text}")
    if was_let_in:
        instead = f"write the new one to {password_file}" if password_file else "start the buffer service again with it"
        return UnavailableError(
            f"Redis at {where} refuses the password that it has taken before: set it there again, or {instead}: {text}"
        )
    return ConfigError(
        f"Redis at {where} refuses the password of buffer.redis_url, which comes from "
        f"BAPO_REDIS_PASSWORD_FILE, BAPO_REDIS_PASSWORD or BAPO_REDIS_URL: {text}"
    )
