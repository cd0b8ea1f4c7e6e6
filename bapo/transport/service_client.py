"""HTTP client of one service over urllib3: API token, errors as the classes reported by the service, retries.

With several replicas one is used until it does not respond, then the next. An error travels as {"error": class name in
`bapo.core.errors`, "message": text, "retry": whether a retry may help}. Retries are a loop and not `urllib3.Retry`,
which counts attempts: ours end at a deadline, change replicas, and depend on the error that the body names.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from urllib3 import BaseHTTPResponse, PoolManager, Timeout
from urllib3.exceptions import HTTPError, SSLError

from bapo.core.addresses import IN_BRACKETS
from bapo.core.errors import (
    BY_NAME,
    BapoError,
    ConfigError,
    ContractError,
    DeadlineError,
    FullError,
    NotRetriedError,
    Refusal,
    UnavailableError,
)
from bapo.core.json_values import Json, to_json
from bapo.runtime.auth.api_tokens import FixedToken, Token, checked, own_token

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0
CONNECT_TIMEOUT_S = 5.0
READY_PAUSE_S = 0.1
CONNECTIONS = 32
"""Connections kept open per process; further ones are closed after use."""
NOT_ACCEPTED = 401
MOVED_FOR_GOOD = (301, 308)
AWAY = (408, 425, 429, 502, 503, 504)
"""Statuses of a proxy in front of a service, without our error body: retried."""
MAX_SHOWN = 200
"""Characters of a foreign answer in a message."""

Piece = bytes | bytearray | memoryview
Body = Piece | Sequence[Piece] | Mapping[str, Any]
"""A mapping or `bapo.core.json_values.Json` is sent as JSON."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A status below 400 and its body."""

    status: int
    body: bytes

    def json(self) -> Any:
        """The body as JSON. Raises: ContractError."""
        try:
            return json.loads(self.body)
        except ValueError as error:
            raise ContractError(f"the response is not JSON: {self.body[:80]!r}") from error


