"""The password of a Redis: never in a configuration or a listing of processes, never none on a network."""

from __future__ import annotations

from pathlib import Path

import pytest

from bapo.core.errors import ConfigError
from bapo.runtime.auth.redis_password import (
    PASSWORD,
    PASSWORD_FILE,
    URL,
    RedisSecrets,
    refuse_open,
    with_password,
    without_password,
)


@pytest.fixture(autouse=True)
def nothing_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (URL, PASSWORD, PASSWORD_FILE):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "url", ["redis://10.0.0.3:6379/0", "redis://bapo@redis:6379/0", "rediss://example.org", "redis://0.0.0.0"]
)
def test_a_redis_on_the_network_without_a_password_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"BAPO_REDIS_PASSWORD_FILE.*security\.open_redis"):
        refuse_open(with_password(url), allowed=False)
    refuse_open(with_password(url), allowed=True)
    monkeypatch.setenv(PASSWORD, "hunter2")
    refuse_open(with_password(url), allowed=False)


@pytest.mark.parametrize(
    "url", ["redis://127.0.0.1:6379/0", "redis://localhost", "redis://[::1]:1/0", "unix:///run/redis.sock"]
)
def test_a_redis_on_this_machine_may_have_none(url: str) -> None:
    refuse_open(url, allowed=False)


@pytest.mark.parametrize(
    ("url", "whole"),
    [
        ("redis://redis:6379/0", "redis://:hun%2Fter2@redis:6379/0"),
        ("redis://bapo@redis:6379/0", "redis://bapo:hun%2Fter2@redis:6379/0"),
        ("unix:///run/redis.sock?db=1", "unix://:hun%2Fter2@/run/redis.sock?db=1"),
        ("redis://:own@redis/0", "redis://:own@redis/0"),
    ],
)
def test_the_password_comes_from_a_file_unless_the_url_has_one(
    url: str, whole: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "password").write_text("hun/ter2\n")
    monkeypatch.setenv(PASSWORD_FILE, str(tmp_path / "password"))
    assert with_password(url) == whole
    if "own" not in url:
        assert without_password(whole) == (url, "hun/ter2")


def test_a_missing_password_file_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PASSWORD_FILE, "/nowhere/password")
    with pytest.raises(ConfigError, match="BAPO_REDIS_PASSWORD_FILE"):
        with_password("redis://redis")


def test_the_users_of_a_shared_redis_hold_no_password_and_few_rights(tmp_path: Path) -> None:
    made = RedisSecrets(tmp_path / "secrets")
    made.create()
    password, users = made.password_path.read_text().strip(), made.users_path.read_text()
    assert password not in users
    assert users.splitlines()[0].startswith("user default off resetpass ")
    assert "~bapo:* resetchannels -@all +@all -@admin -@dangerous" in users
    assert (made.password_path.stat().st_mode & 0o777, made.users_path.stat().st_mode & 0o777) == (0o600, 0o644)
    made.create()
    assert made.password_path.read_text().strip() == password
