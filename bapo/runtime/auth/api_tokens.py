"""API tokens between services: the token this process sends, and the tokens a service accepts.

    caller   BAPO_TOKEN_FILE (or BAPO_TOKEN)                    -> Authorization: Bearer TOKEN
    service  BAPO_ACCEPTED_TOKENS_FILE (or BAPO_ACCEPTED_TOKENS) -> lines "role sha256-of-token"

A service stores only digests. Two lines of a role are two active tokens, for rotation without downtime. Both files are
reloaded when they change. Token sets on disk are in `bapo.runtime.auth.token_store`; permissions of a role are declared
at each route. Tokens are never logged or included in messages.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import time
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from bapo.core.addresses import bare_host, is_loopback
from bapo.core.errors import AccessError, ConfigError
from bapo.runtime.logs import RateLimitedFilter

log = logging.getLogger(__name__)

TOKEN = "BAPO_TOKEN"  # noqa: S105 - names of variables
TOKEN_FILE = "BAPO_TOKEN_FILE"  # noqa: S105
ACCEPTED = "BAPO_ACCEPTED_TOKENS"
ACCEPTED_FILE = "BAPO_ACCEPTED_TOKENS_FILE"
LISTEN_HOST = "BAPO_HOST"
"""Address that every process of a container listens on."""

RELOAD_S = 1.0
"""Interval in which a service notices revoked tokens; an unknown token triggers a reload immediately."""
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{16,512}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Token(Protocol):
    """The token source of a caller."""

    def __call__(self) -> str | None:
        """The current token; None: no token."""
        ...

    def before(self) -> str | None:
        """The previous token, if known to this process; valid until it is retired."""
        ...


class Role(StrEnum):
    """The role of a caller. Each service defines the permissions of a role."""

    WORKER = "worker"
    """A rollout server and its workers: claim requests, push groups."""
    LEARNER = "learner"
    """Pull batches, read untrained groups, report progress, publish weights, snapshot and restore."""
    SCHEDULER = "scheduler"
    """Enqueue fresh requests and re-evaluations."""
    EVALUATOR = "evaluator"
    """Enqueue and collect evaluations."""
    AGENT = "agent"
    """Open episodes and run them; each episode has a key of its own."""
    VIEWER = "viewer"
    """Read metrics and status, but no groups; change nothing."""
    OPERATOR = "operator"
    """Full access."""


def digest(token: str) -> str:
    """The digest of a token. Tokens have 256 random bits, so a plain hash is safe."""
    return hashlib.sha256(token.encode()).hexdigest()


NO_FILE = (0, 0)


def _state_of(path: Path) -> tuple[int, int]:
    """Fingerprint of a file; includes the inode, because a replaced file may have the same mtime."""
    found = path.stat()
    return found.st_mtime_ns, found.st_ino


class FileToken:
    """A token in a file, reloaded when the file changes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._state = NO_FILE
        self._token, self._before = "", ""

    def __call__(self) -> str:
        """The token. Raises: AccessError if the file is unreadable or has no token."""
        try:
            state = _state_of(self._path)
            if state != self._state:
                found = self._path.read_text().strip()
                if found != self._token and _TOKEN.fullmatch(self._token):
                    self._before = self._token
                self._token, self._state = found, state
        except OSError as error:
            raise AccessError(f"cannot read the token file {self._path}: {error.strerror}") from error
        return checked(self._token, str(self._path))

    def before(self) -> str | None:
        """The token before the last change of the file; None if this process has seen no change."""
        return self._before or None


class FixedToken:
    """A constant token."""

    def __init__(self, token: str | None) -> None:
        self._token = token

    def __call__(self) -> str | None:
        """The token, if there is one."""
        return self._token

    def before(self) -> None:
        """None."""
        return


def own_token() -> Token:
    """The token of this process, from a file, the environment, or none."""
    if path := os.environ.get(TOKEN_FILE):
        return FileToken(Path(path))
    token = os.environ.get(TOKEN)
    return FixedToken(checked(token, TOKEN) if token else None)


