"""What Redis says, in the words of our errors: which calls are made again."""

from __future__ import annotations

import pytest
from redis._parsers.base import BaseParser
from redis.exceptions import InvalidResponse, ResponseError

from bapo.core.errors import BapoError, FullError, UnavailableError
from buffer_service.store.redis.connection import RedisLink


def named(error: Exception) -> BapoError:
    with pytest.raises(BapoError) as found, RedisLink("redis://127.0.0.1:1/0").errors_named():
        raise error
    return found.value


@pytest.mark.parametrize(
    "said",
    [
        "LOADING Redis is loading the dataset in memory",
        "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
        "READONLY You can't write against a read only replica.",
        "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
        "CLUSTERDOWN The cluster is down",
        "TRYAGAIN Multiple keys request during rehashing of slot",
        "ERR max number of clients reached",
        "ERR RESTORING script: f_1, on @user_script:3.",
    ],
)
def test_what_passes_is_asked_again(said: str) -> None:
    # By redis-py's own parser, which takes the first word of some of these away.
    assert isinstance(named(BaseParser.parse_error(said)), UnavailableError)


def test_what_does_not_speak_the_protocol_is_away() -> None:
    assert type(named(InvalidResponse("Redis answered MGET with b'HTTP/1.1 502'"))) is UnavailableError


def test_a_full_redis_is_told_apart_and_an_unknown_error_is_never_repeated() -> None:
    assert type(named(ResponseError("OOM command not allowed when used memory > 'maxmemory'."))) is FullError
    assert type(named(ResponseError("WRONGTYPE Operation against a key"))) is BapoError
