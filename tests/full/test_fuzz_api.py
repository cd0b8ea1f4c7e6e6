"""Requests made from the API's own description, for some seconds (long runs: docs/threat_model.md)."""

from __future__ import annotations

import pytest

from buffer_service.service import BufferService
from tests.full.fuzz.api import fuzz

EXAMPLES = 6


def test_the_api_answers_as_it_describes_itself_whatever_is_sent(redis_url: str) -> None:
    outcome = fuzz(EXAMPLES, redis_url=redis_url)
    assert len(outcome.requests) >= 30
    assert sum(outcome.requests.values()) > 4 * len(outcome.requests)
    assert {"200", "422"} <= set(outcome.statuses)
    assert not {status for status in outcome.statuses if status >= "500"}


def test_a_fault_of_the_service_is_found(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        return {}["nothing"]

    monkeypatch.setattr(BufferService, "release", broken)
    with pytest.raises(BaseException, match="nothing"):
        fuzz(EXAMPLES, redis_url=redis_url, only="/requests/release")
