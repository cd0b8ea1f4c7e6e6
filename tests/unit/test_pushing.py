"""What a push that has to wait says, and how often."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from bapo import pushing
from bapo.errors import FullError
from bapo.pushing import push_all
from bapo.wire import pack_group
from tests.factories import make_group


class FullFirst:
    """A peer whose buffer has room for every second push."""

    def __init__(self) -> None:
        self.pushes = 0

    def call(self, method: str, path: str, **_: Any) -> Any:
        if path == "/room":
            return None
        self.pushes += 1
        if self.pushes % 2:
            raise FullError("the buffer is full: 3 fresh groups wait")
        return SimpleNamespace(json=lambda: json.loads('{"groups": {"g": "stored"}}'))


@pytest.mark.parametrize(("pause_s", "lines"), [(30.0, 1), (0.0, 3)])
def test_a_buffer_that_stays_full_is_said_once_in_a_while(
    pause_s: float, lines: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pushing, "SAID_S", pause_s)
    monkeypatch.setattr(pushing, "_waiting", pushing._Seldom())
    peer: Any = FullFirst()
    with caplog.at_level(logging.WARNING, "bapo.pushing"):
        fates = [push_all(peer, [pack_group(make_group())], full_s=1.0) for _ in range(3)]
    assert fates == [{"g": "stored"}] * 3
    assert [record.getMessage() for record in caplog.records] == [
        "a push waits: the buffer is full: 3 fresh groups wait"
    ] * lines
