"""Journals of episodes: written by the holder of a request, in order, once; gone with the request."""

from __future__ import annotations

from tests.support.buffer import PuttingRedisStore as RedisStore
from tests.support.buffer import answer, incoming
from tests.support.factories import make_request


def leased(store: RedisStore, name: str = "a", worker: str = "w") -> str:
    store.enqueue([make_request(prompt_id=name, group_size=2)], cursor=None)
    (request,) = store.claim(worker, limit=1, policy_version=1)
    return request.request_id


def test_entries_follow_each_other_and_a_repeated_append_stores_nothing(store: RedisStore) -> None:
    request = leased(store)
    assert store.append_journal("w", request, 0, [b"one", b"two"]) == ("ok", 2)
    assert store.append_journal("w", request, 2, [b"three"]) == ("ok", 3)
    assert store.append_journal("w", request, 2, [b"three"]) == ("ok", 3), "the answer was lost on the way"
    assert store.append_journal("w", request, 2, [b"other"]) == ("gap", 3)
    assert store.append_journal("w", request, 4, [b"five"]) == ("gap", 3)
    assert store.read_journal(request) == [b"one", b"two", b"three"]


def test_only_the_holder_of_the_request_writes(store: RedisStore) -> None:
    request = leased(store)
    assert store.append_journal("another", request, 0, [b"x"])[0] == "not_held"
    assert store.append_journal("w", "g-unknown", 0, [b"x"])[0] == "not_held"
    store.append_journal("w", request, 0, [b"mine"])
    store.release("w")
    assert store.append_journal("w", request, 1, [b"late"])[0] == "not_held"
    (again,) = store.claim("next", limit=1, policy_version=1)
    assert store.read_journal(again.request_id) == [b"mine"], "the next holder continues"
    assert store.append_journal("next", request, 1, [b"its own"]) == ("ok", 2)


def test_a_journal_ends_with_its_group_and_with_a_failed_attempt(store: RedisStore) -> None:
    request = leased(store)
    store.append_journal("w", request, 0, [b"one"])
    store.fail("w", request, reason="episode_silent", detail="")
    assert store.read_journal(request) == []
    (again,) = store.claim("w", limit=1, policy_version=1)
    store.append_journal("w", again.request_id, 0, [b"two"])
    assert store.push([incoming(answer(again, rewards="10"))]) == ["stored"]
    assert store.read_journal(request) == []
    assert store.append_journal("w", request, 1, [b"late"])[0] == "not_held"
