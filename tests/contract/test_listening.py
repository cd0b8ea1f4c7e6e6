"""Where a service listens, and what the small server does with callers that do not wait for their answer."""

from __future__ import annotations

import argparse
import logging
import re
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import buffer_service.__main__ as buffer_main
import rollout_server.__main__ as rollout_main
from bapo.config.tree import Config
from bapo.core.errors import ConfigError
from bapo.runtime.metrics.server import Telemetry, serve_health
from bapo.runtime.process import Flags
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.transport.listen import listen
from services.launcher.doctor import checks
from tests.support.network import needs_ipv6
from tests.support.wait import wait_until

EXTRA = {"port": 0, "buffer_url": "http://127.0.0.1:9", "one_of_several": False, "redis_url": "redis://127.0.0.1:9/0"}


class ListenedError(Exception):
    """Stands for a service that has come so far."""


@pytest.mark.parametrize("service", [buffer_main, rollout_main], ids=["buffer_service", "rollout_server"])
@pytest.mark.parametrize(
    ("flag", "environment", "want"),
    [
        (None, None, "127.0.0.4"),
        (None, "127.0.0.3", "127.0.0.3"),
        (None, "", "127.0.0.4"),
        ("127.0.0.2", "127.0.0.3", "127.0.0.2"),
    ],
)
def test_a_service_listens_where_the_flag_the_environment_or_the_configuration_says(
    service: ModuleType,
    flag: str | None,
    environment: str | None,
    want: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def listen(host: str, port: int, **_: str) -> Any:
        raise ListenedError(host)

    monkeypatch.setattr(service, "listen", listen)
    if environment is None:
        monkeypatch.delenv("BAPO_HOST", raising=False)
    else:
        monkeypatch.setenv("BAPO_HOST", environment)
    config = Config.model_validate(
        {"rollout": {"engine": "scripted", "host": "127.0.0.4"}, "buffer": {"host": "127.0.0.4"}}
    )
    flags = Flags(config=config, run=RunDirectory(tmp_path), extra=argparse.Namespace(host=flag, **EXTRA))
    with pytest.raises(ListenedError) as listened:
        service.main(flags)
    assert str(listened.value) == want


def test_a_host_of_the_environment_that_others_reach_needs_tokens_as_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BAPO_HOST", "0.0.0.0")
    for name in ("BAPO_ACCEPTED_TOKENS", "BAPO_ACCEPTED_TOKENS_FILE"):
        monkeypatch.delenv(name, raising=False)
    config = Config.model_validate({"rollout": {"engine": "scripted"}})
    flags = Flags(config=config, run=RunDirectory(tmp_path), extra=argparse.Namespace(host=None, **EXTRA))
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0 without"):
        rollout_main.main(flags)


def test_health_of_the_small_services_is_on_the_host_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAPO_HOST", "127.0.0.3")
    port = serve_health(Telemetry(), 0, lambda: True)
    with urllib.request.urlopen(f"http://127.0.0.3:{port}/readyz", timeout=60) as answer:
        assert answer.read() == b"ready\n"
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=60)


@pytest.mark.parametrize(
    ("host", "caller"),
    [
        ("::1", "[::1]"),
        ("[::1]", "[::1]"),
        ("::ffff:127.0.0.1", "127.0.0.1"),
        ("localhost", "localhost"),
    ],
)
def test_health_of_the_small_services_is_on_an_address_of_ipv6(
    host: str, caller: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_ipv6()
    monkeypatch.setenv("BAPO_HOST", host)
    port = serve_health(Telemetry(), 0, lambda: True)
    with urllib.request.urlopen(f"http://{caller}:{port}/readyz", timeout=60) as answer:
        assert answer.read() == b"ready\n"


@pytest.mark.parametrize("host", ["::1", "::ffff:127.0.0.1"])
def test_a_taken_port_and_an_address_of_another_host_are_told_apart_in_ipv6(host: str) -> None:
    needs_ipv6()
    with listen(host, 0, what="it", key="it.port") as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=re.escape(f"[{host}]:{port}")) as taken:
            listen(host, port, what="it", key="it.port")
    with pytest.raises(ConfigError, match=re.escape("[2001:db8::1]:1")) as foreign:
        listen("2001:db8::1", 1, what="it", key="it.port")
    assert "stop the process" in str(taken.value)
    assert "stop the process" not in str(foreign.value)


def test_doctor_looks_for_a_taken_port_where_the_service_will_listen() -> None:
    needs_ipv6()
    with listen("::1", 0, what="it", key="it.port") as listener:
        port = listener.getsockname()[1]
        config = Config.model_validate({"buffer": {"host": "[::1]", "port": port}})
        assert [check.status for check in checks.ports(config, only="buffer_service")] == ["fail"]
        elsewhere = Config.model_validate({"buffer": {"port": port}})
        assert [check.status for check in checks.ports(elsewhere, only="buffer_service")] == ["ok"]


# -- callers of the small server


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
    wait_until(lambda: "disconnected" in caplog.text)
    assert [record.levelname for record in caplog.records if "disconnected" in record.message] == ["DEBUG"]
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
    assert "request for health or metrics from" in caplog.text
    assert "Traceback" not in capfd.readouterr().err


def test_callers_beyond_a_bound_are_closed_and_those_that_trickle_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bapo.runtime.metrics.server.MAX_CALLERS", 3)
    monkeypatch.setattr("bapo.runtime.metrics.server.LONGEST_CALL_S", 3.0)
    before = set(threading.enumerate())
    port = serve_health(Telemetry(), 0, lambda: True)
    with ExitStack() as open_until_the_end:
        callers = [open_until_the_end.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(5)]
        for caller in callers:
            caller.settimeout(60)
        assert [_closed(caller) for caller in callers[3:]] == [True, True]
        serving = [t for t in set(threading.enumerate()) - before if "process_request" in t.name]
        assert len(serving) <= 3
        began = time.monotonic()
        while not _closed(callers[0], trickle=b"G"):
            assert time.monotonic() - began < 30, "it trickles on"
        assert [_closed(caller) for caller in callers[1:3]] == [True, True]
        for thread in serving:  # a caller sees its end a moment before its thread gives the place back
            thread.join(60)
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


def test_answers_do_not_wait_for_the_callers_acknowledgement() -> None:
    """asyncio sets TCP_NODELAY only on sockets that name their protocol; without it answers in two parts take 40 ms."""
    with listen("127.0.0.1", 0, what="a server", key="x.port") as listener:
        assert listener.proto == socket.IPPROTO_TCP
