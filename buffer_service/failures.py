"""Reasons of failed groups: words of the workers' own making, of which a bounded number is told apart."""

from __future__ import annotations

import re
from itertools import islice

from bapo.errors import ContractError
from buffer_service.store import Store

REASON = re.compile(r"[a-z][a-z0-9_]{0,31}")
MOST_REASONS = 64
"""Each is a label of a metric and a counter for the whole run; those of our own workers are a dozen."""
OTHER = "other"
_COUNTED = "failed_groups:"


class FailureReasons:
    """The reasons that one run has had so far. Thread-safe: two new ones at once may both be taken."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: frozenset[str] = frozenset()

    def told_apart(self, reason: str) -> str:
        """The reason, or `other` when it is a new one and there are MOST_REASONS. Raises: ContractError for no word."""
        if not REASON.fullmatch(reason):
            raise ContractError(f"reason {reason!r:.200} must be one lower-case word of at most 32 characters")
        if reason in self._known:
            return reason
        if len(self._known) < MOST_REASONS:
            counted = (event for event in self._store.counters() if event.startswith(_COUNTED))
            found = {event.removeprefix(_COUNTED) for event in counted} - {OTHER}
            self._known |= frozenset(islice(sorted(found - self._known), MOST_REASONS - len(self._known)))
        return reason if reason in self._known or len(self._known) < MOST_REASONS else OTHER

    def counted(self, word: str) -> None:
        """A group failed for it."""
        if len(self._known) < MOST_REASONS:
            self._known |= {word} - {OTHER}
