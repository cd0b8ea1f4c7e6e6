"""The small server of processes without an API: what it does with callers that do not wait for their answer."""

from __future__ import annotations

import logging
import socket
import struct
import threading
import urllib.error
import urllib.request

import pytest

from bapo.telemetry import Telemetry, serve_health
from tests.patience import wait_until

HANG_UP = struct.pack("ii", 1, 0)
"""SO_LINGER: close by a reset, so that the next write of the other side fails at once."""


def test_a_caller_that_hangs_up_before_its_answer_leaves_no_traceback(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG, logger="bapo.telemetry")
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
