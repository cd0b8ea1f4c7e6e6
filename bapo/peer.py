"""One HTTP peer: keep-alive connections, errors as the classes that the peer named, retries until a deadline.

An error travels as {"error": class name in `bapo.errors`, "message": text, "retry": whether trying again may help}.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import urllib3

from bapo.errors import BY_NAME, BapoError, ContractError, UnavailableError

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0
CONNECT_TIMEOUT_S = 5.0
CONNECTIONS = 16
"""Kept open for the threads of one process; more are made when needed and closed after use."""


class RefusedError(UnavailableError):
    """The peer is there and says that trying again does not help."""


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
            raise ContractError(f"the answer is not JSON: {self.body[:80]!r}") from error


class Peer:
    """A service at one URL. Thread-safe."""

    def __init__(self, name: str, url: str, *, timeout_s: float, retry_s: float) -> None:
        """
        Args:
            name: what messages call it, "the buffer".
            timeout_s: longest silence of a call, on top of what a long poll asks for.
            retry_s: how long a call that may be repeated goes on against a peer that is down or full.
        """
        self.name, self.url = name, url.rstrip("/")
        self.timeout_s, self.retry_s = timeout_s, retry_s
        self._pool = urllib3.PoolManager(maxsize=CONNECTIONS, retries=False)

    def call(
        self,
        method: str,
        path: str,
        *,
        body: bytes | Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
        wait_s: float = 0.0,
        retry_s: float | None = None,
    ) -> Answer:
        """One call, repeated while the peer is unavailable. Every call of our APIs may be repeated.

        Args:
            body: bytes travel as they are, a map as JSON.
            wait_s: seconds that the peer itself may wait before it answers.
            retry_s: instead of the peer's own.
        Raises: the error that the peer named; UnavailableError when it could not be reached in time.
        """
        deadline = time.monotonic() + (self.retry_s if retry_s is None else retry_s)
        pause = FIRST_PAUSE_S
        while True:
            try:
                return self._once(method, path, body, query, wait_s)
            except RefusedError:
                raise
            except UnavailableError as error:
                if time.monotonic() + pause > deadline:
                    raise
                log.debug("%s %s is tried again in %.2f s: %s", method, path, pause, error)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _once(
        self,
        method: str,
        path: str,
        body: bytes | Mapping[str, Any] | None,
        query: Mapping[str, str] | None,
        wait_s: float,
    ) -> Answer:
        data = json.dumps(body).encode() if isinstance(body, Mapping) else body
        kind = "application/json" if isinstance(body, Mapping) else "application/octet-stream"
        url = self.url + path + (f"?{urlencode(query)}" if query else "")
        try:
            response = self._pool.request(
                method,
                url,
                body=data,
                headers={"Content-Type": kind} if data is not None else {},
                timeout=urllib3.Timeout(connect=CONNECT_TIMEOUT_S, read=self.timeout_s + wait_s),
                redirect=False,
            )
        except urllib3.exceptions.HTTPError as error:
            raise UnavailableError(f"{self.name} at {self.url} does not answer {method} {path}: {error}") from error
        if response.status >= 400:
            raise self._named_error(response.status, response.data, f"{method} {path}")
        return Answer(response.status, response.data)

    def _named_error(self, status: int, data: bytes, what: str) -> BapoError:
        try:
            fields = json.loads(data)
            cls, message = BY_NAME[fields["error"]], str(fields["message"])
        except (ValueError, KeyError, TypeError):
            cls = UnavailableError if status in (502, 503, 504) else BapoError
            return cls(f"{self.name} at {self.url} answered {what} with HTTP {status}: {data[:200]!r}")
        if cls is UnavailableError and fields.get("retry") is False:
            return RefusedError(message)
        return cls(message)
