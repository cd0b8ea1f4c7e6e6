"""Small parts of the buffer service: why a batch waits, metrics, sending in pieces."""

from __future__ import annotations

import socket
import threading

import pytest

from bapo.core.errors import UnavailableError
from buffer_service.__main__ import wait_for
from buffer_service.state import Health
from buffer_service.store.redis.connection import RedisLink

# -- when a write has left Redis


def test_a_redis_that_goes_away_while_the_service_starts_is_waited_for() -> None:
    """Found by chaos: it answered, was killed, and the scripts could not be loaded."""
    answers = iter([UnavailableError("loading"), UnavailableError("gone again"), None])

    def attempt() -> Health:
        error = next(answers)
        if error:
            raise error
        return Health(where="here", persistent=True, detail="")

    wait_for(attempt, timeout_s=10.0)
    assert next(answers, "none left") == "none left"
    with pytest.raises(UnavailableError, match="never"):
        wait_for(lambda: (_ for _ in ()).throw(UnavailableError("never")), timeout_s=0.0)


def test_a_start_that_waits_for_redis_says_so_once_and_not_again_at_each_try(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tries = iter([UnavailableError("Redis is still loading its data")] * 3)

    def attempt() -> Health:
        for error in tries:
            raise error
        return Health(where="here", persistent=True, detail="")

    wait_for(attempt, timeout_s=100.0)
    (said,) = (record.getMessage() for record in caplog.records)
    assert said == "waits up to 100 s more before it listens: Redis is still loading its data"


def test_a_gateway_that_answers_in_the_place_of_redis_is_waited_out() -> None:
    """Found by a cable that was pulled: packets then went to another host, which answered in HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        link = RedisLink(f"redis://127.0.0.1:{server.getsockname()[1]}/0?protocol=2")
        with pytest.raises(UnavailableError, match="does not speak Redis' protocol"):
            link.run("status", [], [])
        thread.join(60)
