"""A token is replaced while calls go on: none of them is refused, in whichever order the two sides hear of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from bapo.core.errors import AccessError
from bapo.runtime.auth.api_tokens import TOKEN_FILE, Keyring, Role
from bapo.runtime.auth.token_store import TokenSet
from bapo.transport.buffer_client import BufferClient
from tests.support.buffer import new_store
from tests.support.buffer_app import serving, small_config


@pytest.fixture
def url(redis_url: str, made: TokenSet) -> Iterator[str]:
    """A service that reads the set."""
    with serving(new_store(redis_url), small_config(), Keyring(path=made.accepted_path)) as client:
        yield client.url


def holder_of(path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> BufferClient:
    monkeypatch.setenv(TOKEN_FILE, str(path))
    return BufferClient(url, retry_s=0.0)


def test_a_new_token_is_accepted_by_the_very_next_call(
    url: str, made: TokenSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = holder_of(made.path_of(Role.OPERATOR), url, monkeypatch)
    for _ in range(3):
        client.status()
        made.rotate(Role.OPERATOR)
        client.status()
    made.retire(Role.OPERATOR)
    client.status()


def test_a_caller_that_has_the_new_token_before_the_service_knows_it_sends_the_old_one(
    url: str, made: TokenSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As pods do, whose copies of a secret change minutes apart."""
    rotated = TokenSet(tmp_path / "rotated")
    shutil.copytree(made.folder, rotated.folder)
    rotated.rotate(Role.OPERATOR)
    client = holder_of(made.path_of(Role.OPERATOR), url, monkeypatch)
    client.status()
    shutil.copy(rotated.path_of(Role.OPERATOR), made.path_of(Role.OPERATOR))
    client.status()
    shutil.copy(rotated.accepted_path, made.accepted_path)
    client.status()


def test_a_token_that_was_retired_is_refused_although_it_was_sent_before(
    url: str, made: TokenSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = holder_of(made.path_of(Role.OPERATOR), url, monkeypatch)
    client.status()
    made.path_of(Role.OPERATOR).write_text("a-token-of-nobody-at-all\n")
    client.status()  # the one before is still valid
    monkeypatch.setattr("bapo.runtime.auth.api_tokens.RELOAD_S", 0.0)
    lines = made.accepted_path.read_text().splitlines()
    made.accepted_path.write_text("\n".join(line for line in lines if not line.startswith("operator")))
    with pytest.raises(AccessError):
        client.status()
