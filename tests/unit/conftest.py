"""A unit test computes: a fixture refuses processes, sockets and sleeps."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable
from typing import Any, NoReturn

import pytest

FORBIDDEN = [
    (socket.socket, "connect"),
    (socket.socket, "connect_ex"),
    (socket.socket, "bind"),
    (subprocess.Popen, "__init__"),
    (os, "fork"),
    (time, "sleep"),
]


@pytest.fixture(autouse=True)
def only_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test that leaves its process or waits."""
    monkeypatch.setenv("BAPO_COMMIT", "unit-test")  # or git is asked for it
    for owner, name in FORBIDDEN:
        monkeypatch.setattr(owner, name, refuse(f"{owner.__name__}.{name}"))


def refuse(call: str) -> Callable[..., NoReturn]:
    """A stand-in that fails the test."""

    def refused(*_args: Any, **_kwargs: Any) -> NoReturn:
        pytest.fail(f"{call} in a unit test: it belongs to tests/contract or tests/process")

    return refused
