"""A unit test computes: it is refused processes, sockets and sleeps, and leaves no process group of torch behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
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


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """One rank in bfloat16 makes a process group of its own; the next test may need another."""
    yield
    dist = sys.modules.get("torch.distributed")  # many tests run without torch
    if dist is not None and dist.is_initialized():
        dist.destroy_process_group()


def refuse(call: str) -> Callable[..., NoReturn]:
    """A stand-in that fails the test."""

    def refused(*_args: Any, **_kwargs: Any) -> NoReturn:
        pytest.fail(f"{call} in a unit test: it belongs to tests/contract or tests/process")

    return refused
