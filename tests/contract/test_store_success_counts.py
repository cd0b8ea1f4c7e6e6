"""What a store keeps for prompt selectors: success counts with each assembly, until a state stands for them."""

from __future__ import annotations

from buffer_service.state import SelectorState, Tables
from buffer_service.store.redis.store import RedisStore
from tests.support.buffer import an_assembly, stored


def assembled(store: RedisStore, *success_counts: bytes) -> None:
    """Steps 1, 2, ... with these success counts."""
    before = Tables()
    for step, data in enumerate(success_counts, start=1):
        assembly = an_assembly(step=step, before=before, success_counts=data)
        assert store.commit_assembly(assembly)
        before = assembly.after


def test_success_counts_come_in_the_order_of_their_steps_and_in_pages(store: RedisStore) -> None:
    assembled(store, b"one", b"two", b"three")
    assert store.success_counts(0, 9) == [b"one", b"two", b"three"]
    assert store.success_counts(0, 2) == [b"one", b"two"]
    assert store.success_counts(2, 9) == [b"three"]
    assert store.success_counts(3, 9) == []


def test_an_assembly_whose_fence_is_broken_leaves_no_success_counts(store: RedisStore) -> None:
    assert not store.commit_assembly(an_assembly(fresh=["g-unknown"], success_counts=b"one"))
    assert store.success_counts(0, 9) == []


def test_a_kept_state_takes_the_place_of_the_success_counts_that_are_in_it(store: RedisStore) -> None:
    assembled(store, b"one", b"two", b"three")
    assert store.selector_state() == SelectorState()
    state = SelectorState(round=4, through=2, data=b"\x00state\xff")
    assert store.keep_selector_state(state)
    assert store.selector_state() == state
    assert store.success_counts(0, 9) == []
    assert store.success_counts(2, 9) == [b"three"]


def test_a_state_of_an_older_round_changes_nothing(store: RedisStore) -> None:
    assembled(store, b"one", b"two")
    newest = SelectorState(round=4, through=1, data=b"new")
    assert store.keep_selector_state(newest)
    assert not store.keep_selector_state(SelectorState(round=4, through=2, data=b"again"))
    assert not store.keep_selector_state(SelectorState(round=3, through=2, data=b"old"))
    assert store.selector_state() == newest
    assert store.success_counts(1, 9) == [b"two"]


def test_a_resumed_learner_finds_the_success_counts_of_the_batches_that_it_trains_again(store: RedisStore) -> None:
    assembled(store, b"one", b"two")
    store.commit(2, 1)
    store.resume(1)
    assert store.success_counts(0, 9) == [b"one", b"two"]


def test_a_snapshot_holds_success_counts_state_and_spares_and_a_restore_brings_them_back(
    store: RedisStore,
) -> None:
    assembled(store, b"one", b"two")
    store.keep_selector_state(SelectorState(round=2, through=1, data=b"state"))
    store.enqueue([], cursor=7, spares=3)
    image = store.image()
    assert (image.fresh_spares, image.success_counts) == (3, {2: b"two"})
    assert image.selector == SelectorState(round=2, through=1, data=b"state")
    later = an_assembly(step=3, before=store.tables(), success_counts=b"three")
    assert store.commit_assembly(later)
    store.keep_selector_state(SelectorState(round=3, through=3, data=b"later"))
    store.restore(image, [])
    assert store.image() == image
    assert store.success_counts(1, 9) == [b"two"]
    assert store.status().fresh_spares == 3


def test_spares_are_stored_with_a_cursor_that_rises_and_only_then(store: RedisStore) -> None:
    store.enqueue([], cursor=4, spares=1)
    store.enqueue([], cursor=4, spares=2)
    assert store.status().fresh_spares == 1
    store.enqueue([], cursor=5)
    assert (store.status().cursor, store.status().fresh_spares) == (5, 1)
    stored(store, "a")
    assert store.status().fresh_spares == 1
