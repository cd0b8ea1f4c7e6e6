"""`bapo doctor` asks a real Redis whether it survives a power failure."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from bapo.config.buffer import BufferConfig
from bapo.config.tree import Config
from services.launcher.doctor.checks import persistence
from tests.redis_server import RedisServer


def _config(url: str | None) -> Config:
    return Config(buffer=BufferConfig(redis_url=url))


@pytest.mark.parametrize(("aof", "status"), [(True, "ok"), (False, "warn")])
def test_a_redis_without_an_append_only_file_is_warned_of(tmp_path: Path, aof: bool, status: str) -> None:
    server = RedisServer(tmp_path, aof=aof).start()
    try:
        found = persistence(_config(server.url))
    finally:
        server.stop()
    assert found is not None
    assert (found.status, "append-only file" in found.detail) == (status, True)


def test_a_password_is_shown_and_a_missing_one_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = RedisServer(tmp_path, aof=True).start()
    try:
        with redis.Redis.from_url(server.url) as client:
            client.config_set("requirepass", "s3cret")
        without = persistence(_config(server.url))
        monkeypatch.setenv("BAPO_REDIS_PASSWORD", "s3cret")
        with_it = persistence(_config(server.url))
    finally:
        server.stop()
    assert without is not None
    assert with_it is not None
    assert (without.status, "NOAUTH" in without.detail) == ("warn", True)
    assert with_it.status == "ok"


def test_nothing_is_asked_where_there_is_nobody_to_ask() -> None:
    assert persistence(_config(None)) is None
    assert persistence(_config("rediss://example.org:6380/0")) is None


def test_a_redis_that_is_away_is_a_warning(tmp_path: Path) -> None:
    found = persistence(_config(f"unix://{tmp_path}/no.sock"))
    assert found is not None
    assert found.status == "warn"
