"""`bapo doctor` asks a real Redis whether it survives a power failure."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from bapo.config.buffer import BufferConfig
from bapo.config.tree import Config
from services.launcher.doctor.checks import redis_answer, redis_persistence
from tests.support.redis_server import RedisServer


def _config(url: str | None) -> Config:
    return Config(buffer=BufferConfig(redis_url=url))


@pytest.mark.parametrize(("aof", "status"), [(True, "ok"), (False, "warn")])
def test_a_redis_without_an_append_only_file_is_warned_of(tmp_path: Path, aof: bool, status: str) -> None:
    server = RedisServer(tmp_path, aof=aof).start()
    try:
        found = redis_persistence(_config(server.url))
    finally:
        server.stop()
    assert found is not None
    assert (found.status, "append-only file" in found.detail) == (status, True)


def test_a_password_is_shown_and_a_missing_one_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = RedisServer(tmp_path, aof=True).start()
    try:
        with redis.Redis.from_url(server.url) as client:
            assert redis_answer(server.url) is None
            client.config_set("requirepass", "s3cret")
        assert redis_answer(server.url) is None, "a server that wants a password is a server"
        without = redis_persistence(_config(server.url))
        monkeypatch.setenv("BAPO_REDIS_PASSWORD", "s3cret")
        with_it = redis_persistence(_config(server.url))
    finally:
        server.stop()
    assert without is not None
    assert with_it is not None
    assert (without.status, "wants a password" in without.detail) == ("warn", True)
    assert with_it.status == "ok"


def test_nothing_is_asked_where_there_is_nobody_to_ask() -> None:
    assert redis_persistence(_config(None)) is None


def test_a_redis_that_is_away_is_a_warning(tmp_path: Path) -> None:
    found = redis_persistence(_config(f"unix://{tmp_path}/no.sock"))
    assert found is not None
    assert found.status == "warn"
