"""Tokens between services: which one this process sends, and which ones a service accepts.

    caller   BAPO_TOKEN_FILE (or BAPO_TOKEN)                    -> Authorization: Bearer TOKEN
    service  BAPO_ACCEPTED_TOKENS_FILE (or BAPO_ACCEPTED_TOKENS) -> lines "role sha256-of-token"

A service knows digests only. Two lines of one role are two active tokens: that is how one is replaced without a pause.
Both files are read again when they change. How a set is made and kept on disk is in `bapo.runtime.auth.token_store`;
what each role may do is each service's own table. Tokens are never logged, and no message repeats one.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import os
import re
import time
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from bapo.core.errors import AccessError, ConfigError
from bapo.runtime.logs import RateLimitedFilter

log = logging.getLogger(__name__)

TOKEN = "BAPO_TOKEN"  # noqa: S105 - names of variables
TOKEN_FILE = "BAPO_TOKEN_FILE"  # noqa: S105
ACCEPTED = "BAPO_ACCEPTED_TOKENS"
ACCEPTED_FILE = "BAPO_ACCEPTED_TOKENS_FILE"
LISTEN_HOST = "BAPO_HOST"
"""The address that every process of a container listens on."""

LOOK_AGAIN_S = 1.0
"""How soon a service notices that a token is not accepted any more; a new one it looks for when it is shown."""
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{16,512}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Token(Protocol):
    """What a caller shows."""

    def __call__(self) -> str | None:
        """The token to send now; None: send none."""
        ...

    def before(self) -> str | None:
        """The one before it, as far as this process has known one: valid until it is retired."""
        ...


class Role(StrEnum):
    """The role of a caller. Each service has a table of what a role may do."""

    WORKER = "worker"
    """A rollout server and its workers: claim requests, push groups."""
    LEARNER = "learner"
    """Take batches, read what they do not train, report progress, publish weights, snapshot and restore."""
    SCHEDULER = "scheduler"
    """Ask for fresh groups and for hard prompts again."""
    EVALUATOR = "evaluator"
    """Ask for held-out groups and collect them."""
    VIEWER = "viewer"
    """Read numbers; change nothing and read no group."""
    OPERATOR = "operator"
    """The person whose run it is: everything."""


def digest(token: str) -> str:
    """What a service keeps of a token. Tokens have 256 random bits, so a plain hash cannot be searched."""
    return hashlib.sha256(token.encode()).hexdigest()


NO_FILE = (0, 0)


def _state_of(path: Path) -> tuple[int, int]:
    """Another one when the file has changed: two files that replace each other may have the same time."""
    found = path.stat()
    return found.st_mtime_ns, found.st_ino


class FileToken:
    """A token in a file, read again when the file changes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._state = NO_FILE
        self._token, self._before = "", ""

    def __call__(self) -> str:
        """The token. Raises: AccessError when the file cannot be read or holds none."""
        try:
            state = _state_of(self._path)
            if state != self._state:
                found = self._path.read_text().strip()
                if found != self._token and _TOKEN.fullmatch(self._token):
                    self._before = self._token
                self._token, self._state = found, state
        except OSError as error:
            raise AccessError(f"the token in {self._path} cannot be read: {error.strerror}") from error
        return checked(self._token, str(self._path))

    def before(self) -> str | None:
        """What the file held before its newest change; None when this process has seen no change."""
        return self._before or None


class FixedToken:
    """Always the same one."""

    def __init__(self, token: str | None) -> None:
        self._token = token

    def __call__(self) -> str | None:
        """The token, if there is one."""
        return self._token

    def before(self) -> None:
        """There was none."""
        return


def own_token() -> Token:
    """What this process was given: by file, by environment, or nothing."""
    if path := os.environ.get(TOKEN_FILE):
        return FileToken(Path(path))
    token = os.environ.get(TOKEN)
    return FixedToken(checked(token, TOKEN) if token else None)


