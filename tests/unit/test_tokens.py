"""Tokens: who somebody is, what a set on disk looks like, and how a token is replaced."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from bapo.core.errors import ConfigError
from bapo.runtime.auth import api_tokens
from bapo.runtime.auth.api_tokens import (
    ACCEPTED,
    ACCEPTED_FILE,
    TOKEN,
    TOKEN_FILE,
    FileToken,
    Keyring,
    Role,
    digest,
    keyring_for,
)
from bapo.runtime.auth.token_store import TokenSet, find_tokens, token_for_run
from bapo.runtime.run_directory.layout import RunDirectory

SECRET = "a-token-of-the-worker-0"
OTHER = "a-token-of-the-worker-1"


@pytest.fixture(autouse=True)
def nothing_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (TOKEN, TOKEN_FILE, ACCEPTED, ACCEPTED_FILE):
        monkeypatch.delenv(name, raising=False)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_set_has_a_token_for_every_role_and_only_its_owner_can_open_it(made: TokenSet) -> None:
    written = {role: made.path_of(role).read_text().strip() for role in Role}
    assert len(set(written.values())) == 7
    assert min(map(len, written.values())) >= 43
    keyring = Keyring(path=made.accepted_path)
    assert {role: keyring.role_of(token) for role, token in written.items()} == {role: role for role in Role}
    for path in made.folder.rglob("*"):
        assert mode(path) == (0o700 if path.is_dir() else 0o600), path
    assert mode(made.folder) == 0o700


def test_what_services_accept_holds_no_token(made: TokenSet) -> None:
    accepted = made.accepted_path.read_text()
    assert accepted.count("\n") == 7
    for role in Role:
        assert made.path_of(role).read_text().strip() not in accepted


def test_a_rotation_keeps_the_token_before_until_it_is_retired(made: TokenSet) -> None:
    first = FileToken(made.path_of(Role.WORKER))()
    made.rotate(Role.WORKER)
    second = FileToken(made.path_of(Role.WORKER))()
    assert roles(made, first, second) == [Role.WORKER, Role.WORKER]
    made.rotate(Role.WORKER)
    third = FileToken(made.path_of(Role.WORKER))()
    assert roles(made, first, second, third) == [None, Role.WORKER, Role.WORKER]  # two at a time
    made.retire(Role.WORKER)
    assert roles(made, second, third) == [None, Role.WORKER]
    assert roles(made, FileToken(made.path_of(Role.VIEWER))()) == [Role.VIEWER]


def roles(made: TokenSet, *given: str) -> list[Role | None]:
    keyring = Keyring(path=made.accepted_path)
    return [keyring.role_of(token) for token in given]


def test_a_service_notices_a_new_token_and_a_caller_its_own(made: TokenSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_tokens, "RELOAD_S", 0.0)
    keyring, own = Keyring(path=made.accepted_path), FileToken(made.path_of(Role.LEARNER))
    before = own()
    made.rotate(Role.LEARNER)
    os.utime(made.accepted_path, ns=(1, 1))  # whatever the clock's steps are, the time has changed
    os.utime(made.path_of(Role.LEARNER), ns=(1, 1))
    assert own() != before
    assert keyring.role_of(own()) is Role.LEARNER


def test_a_damaged_file_leaves_the_accepted_tokens_as_they_are(made: TokenSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_tokens, "RELOAD_S", 0.0)
    keyring, own = Keyring(path=made.accepted_path), FileToken(made.path_of(Role.LEARNER))()
    made.accepted_path.write_text("nonsense\n")
    os.utime(made.accepted_path, ns=(1, 1))
    assert keyring.role_of(own) is Role.LEARNER


@pytest.mark.parametrize("text", ["", "worker", f"worker {digest(SECRET)[:-1]}", f"boss {digest(SECRET)}"])
def test_a_malformed_list_of_accepted_tokens_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="bapo tokens create"):
        Keyring(text)


def test_a_list_in_one_line_of_the_environment_is_understood() -> None:
    keyring = Keyring(f"worker:{digest(SECRET)},viewer:{digest(OTHER)}")
    assert [keyring.role_of(token) for token in (SECRET, OTHER, "x" * 20)] == [Role.WORKER, Role.VIEWER, None]


@pytest.mark.parametrize(("host", "loopback"), [
    ("127.0.0.1", True), ("127.8.9.1", True), ("::1", True), ("[::1]", True), ("localhost", True),
    ("0.0.0.0", False), ("::", False), ("10.0.0.3", False), ("buffer", False), ("", False),
])  # fmt: skip
def test_a_service_that_others_reach_starts_only_with_tokens(host: str, loopback: bool) -> None:
    if loopback:
        assert keyring_for("the service", host, "auto") is None
        return
    with pytest.raises(ConfigError, match=r"BAPO_ACCEPTED_TOKENS_FILE .*security\.tokens"):
        keyring_for("the service", host, "auto")
    assert keyring_for("the service", host, "off") is None


def test_a_caller_takes_its_token_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert api_tokens.own_token()() is None
    monkeypatch.setenv(TOKEN, SECRET)
    assert api_tokens.own_token()() == SECRET
    (tmp_path / "token").write_text(OTHER + "\n")
    monkeypatch.setenv(TOKEN_FILE, str(tmp_path / "token"))
    assert api_tokens.own_token()() == OTHER


def test_a_process_of_a_run_finds_its_own_token_and_no_other(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run")
    found = TokenSet(run.path / "tokens")
    found.create()
    before = dict(os.environ)
    try:
        find_tokens(run.path, "services.scheduler")
        assert os.environ[TOKEN_FILE] == str(found.path_of(Role.SCHEDULER))
        assert os.environ[ACCEPTED_FILE] == str(found.accepted_path)
        find_tokens(run.path, "learner")  # what is given stays
        assert os.environ[TOKEN_FILE] == str(found.path_of(Role.SCHEDULER))
    finally:
        os.environ.clear()
        os.environ.update(before)
    assert TOKEN_FILE not in found.variables_of("buffer_service")


def test_a_command_sends_the_operators_token_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert token_for_run(tmp_path) is None
    found = TokenSet(tmp_path / "tokens")
    found.create()
    given = token_for_run(tmp_path)
    assert given is not None
    assert given() == found.path_of(Role.OPERATOR).read_text().strip()
    found.rotate(Role.OPERATOR)
    assert given() == found.path_of(Role.OPERATOR).read_text().strip()
    monkeypatch.setenv(TOKEN, SECRET)
    environments = token_for_run(tmp_path)
    assert environments is not None
    assert environments() == SECRET


def test_a_stranger_with_a_wrong_token_cannot_fill_the_log(made: TokenSet, caplog: pytest.LogCaptureFixture) -> None:
    keyring = Keyring(path=made.accepted_path)
    made.accepted_path.unlink()
    for _ in range(100):
        assert keyring.role_of(OTHER) is None
    assert len(caplog.records) == 1


def test_given_tokens_are_asked_for_on_the_loopback_too(made: TokenSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ACCEPTED_FILE, str(made.accepted_path))
    assert keyring_for("the service", "127.0.0.1", "auto") is not None
    assert keyring_for("the service", "127.0.0.1", "off") is None
    monkeypatch.delenv(ACCEPTED_FILE)
    monkeypatch.setenv(ACCEPTED, f"viewer:{digest(SECRET)}")
    found = keyring_for("the service", "0.0.0.0", "auto")
    assert found is not None
    assert found.role_of(SECRET) is Role.VIEWER
