"""Images and snapshots: whole, equal after a restore, into any store, never half."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from bapo.core.errors import ContractError, UnavailableError
from bapo.core.types import Progress, Purpose, RolloutRequest
from buffer_service.snapshot import read_snapshot, unpack_snapshot
from buffer_service.state import Replacement
from buffer_service.store.redis import snapshot
from buffer_service.store.redis.connection import RedisLink
from buffer_service.store.redis.keys import INDEX, Keys
from buffer_service.store.run_image import EMPTY, Image
from tests.support.buffer import PuttingRedisStore as RedisStore
from tests.support.buffer import an_assembly, answer, hard, incoming, stat, stored, view_of
from tests.support.factories import make_prompt, make_request


def a_busy_run(store: RedisStore) -> None:
    """Something in every table: two batches, B_bad, B_high, leases, a round, a drop, an evaluation."""
    stored(store, "abcd", step=1)
    (frame,) = store.frames(["g-b"])
    one = an_assembly(
        fresh=["g-a", "g-b"],
        trained=["g-b"],
        num_bytes=len(frame or b""),
        bad=[hard("a")],
        high=[stat("g-b")],
        new_prompts=[make_prompt(prompt_id="a")],
    )
    assert store.commit_assembly(one)
    old = view_of(store, 1).fresh[0]
    again = make_request(prompt_id="c", request_id="g-c~1", min_version=2)
    store.replace_stale([Replacement(result=old.result(None, "stale", 2), request=again)])
    store.enqueue_round(2, [reevaluation("p"), reevaluation("q"), reevaluation("r")])
    store.push([incoming(answer(reevaluation("p"), version=2))])
    store.enqueue([make_request(prompt_id=name) for name in ("x", "y")], cursor=2)
    store.claim("w", limit=1, policy_version=2)
    store.fail("w", "r-q", reason="engine", detail="")
    store.claim("w", limit=1, policy_version=1)
    store.enqueue([make_request(prompt_id="e", request_id="e", purpose=Purpose.EVALUATE, label="cd@1")], cursor=None)
    store.report(Progress(step=2, policy_version=1))


def reevaluation(name: str) -> RolloutRequest:
    return make_request(prompt_id=name, request_id=f"r-{name}", purpose=Purpose.REEVALUATE, step=2, min_version=2)


def frames_of(store: RedisStore, image: Image) -> Iterator[tuple[str, bytes]]:
    for group_id in image.references:
        (frame,) = store.frames([group_id])
        assert frame is not None
        yield group_id, frame


def snapshot_of(store: RedisStore) -> bytes:
    return b"".join(piece for pieces in read_snapshot(store) for piece in pieces)


def test_a_restored_run_goes_on_as_the_first_would_have(make_store: Callable[..., RedisStore]) -> None:
    first, second = make_store(run="first"), make_store(run="second")
    a_busy_run(first)
    image = first.image()
    second.restore(image, frames_of(first, image))
    first.release("w")
    for store in (first, second):
        claimed = store.claim("w2", limit=9, policy_version=2)
        found = [request.request_id for request in claimed if request.purpose is not Purpose.EVALUATE]
        assert found == ["r-q", "r-r", "g-x", "g-y", "g-c~1"]
        assert store.push([incoming(answer(make_request(prompt_id="d")))]) == ["duplicate"]
        assert store.push([incoming(answer(make_request(prompt_id="x"), version=1))]) == ["stored"]
        assert store.push([incoming(answer(reevaluation("q"), version=2))]) == ["stored"]
        assert store.readiness(2).round_left == 1
        assert store.enqueue_round(2, [reevaluation("new")]) == 0
        before = store.tables()
        two = an_assembly(step=2, fresh=["g-d"], reevaluated=["r-p"], trained=["g-d", "g-b"], before=before)
        assert store.commit_assembly(two)
        store.commit(2, 2)
        assert store.frames(["g-b", "g-d", "r-p"]) == [None, None, None]
        assert [record.group_id for record in view_of(store, 9).fresh] == ["g-x"]


def test_a_snapshot_of_the_same_state_has_the_same_bytes(make_store: Callable[..., RedisStore]) -> None:
    first, second = make_store(run="first"), make_store(run="second")
    for store in (first, second):
        a_busy_run(store)
    assert snapshot_of(first) == snapshot_of(second)


@pytest.mark.parametrize("position", [0, 9, 30, 200, -1, -40])
def test_a_damaged_snapshot_is_refused(store: RedisStore, position: int) -> None:
    a_busy_run(store)
    data = bytearray(snapshot_of(store))
    data[position] ^= 0xFF
    with pytest.raises(ContractError):
        unpack_snapshot(bytes(data))


@pytest.mark.parametrize("size", [0, 10, 60, -1, -33])
def test_a_snapshot_that_was_cut_off_is_refused(store: RedisStore, size: int) -> None:
    a_busy_run(store)
    with pytest.raises(ContractError):
        unpack_snapshot(snapshot_of(store)[:size])


def test_a_restore_that_was_cut_off_leaves_all_as_before_or_refuses_to_go_on(
    make_store: Callable[..., RedisStore],
) -> None:
    source, target = make_store(run="source"), make_store(run="target")
    a_busy_run(source)
    stored(target, "z")
    before, image = target.image(), source.image()

    def cut_off() -> Iterator[tuple[str, bytes]]:
        yield next(frames_of(source, image))
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        target.restore(image, cut_off())
    try:
        assert target.image() == before
    except UnavailableError:
        assert_unreadable(target)
    target.restore(image, frames_of(source, image))
    assert target.image() == image


def assert_unreadable(store: RedisStore) -> None:
    """Neither empty nor half: no answer."""
    calls: list[Callable[[], object]] = [
        store.status, store.image, store.audit, store.progress, store.tables, store.bad_prompts, store.counters,
        store.selector_state, lambda: store.compositions(0, 9), lambda: store.success_counts(0, 9),
        lambda: store.batch(1), lambda: store.records(["g-b"]), lambda: store.fresh_requests(["g-d"]),
        lambda: store.evaluated("cd@1"),
        lambda: store.readiness(2), lambda: store.read_step(2, 1), lambda: store.commit(1, 1),
        lambda: store.claim("w", limit=1, policy_version=1), lambda: store.enqueue_round(2, []),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(UnavailableError, match="restore"):
            call()
    with pytest.raises(ContractError):
        store.resume(1)


def test_a_restore_after_one_that_was_cut_off_leaves_no_frame_behind(redis_url: str) -> None:
    store = RedisStore(RedisLink(redis_url), "run", lease_s=60, max_attempts=3)
    source = RedisStore(RedisLink(redis_url), "source", lease_s=60, max_attempts=3)
    a_busy_run(source)
    image = source.image()

    def cut_off() -> Iterator[tuple[str, bytes]]:
        yield from frames_of(source, image)
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        store.restore(image, cut_off())
    store.restore(EMPTY, iter(()))
    left = {key.decode() for key in redis.Redis.from_url(redis_url).keys("bapo:{run}:*")}
    assert not [key for key in left if ":group:" in key]
    assert {key.partition("}:")[2] for key in left} <= set(INDEX)


def test_a_restore_that_is_overtaken_in_the_middle_of_a_write_writes_nothing(
    redis_store: RedisStore, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_busy_run(redis_store)
    image = redis_store.image()
    frames = list(frames_of(redis_store, image))
    keys = Keys("test")
    write = snapshot._write_index

    def overtaken(*args: Any) -> None:
        write(*args)
        with redis.Redis.from_url(redis_url) as other:
            other.hset(keys["meta"], "restoring", "another")

    monkeypatch.setattr(snapshot, "_write_index", overtaken)
    with pytest.raises(UnavailableError, match="another restore"):
        redis_store.restore(image, frames)
    with redis.Redis.from_url(redis_url) as other:
        assert other.hgetall(keys["meta"])[b"restoring"] == b"another"
        assert not other.exists(keys["records"])
