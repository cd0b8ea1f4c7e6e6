"""Reasons of failures: 64 of them are told apart in a run, whatever workers call them."""

from __future__ import annotations

import re

import pytest
import urllib3

from bapo.core.errors import ContractError
from buffer_service.service import FailureReasons
from tests.support.buffer import new_store
from tests.support.buffer_app import serving, small_config
from tests.support.factories import make_request


def test_after_64_reasons_a_new_one_is_counted_as_other(redis_url: str) -> None:
    store = new_store(redis_url, max_attempts=1000)
    reasons = [f"reason_{n}" for n in range(70)]
    with serving(store, small_config()) as client:
        client.enqueue([make_request(prompt_id="a")])
        for reason in [*reasons, "reason_3", "reason_69"]:
            client.claim("w", limit=1, policy_version=1)
            client.fail("w", "g-a", reason=reason, detail="why")
        status = client.status()
        text = urllib3.request("GET", client.url + "/metrics", retries=False).data.decode()
    counted = {key.partition(":")[2]: n for key, n in store.counters().items() if key.startswith("failed_groups:")}
    assert counted == {**dict.fromkeys(reasons[:64], 1), "reason_3": 2, "other": 7}
    shown = re.findall(r'bapo_buffer_failed_groups_total\{reason="(\w+)"\}', text)
    assert set(reasons[:64]) | {"other"} <= set(shown)
    assert not set(reasons[64:]) & set(shown)
    assert status.last_failure == "other: reason_69: why"  # for people it is still there


def test_another_instance_tells_the_same_ones_apart(redis_url: str) -> None:
    store = new_store(redis_url, max_attempts=1000)
    store.enqueue([make_request(prompt_id="a")], cursor=None)
    for n in range(64):
        store.claim("w", limit=1, policy_version=1)
        store.fail("w", "g-a", reason=f"reason_{n}", detail="")
    reasons = FailureReasons(store)
    assert [reasons.bounded(word) for word in ("reason_9", "new", "reason_63", "other")] == [
        "reason_9", "other", "reason_63", "other",
    ]  # fmt: skip


def test_failures_of_nobodys_lease_use_no_word_up(redis_url: str) -> None:
    reasons = FailureReasons(new_store(redis_url))
    assert [reasons.bounded(f"made_up_{n}") for n in range(70)] == [f"made_up_{n}" for n in range(70)]
    with pytest.raises(ContractError, match="must be one lower-case word of at most 32 characters"):
        reasons.bounded("A whole sentence.")
