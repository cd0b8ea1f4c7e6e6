"""Large numbers and little memory: what a store does beyond a chunk, a page or its memory, and in how many commands."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import redis

from bapo.core.errors import FrameError, FullError
from bapo.core.types import Progress, Purpose
from bapo.transport.frame_transfer import FRAME_TTL_MS
from buffer_service.state import Replacement, SelectorState, Tables
from buffer_service.store.redis.store import RedisStore
from tests.support.buffer import an_assembly, answer, hard, incoming, new_store, stat, stored, view_of
from tests.support.factories import make_prompt, make_request
from tests.support.wait import wait_until


def test_views_and_claims_beyond_the_chunks_of_a_script(store: RedisStore) -> None:
    """4,100 is more than one command of a script takes."""
    names = [f"p{i:04d}" for i in range(4100)]
    stored(store, names)
    view = view_of(store, 4100)
    assert [record.prompt_id for record in view.fresh] == names
    asked = store.fresh_requests([record.group_id for record in view.fresh])
    assert [request and request.prompt.prompt_id for request in asked] == names
    again = [make_request(prompt_id=name, request_id=f"again-{name}") for name in names]
    assert store.enqueue(again, cursor=None) == 4100
    assert store.claim("w", limit=4100, policy_version=1) == again
    assert store.release("w") == 4100


def test_assemblies_releases_and_pushes_beyond_the_chunks_of_a_script(store: RedisStore) -> None:
    requests = stored(store, [f"p{i:04d}" for i in range(4100)])
    ids = [request.request_id for request in requests]
    wrong = an_assembly(fresh=[*ids, "g-none"], trained=ids)
    assert not store.commit_assembly(wrong)
    fresh_bytes = store.readiness(1).fresh_bytes
    # The last one is not trained: it goes at once, the others with their checkpoint.
    assert store.commit_assembly(an_assembly(fresh=ids, trained=ids[:-1], fresh_bytes=fresh_bytes))
    assert [frame is None for frame in store.frames(ids)] == [False] * 4099 + [True]
    assert (store.status().fresh_ready, store.readiness(2).fresh_bytes) == (0, 0)
    assert store.push([incoming(answer(request)) for request in requests]) == ["duplicate"] * 4100
    store.commit(1, 1)
    assert store.frames(ids) == [None] * 4100
    assert store.records(ids) == [None] * 4100
    assert store.status().num_bytes == 0


def test_an_evaluation_beyond_the_chunks_of_a_script_is_forgotten_whole(store: RedisStore) -> None:
    asked = [
        make_request(prompt_id=f"p{i:04d}", request_id=f"e-{i:04d}", purpose=Purpose.EVALUATE, label="cd@1")
        for i in range(5100)
    ]
    store.enqueue(asked, cursor=None)
    assert set(store.push([incoming(answer(request)) for request in asked[:4050]])) == {"stored"}
    assert len(store.claim("w", limit=500, policy_version=1)) == 500
    assert len(store.evaluated("cd@1")) == 4050
    store.forget("cd@1")
    status = store.status()
    assert (status.num_bytes, status.evaluations, status.queued["evaluate"], status.leased["evaluate"]) == (0, {}, 0, 0)
    assert store.enqueue(asked, cursor=None) == 5100


def test_a_settled_request_is_remembered_for_exactly_twenty_steps(store: RedisStore) -> None:
    """That of an evaluation for as long as the evaluation."""
    early = make_request(request_id="e", purpose=Purpose.EVALUATE, label="cd@1")
    store.enqueue([early], cursor=None)
    store.push([incoming(answer(early))])
    stored(store, "a")
    for step in range(1, 32):
        store.commit_assembly(an_assembly(step=step, fresh=["g-a"] if step == 1 else [], before=store.tables()))
        store.commit(step, step)
        results = store.push([incoming(answer(make_request(prompt_id="a"))), incoming(answer(early))])
        assert results == ["duplicate" if step <= 20 else "unknown", "duplicate"], step
    assert store.enqueue([early], cursor=None) == 0
    store.forget("cd@1")
    assert store.enqueue([early], cursor=None) == 1


# -- Redis: memory, transactions, pieces


@contextmanager
def full(url: str) -> Iterator[None]:
    """A Redis that takes nothing more."""
    with redis.Redis.from_url(url) as raw:
        raw.config_set("maxmemory", 1)
        try:
            yield
        finally:
            raw.config_set("maxmemory", 0)


def test_what_drains_the_buffer_goes_on_when_redis_is_full(redis_store: RedisStore, redis_url: str) -> None:
    """Each call is the first write of its script; none of them may be refused: they make room, or ask for groups that
    the learner may wait for."""
    store = redis_store
    stored(store, "abcdef")
    evaluation = make_request(request_id="e", purpose=Purpose.EVALUATE, label="cd@1")
    store.enqueue([*(make_request(prompt_id=name) for name in "xyz"), evaluation], cursor=None)
    again = make_request(prompt_id="c", request_id="g-c~1")
    with full(redis_url):
        with pytest.raises(FullError):
            store.push([incoming(answer(make_request(prompt_id="x")))])
        assert (
            store.enqueue([make_request(prompt_id="z"), make_request(prompt_id="more", min_version=9)], cursor=2) == 1
        )
        assert store.enqueue_round(1, []) == 0
        assert store.readiness(1).round_left == 0
        assert len(store.claim("w", limit=9, policy_version=1)) == 4
        assert store.renew("w", ["g-x"]) == ["g-x"]
        assert store.fail("w", "g-y", reason="engine", detail="") == "requeued"
        assert store.fail("v", "g-y", reason="engine", detail="") == "not_leased"
        assert store.release("w") == 3
        assert store.release("w") == 0
        result = view_of(store, 3).fresh[2].result(None, "stale", 1)
        store.replace_stale([Replacement(result=result, request=again)])
        assert store.drop_group("g-d") == "fresh"
        assert store.drop_request("g-z") is True
        one = an_assembly(
            fresh=["g-a", "g-b"], trained=["g-a"], bad=[hard("b")], high=[stat("g-a")],
            new_prompts=[make_prompt(prompt_id="b")],
        )  # fmt: skip
        assert store.commit_assembly(one)
        assert store.edit_tables(one.after, Tables(step=1, r_tot=0.25, facts={"c2": 0.2, "c3": 0.3}))
        assert store.commit_assembly(an_assembly(step=2, before=store.tables()))
        assert store.keep_selector_state(SelectorState(round=3, through=2, data=b"state"))
        store.report(Progress(step=2, policy_version=2))
        store.commit(2, 1)
        store.resume(1)
        store.forget("cd@1")
        assert store.status().assembled_step == 2
    assert store.frames(["g-a", "g-b", "g-c", "g-d"]) == [None] * 4


def test_a_lease_that_is_over_returns_although_redis_is_full(redis_url: str) -> None:
    for look in ("status", "claim"):
        store = new_store(redis_url, run=look, lease_s=0.001)
        store.enqueue([make_request(prompt_id="a")], cursor=None)
        store.claim("w", limit=1, policy_version=1)
        with full(redis_url):
            if look == "status":
                wait_until(lambda at=store: at.status().leased["fresh"] == 0)
            else:
                wait_until(lambda at=store: at.claim("v", limit=1, policy_version=1))


@pytest.mark.parametrize(
    ("call", "transactions"),
    [
        (lambda store: store.image(), 1),
        (lambda store: store.restore(store.image(), ()), 4),  # the image, what goes, what comes, whether it is written
        (lambda store: store.compositions(0, 9), 1),
        (lambda store: store.selector_state(), 1),
        (lambda store: store.frames(["g-a"]), 0),
    ],
)
def test_what_is_read_or_written_together_is_one_transaction(
    redis_store: RedisStore, redis_url: str, call: Callable[[RedisStore], object], transactions: int
) -> None:
    with redis.Redis.from_url(redis_url) as raw:
        raw.config_resetstat()
        call(redis_store)
        found = raw.info("commandstats")
    assert (found.get("cmdstat_multi") or {"calls": 0})["calls"] == transactions


def test_a_script_that_redis_forgot_is_loaded_again_and_the_frames_are_not_sent_twice(
    redis_store: RedisStore, redis_url: str
) -> None:
    request = make_request(prompt_id="a")
    redis_store.enqueue([request], cursor=None)
    with redis.Redis.from_url(redis_url) as raw:
        raw.script_flush()
        raw.config_resetstat()
        assert redis_store.push([incoming(answer(request))]) == ["stored"]
        assert raw.info("commandstats")["cmdstat_psetex"]["calls"] == 1


def test_a_push_whose_frame_expired_is_refused_with_its_worker_and_counted(redis_store: RedisStore) -> None:
    """Redis may lose a frame before its push: its sender stood still, or the machine slept."""
    request = make_request(prompt_id="a")
    redis_store.enqueue([request], cursor=None)
    group = incoming(answer(request))
    with pytest.raises(FrameError):
        RedisStore.push(redis_store, [group])
    assert redis_store.counters() == {"bad_frames:w": 1}
    assert redis_store.status().queued["fresh"] == 1
    assert redis_store.frames(["g-a"]) == [None]


def test_a_frame_that_no_push_names_expires_and_one_that_a_push_names_does_not(
    redis_store: RedisStore, redis_url: str
) -> None:
    (request,) = stored(redis_store, "a")
    redis_store.put_frame("f" * 32, b"orphan")
    with redis.Redis.from_url(redis_url) as raw:
        assert 0 < raw.pttl("bapo:{test}:incoming:" + "f" * 32) <= FRAME_TTL_MS
        assert raw.pttl(f"bapo:{{test}}:group:{request.request_id}") == -1


def test_a_push_is_admitted_whose_frames_were_there_before_redis_was_full(
    redis_store: RedisStore, redis_url: str
) -> None:
    """What a push changes besides its frames is small, and its worker would have to send them once more."""
    request = make_request(prompt_id="a")
    redis_store.enqueue([request], cursor=None)
    group = incoming(answer(request))
    redis_store.put_frame(group.frame_name, group.frame)
    with full(redis_url):
        assert RedisStore.push(redis_store, [group]) == ["stored"]
    assert redis_store.frames(["g-a"]) == [group.frame]


def test_frames_are_found_in_their_order_however_many(store: RedisStore) -> None:
    stored(store, [f"p{i}" for i in range(70)])
    ids = [f"g-p{i}" for i in range(70)]
    frames = store.frames([*ids, "none"])
    assert frames[70] is None
    assert [store.frames([key])[0] for key in itertools.islice(ids, 0, 70, 7)] == frames[0:70:7]