class ServiceClient:
    """A service at one URL, or at those of its replicas. Thread-safe."""

    def __init__(
        self,
        name: str,
        url: str,
        *,
        timeout_s: float,
        retry_s: float,
        full_s: float | None = None,
        token: str | Token | None = None,
    ) -> None:
        """
        Args:
            name: for messages: "the buffer".
            url: one, or several separated by commas.
            timeout_s: longest silence of a call, on top of the wait of a long poll.
            retry_s: how long calls are repeated while the service is down.
            full_s: how long while it is full; default `retry_s`.
            token: API token, or a `Token` that is read at each call; None: from BAPO_TOKEN_FILE or BAPO_TOKEN, if set.
        Raises: ConfigError for a missing or invalid URL; AccessError for an invalid token.
        """
        self.name, self._urls = name, [part.strip().rstrip("/") for part in url.split(",") if part.strip()]
        if not self._urls:
            raise ConfigError(f"no URL of {name}: {url!r}")
        self.timeout_s, self.retry_s = timeout_s, retry_s
        self._full_s = retry_s if full_s is None else full_s
        self._token: Token = _token_of(token)
        for each in self._urls:
            if problem := _problem_of(each):
                raise ConfigError(f"invalid URL of {name}: {problem}")
        self._pools, self._pid = _new_pools(), os.getpid()

    @property
    def url(self) -> str:
        return self._urls[0]

    def close(self) -> None:
        """Close idle connections; the next call opens one."""
        self._pools.clear()

    def wait_ready(self, timeout_s: float, complaint: str) -> None:
        """Return when `/readyz` answers. Raises: DeadlineError: `complaint` and the last reason."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self.call("GET", "/readyz", retry_s=0.0)
            except UnavailableError as error:
                if time.monotonic() > deadline:
                    raise DeadlineError(f"{complaint} within {timeout_s:.0f} s: {error}") from error
                time.sleep(READY_PAUSE_S)
            else:
                return

    def call(
        self,
        method: str,
        path: str,
        *,
        body: Body | None = None,
        query: Mapping[str, str] | None = None,
        wait_s: float = 0.0,
        retry_s: float | None = None,
        full_s: float | None = None,
    ) -> Answer:
        """One call, repeated while the service is unavailable: every call of our APIs is idempotent.

        Args:
            path: with names `quoted`.
            body: bytes or pieces of bytes; a mapping is sent as JSON.
            wait_s: long-poll time of the service.
            retry_s, full_s: override the service's.
        Raises: the error that the service named; UnavailableError after the deadline; ContractError for a mapping that
            is not JSON.
        """
        retry_s = self.retry_s if retry_s is None else retry_s
        sent = to_json(body, f"{method} {path}") if isinstance(body, Mapping) else body
        full_until = time.monotonic() + (self._full_s if full_s is None else full_s)
        away_until = time.monotonic() + retry_s
        pause, left = FIRST_PAUSE_S, len(self._urls)
        while True:
            url = self.url
            try:
                return self._once(url, method, path, sent, query, wait_s)
            except NotRetriedError:
                raise
            except FullError as error:
                if time.monotonic() + error.retry_after_s > full_until:
                    raise
                log.info("%s %s is waiting: %s", method, path, error)
                time.sleep(error.retry_after_s)
                away_until = time.monotonic() + retry_s
            except UnavailableError as error:
                self._leave(url, error)
                left -= 1
                if left > 0:
                    continue
                if time.monotonic() + pause > away_until:
                    raise
                log.debug("%s %s: retrying in %.2f s: %s", method, path, pause, error)
                time.sleep(pause)
                pause, left = min(2 * pause, LONGEST_PAUSE_S), len(self._urls)

    def _leave(self, url: str, error: BapoError) -> None:
        """Switch to the next replica, unless another thread has."""
        if len(self._urls) > 1 and self.url == url:
            self._urls = [*self._urls[1:], url]
            log.info("%s at %s: switching to replica %s: %s", self.name, url, self.url, error)

    def _once(
        self,
        origin: str,
        method: str,
        path: str,
        body: Piece | Sequence[Piece] | None,
        query: Mapping[str, str] | None,
        wait_s: float,
    ) -> Answer:
        url = origin + path + (f"?{urlencode(query)}" if query else "")
        try:
            reply = self._ask(method, url, body, self._token(), wait_s)
            # During a rotation the service may still know only the token before ours.
            if reply.status == NOT_ACCEPTED and (before := self._token.before()):
                reply = self._ask(method, url, body, before, wait_s)
        except SSLError as error:
            raise UnavailableError(
                f"{self.name} at {origin} has an untrusted certificate (set a custom CA in SSL_CERT_FILE): {error}"
            ) from error
        except (OSError, HTTPError) as error:
            said = _said(error)
            raise UnavailableError(f"{self.name} at {origin} does not respond to {method} {path}: {said}") from error
        what = f"{self.name} at {origin} responded to {method} {path}"
        _refuse_foreign_answer(reply, what)
        if reply.status >= 400:
            named = self._named_error(reply.status, reply.data, what)
            if isinstance(named, FullError):
                named.retry_after_s = _seconds(reply.headers.get("retry-after"), named.retry_after_s)
            raise named
        return Answer(reply.status, reply.data)

    def _ask(
        self, method: str, url: str, body: Piece | Sequence[Piece] | None, token: str | None, wait_s: float
    ) -> BaseHTTPResponse:
        if self._pid != os.getpid():  # a forked child must not use the sockets of its parent
            self._pools, self._pid = _new_pools(), os.getpid()
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        if body is not None:
            headers["Content-Type"] = "application/json" if isinstance(body, Json) else "application/octet-stream"
            if not isinstance(body, Piece):
                headers["Content-Length"] = str(sum(map(len, body)))
        timeout = Timeout(connect=CONNECT_TIMEOUT_S, read=self.timeout_s + wait_s)
        return self._pools.request(
            method,
            url,
            body=body,  # type: ignore[arg-type]
            headers=headers,
            timeout=timeout,
            retries=False,
            redirect=False,
        )

    def _named_error(self, status: int, data: bytes, what: str) -> BapoError:
        try:
            fields = json.loads(data)
            cls, message = BY_NAME[fields["error"]], str(fields["message"])
        except (ValueError, KeyError, TypeError):
            cls = UnavailableError if status in AWAY else BapoError
            return cls(f"{what} with HTTP {status}: {data[:MAX_SHOWN]!r}")
        if cls is UnavailableError and fields.get("retry") is False:
            return NotRetriedError(message)
        return cls(message)


def _token_of(given: str | Token | None) -> Token:
    if given is None:
        return own_token()
    if isinstance(given, str):
        return FixedToken(checked(given.strip(), "the argument `token`") if given else None)
    return given


def _new_pools() -> PoolManager:
    return PoolManager(maxsize=CONNECTIONS)


def _problem_of(url: str) -> str:
    """Why a URL is invalid; empty when it is valid."""
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - raises for an invalid port
    except ValueError as error:
        return f"{error}{IN_BRACKETS if url.count(':') > 2 else ''}"
    if "@" in parts.netloc:
        return "it contains a user or password, which is never sent; tokens are configured separately"
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        return f"{url!r} is not of the form http://host:port"
    return ""


def _said(error: Exception) -> str:
    """What went wrong, without the object of urllib3 that it happened to."""
    return str(error).rpartition("): ")[2]


def _refuse_foreign_answer(reply: BaseHTTPResponse, what: str) -> None:
    """A redirect or an HTML page comes from a proxy or a sign-in, not from our service.

    Raises: ConfigError for a permanent redirect; UnavailableError.
    """
    if 300 <= reply.status < 400:
        place = reply.headers.get("location", "nowhere")[:MAX_SHOWN]
        cls = ConfigError if reply.status in MOVED_FOR_GOOD else UnavailableError
        raise cls(f"{what} with a redirect to {place}, which is not followed: use that URL")
    if reply.status < 300 and reply.headers.get("content-type", "").lower().startswith("text/html"):
        shown = reply.data[:MAX_SHOWN]
        raise UnavailableError(f"{what} with an HTML page, probably from another server or a login page: {shown!r}")


def quoted(name: str) -> str:
    """A name as one segment of a path. Raises: ContractError for an empty name, or one with a slash."""
    if not name or "/" in name:
        raise ContractError(f"{name!r} is not a valid name: it must not be empty or contain a slash", Refusal.NAME)
    return quote(name, safe="@+~")


def _seconds(header: str | None, default: float) -> float:
    try:
        return max(0.0, float(header)) if header else default
    except ValueError:
        return default