def checked(token: str, where: str) -> str:
    """The token as it is. Raises: AccessError, without repeating it, when it cannot be one."""
    if not _TOKEN.fullmatch(token):
        raise AccessError(f"{where} holds no token: one line of at least 16 characters A-Z a-z 0-9 . _ ~ + / = -")
    return token


class Keyring:
    """The tokens that a service accepts. Safe to share between threads."""

    def __init__(self, text: str = "", *, path: Path | None = None) -> None:
        """
        Args:
            text: "role digest" per line; commas and colons do as well, for an environment variable.
            path: read from there instead, and again whenever it changes.
        Raises: ConfigError when the text is malformed or empty, or the file unreadable.
        """
        self._path = path
        self._state = NO_FILE
        self._looked_s = time.monotonic()
        self._seldom = RateLimitedFilter()
        self._known = _parse(text, ACCEPTED) if path is None else self._read(path)

    def role_of(self, token: str) -> Role | None:
        """Whose token it is; None when it is not accepted. Compares with all accepted ones, whatever it finds."""
        given = digest(token)
        if time.monotonic() - self._looked_s >= LOOK_AGAIN_S:
            self._reread()
        found = self._find(given)
        if found is None and self._reread():  # callers take a new token at once
            found = self._find(given)
        return found

    def _find(self, given: str) -> Role | None:
        found = None
        for role, known in self._known:
            if hmac.compare_digest(given, known):
                found = role
        return found

    def _read(self, path: Path) -> tuple[tuple[Role, str], ...]:
        try:
            self._state = _state_of(path)
            return _parse(path.read_text(), str(path))
        except OSError as error:
            raise ConfigError(f"the accepted tokens in {path} cannot be read: {error.strerror}") from error

    def _reread(self) -> bool:
        """Whether the file has changed, and is read again."""
        if self._path is None:
            return False
        self._looked_s = time.monotonic()
        try:
            if _state_of(self._path) == self._state:
                return False
            self._known = self._read(self._path)
        except (ConfigError, OSError) as error:
            if self._seldom.is_due("unreadable"):  # every wrong token leads here
                log.warning("the tokens that were accepted before stay accepted: %s", error)
            return False
        log.info("accepted tokens were read again: %d", len(self._known))
        return True


def _parse(text: str, where: str) -> tuple[tuple[Role, str], ...]:
    words = text.replace(",", " ").replace(":", " ").split()
    pairs = list(zip(words[::2], words[1::2], strict=False))
    roles = set(Role)
    if not pairs or len(words) % 2 or any(role not in roles or not _DIGEST.fullmatch(known) for role, known in pairs):
        raise ConfigError(
            f"{where} must hold pairs 'role sha256-of-token', with roles {', '.join(Role)}; "
            "`bapo tokens create FOLDER` makes such a set"
        )
    return tuple((Role(role), known) for role, known in pairs)


def listen_host(flag: str | None, configured: str) -> str:
    """The address to listen on: of the command line, of BAPO_HOST, of the configuration, in this order."""
    return flag or os.environ.get(LISTEN_HOST) or configured


def keyring_for(what: str, host: str, policy: str) -> Keyring | None:
    """What a service that listens on `host` accepts; None: everybody.

    Args:
        what: the service, for messages.
        policy: `security.tokens` of the configuration: `auto` or `off`.
    Raises: ConfigError for a service that others can reach and that was given no tokens.
    """
    if policy == "off":
        if not is_loopback(host):
            log.warning("%s on %s takes calls from everybody: security.tokens = off", what, host)
        return None
    if path := os.environ.get(ACCEPTED_FILE):
        return Keyring(path=Path(path))
    if text := os.environ.get(ACCEPTED):
        return Keyring(text)
    if is_loopback(host):
        return None
    raise ConfigError(
        f"{what} would listen on {host} for everybody who can reach it: name the tokens that it accepts in "
        f"{ACCEPTED_FILE} (`bapo tokens create FOLDER` makes a set), or listen on 127.0.0.1, or write "
        'security.tokens = "off" where the network is closed'
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens on, or lies at, this address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