def checked(token: str, where: str) -> str:
    """Validate a token. Raises: AccessError, without including the token."""
    if not _TOKEN.fullmatch(token):
        raise AccessError(f"{where} has no token: must be one line of at least 16 characters A-Z a-z 0-9 . _ ~ + / = -")
    return token


class Keyring:
    """The tokens that a service accepts. Thread-safe."""

    def __init__(self, text: str = "", *, path: Path | None = None) -> None:
        """
        Args:
            text: "role digest" per line; commas and colons are also accepted, for environment variables.
            path: read from this file instead, reloading it when it changes.
        Raises: ConfigError if the text is malformed or empty, or the file unreadable.
        """
        self._path = path
        self._state = NO_FILE
        self._looked_s = time.monotonic()
        self._limiter = RateLimitedFilter()
        self._known = _parse(text, ACCEPTED) if path is None else self._read(path)

    def role_of(self, token: str) -> Role | None:
        """The role of a token; None if it is not accepted. Always compares with all accepted tokens."""
        given = digest(token)
        if time.monotonic() - self._looked_s >= RELOAD_S:
            self._reread()
        found = self._find(given)
        if found is None and self._reread():  # callers use a new token immediately
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
            raise ConfigError(f"cannot read the accepted tokens in {path}: {error.strerror}") from error

    def _reread(self) -> bool:
        """Reload the file if it has changed; returns whether it was reloaded."""
        if self._path is None:
            return False
        self._looked_s = time.monotonic()
        try:
            if _state_of(self._path) == self._state:
                return False
            self._known = self._read(self._path)
        except (ConfigError, OSError) as error:
            if self._limiter.is_due("unreadable"):  # reached for every invalid token
                log.warning("keeping the previously accepted tokens: %s", error)
            return False
        log.info("reloaded accepted tokens: %d", len(self._known))
        return True


def _parse(text: str, where: str) -> tuple[tuple[Role, str], ...]:
    words = text.replace(",", " ").replace(":", " ").split()
    pairs = list(zip(words[::2], words[1::2], strict=False))
    roles = set(Role)
    if not pairs or len(words) % 2 or any(role not in roles or not _DIGEST.fullmatch(known) for role, known in pairs):
        raise ConfigError(
            f"{where} must contain pairs 'role sha256-of-token', with roles {', '.join(Role)}; "
            "create them with `bapo tokens create FOLDER`"
        )
    return tuple((Role(role), known) for role, known in pairs)


def listen_host(flag: str | None, configured: str) -> str:
    """The address to listen on: from the command line, BAPO_HOST, or the config, in this order.

    Raises: ConfigError for anything other than a host.
    """
    try:
        return bare_host(flag or os.environ.get(LISTEN_HOST) or configured)
    except ValueError as error:
        raise ConfigError(f"{'--host' if flag else LISTEN_HOST}: {error}") from error


def keyring_for(what: str, host: str, policy: str) -> Keyring | None:
    """The tokens accepted by a service that listens on `host`; None: no authentication.

    Args:
        what: the service, for messages.
        policy: `security.tokens`: `auto` or `off`.
    Raises: ConfigError for a service that is reachable from other machines without accepted tokens.
    """
    if policy == "off":
        if not is_loopback(host):
            log.warning("%s on %s requires no authentication: security.tokens = off", what, host)
        return None
    if path := os.environ.get(ACCEPTED_FILE):
        return Keyring(path=Path(path))
    if text := os.environ.get(ACCEPTED):
        return Keyring(text)
    if is_loopback(host):
        return None
    raise ConfigError(
        f"{what} would listen on {host} without authentication: set {ACCEPTED_FILE} to a file with accepted tokens "
        "(create it with `bapo tokens create FOLDER`), or listen on 127.0.0.1, or set "
        'security.tokens = "off" in a private network'
    )
