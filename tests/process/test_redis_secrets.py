"""The password of a Redis: never in a configuration or a listing of processes, never none on a network."""

from __future__ import annotations

from pathlib import Path

import pytest

from bapo.config.tree import Config
from bapo.runtime.auth.redis_password import (
    PASSWORD,
    PASSWORD_FILE,
    URL,
)
from bapo.runtime.run_directory.layout import RunDirectory
from services.launcher.processes import Starter


@pytest.fixture(autouse=True)
def nothing_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (URL, PASSWORD, PASSWORD_FILE):
        monkeypatch.delenv(name, raising=False)


def test_a_password_of_another_redis_is_not_shown_to_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PASSWORD_FILE, "/etc/another")
    starter = Starter(Config(), RunDirectory.create(tmp_path / "run"))
    embedded = starter.buffer("unix://:hunter2@/run/redis.sock")
    assert embedded.env[PASSWORD] == "hunter2"
    assert PASSWORD_FILE not in embedded.env
    assert embedded.argv[-2:] == ("--redis-timeout-s", "1800")  # a large append-only file takes its time
    named = starter.buffer("redis://127.0.0.1:6379/0")
    assert named.env[PASSWORD_FILE] == "/etc/another"
