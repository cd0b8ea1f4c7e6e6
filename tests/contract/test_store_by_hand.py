"""A run that is dropped by hand, and the audit of a Redis that was damaged; other removals: test_store_model.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import redis

from bapo.algorithms.settings import AlgorithmConfig
from bapo.core.errors import ContractError
from bapo.core.types import Purpose
from buffer_service.inspection import Maintenance
from buffer_service.state import Assembly
from buffer_service.store.invariants import violations
from buffer_service.store.redis.keys import Keys
from buffer_service.store.redis.store import RedisStore
from tests.support.buffer import an_assembly, answer, hard, incoming, new_store, stat, stored, view_of
from tests.support.buffer_app import small_config
from tests.support.factories import make_prompt, make_request


def busy(store: RedisStore) -> None:
    """Step 1 is assembled: B_bad = {a}, B_high = {b, c}, batch 1 = {b}; d is fresh, r re-evaluated, e evaluated."""
    stored(store, "abcd")
    assert store.commit_assembly(assembly(store))
    store.enqueue_round(2, [asked("r", Purpose.REEVALUATE), asked("s", Purpose.REEVALUATE)])
    store.enqueue([asked("e", Purpose.EVALUATE), asked("x", Purpose.EVALUATE), make_request(prompt_id="y")], cursor=3)
    store.push([incoming(answer(asked(name, purpose), version=2)) for name, purpose in
                (("r", Purpose.REEVALUATE), ("e", Purpose.EVALUATE))])  # fmt: skip
    store.claim("w", limit=1, policy_version=2)
    assert_sound(store)


def asked(name: str, purpose: Purpose) -> object:
    label = "cd@2" if purpose is Purpose.EVALUATE else ""
    return make_request(prompt_id=name, purpose=purpose, step=2, min_version=2, label=label)


def assembly(store: RedisStore) -> Assembly:
    made = an_assembly(
        fresh=["g-a", "g-b", "g-c"],
        trained=["g-b"],
        bad=[hard("a")],
        high=[stat("g-b"), stat("g-c")],
        new_prompts=[make_prompt(prompt_id="a")],
        fresh_bytes=sum(record.num_bytes for record in view_of(store, 3).fresh),
    )
    sizes = [record.num_bytes for record in store.records(["g-b"]) if record is not None]
    return replace(made, batch=replace(made.batch, num_bytes=sum(sizes)))


def assert_sound(store: RedisStore) -> None:
    assert violations(store.audit(), AlgorithmConfig()) == []


def tending(store: RedisStore) -> Maintenance:
    return Maintenance(store, small_config(run={"name": "mine"}))


def test_a_dropped_run_begins_again(store: RedisStore) -> None:
    busy(store)
    with pytest.raises(ContractError):
        tending(store).drop_run("other")
    tending(store).drop_run("mine")
    now = store.status()
    assert (now.cursor, now.assembled_step, now.num_bytes, now.evaluations) == (0, 0, 0, {})
    assert store.frames(["g-b", "g-d", "g-e", "g-r"]) == [None] * 4
    assert_sound(store)
    assert len(stored(store, "ab")) == 2


DAMAGE: list[tuple[str, str, Callable[[redis.Redis, Keys], object]]] = [
    ("frames", "group g-d has no frame", lambda r, k: r.delete(k.group("g-d"))),
    ("frames", "the frame of group g-d has", lambda r, k: r.append(k.group("g-d"), b"x")),
    ("orphans", "group lost", lambda r, k: r.set(k.group("lost"), b"x")),
    ("orphans", "group n1", lambda r, k: r.set(k.incoming("n1"), b"x")),
    ("references", "group g-c is in 1 tables", lambda r, k: r.hset(k["refs"], "g-c", 2)),
    ("bytes", "but the counter is", lambda r, k: r.hincrby(k["meta"], "bytes", 1)),
    ("requests", "g-y is open, but in queue None", lambda r, k: r.zrem(k["queue_fresh"], "g-y")),
    ("leases", "held by no worker", lambda r, k: r.delete(k["holders"])),
    ("fresh", "planned for step None", lambda r, k: r.delete(k["planned"])),
    ("bad", "prompt a of B_bad has no text", lambda r, k: r.delete(k["bad_prompts"])),
    ("batches", "batch 1 is missing", lambda r, k: r.delete(k["batches"])),
    ("rounds", "round 2 has 1 open", lambda r, k: r.hset(k["rounds"], 2, 0)),
    ("evaluations", "evaluation cd@2 has 1 finished", lambda r, k: r.hset(k["evaluations"], "cd@2", 3)),
    ("progress", "the tables are those of step 1", lambda r, k: r.hset(k["meta"], "assembled", 2)),
]


@pytest.mark.parametrize(("invariant", "detail", "damage"), DAMAGE)
def test_damage_to_redis_is_found(
    redis_url: str, invariant: str, detail: str, damage: Callable[[redis.Redis, Keys], object]
) -> None:
    store = new_store(redis_url)
    busy(store)
    with redis.Redis.from_url(redis_url) as client:
        client.set(Keys("test").incoming("on-its-way"), b"x", px=60_000)
        assert_sound(store)
        damage(client, Keys("test"))
    found = [item.detail for item in violations(store.audit(), AlgorithmConfig()) if item.invariant == invariant]
    assert any(detail in line for line in found), found
