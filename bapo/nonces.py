"""What a claim calls itself, so that the buffer knows it again when it is repeated.

claim --answered--> the next claim of the worker has a number above it
  +----unheard----> the next claim of the worker is this one once more: it gets the leases that nobody heard of
"""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager


class ClaimNonces:
    """The nonces of one client, "<random>-<number>". Thread-safe, because each step is one operation of a dict."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        """As a client that nobody has heard of."""
        self._client, self._pid = secrets.token_hex(8), os.getpid()
        self._numbers = itertools.count(1)
        self._newest: dict[str, str] = {}
        """Worker -> nonce of its newest claim."""
        self._unheard: dict[str, str] = {}
        """The same, of those that failed or were cancelled."""

    @contextmanager
    def claiming(self, worker_id: str) -> Iterator[str]:
        """The nonce of one claim; the claim counts as unheard when the block is left by an exception."""
        if self._pid != os.getpid():  # a forked one must not repeat the claims of its parent
            self._begin()
        nonce = self._unheard.pop(worker_id, None) or f"{self._client}-{next(self._numbers)}"
        self._newest[worker_id] = nonce
        try:
            yield nonce
        except BaseException:
            # One that another claim of the worker has overtaken would get nothing any more.
            if self._newest[worker_id] == nonce:
                self._unheard[worker_id] = nonce
            raise
