"""The small server of processes without an API: what it does with callers that do not wait for their answer."""

from __future__ import annotations

import logging
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
from contextlib import ExitStack

import pytest

from bapo.runtime.metrics.server import Telemetry, serve_health
from tests.support.wait import wait_until

HANG_UP = struct.pack("ii", 1, 0)
"""SO_LINGER: close by a reset, so that the next write of the other side fails at once."""


def test_a_caller_that_hangs_up_before_its_answer_leaves_no_traceback(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG, logger="bapo.runtime.metrics.server")
    asked, gone = threading.Event(), threading.Event()

    def is_ready() -> bool:
        asked.set()
        assert gone.wait(60)
        return True

    port = serve_health(Telemetry(), 0, is_ready)
    with socket.create_connection(("127.0.0.1", port)) as caller:
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, HANG_UP)
        caller.sendall(b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n")
        assert asked.wait(60)
    gone.set()
    wait_until(lambda: "hung up" in caplog.text)
    assert [record.levelname for record in caplog.records if "hung up" in record.message] == ["DEBUG"]
    assert "Traceback" not in caplog.text + capfd.readouterr().err
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=60) as answer:
        assert answer.read() == b"ok\n"


def test_what_goes_wrong_in_an_answer_is_in_the_log_and_not_only_on_the_screen(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    def is_ready() -> bool:
        raise ArithmeticError("readiness cannot be told")

    port = serve_health(Telemetry(), 0, is_ready)
    with pytest.raises((urllib.error.URLError, ConnectionError)):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=60)
    wait_until(lambda: "readiness cannot be told" in caplog.text)
    assert "for health or metrics failed" in caplog.text
    assert "Traceback" not in capfd.readouterr().err


def test_callers_beyond_a_bound_are_closed_and_those_that_trickle_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bapo.runtime.metrics.server.MOST_CALLERS", 3)
    monkeypatch.setattr("bapo.runtime.metrics.server.LONGEST_CALL_S", 3.0)
    threads = threading.active_count()
    port = serve_health(Telemetry(), 0, lambda: True)
    with ExitStack() as open_until_the_end:
        callers = [open_until_the_end.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(5)]
        for caller in callers:
            caller.settimeout(60)
        assert [_closed(caller) for caller in callers[3:]] == [True, True]
        assert threading.active_count() <= threads + 1 + 3
        began = time.monotonic()
        while not _closed(callers[0], trickle=b"G"):
            assert time.monotonic() - began < 30, "it trickles on"
        assert [_closed(caller) for caller in callers[1:3]] == [True, True]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=60) as answer:
        assert answer.read() == b"ok\n"


def _closed(caller: socket.socket, *, trickle: bytes = b"") -> bool:
    """Whether the server has ended a connection: waits for it, or only looks when something is sent."""
    try:
        if trickle:
            caller.sendall(trickle)
            caller.settimeout(0.2)
        return caller.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True
