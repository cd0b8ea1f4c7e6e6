"""What a store keeps for prompt selectors: outcomes with each assembly, until a state stands for them."""

from __future__ import annotations

from buffer_service.state import SelectorState, Tables
from buffer_service.store.base import Store
from tests.support.buffer import an_assembly, stored


def assembled(store: Store, *outcomes: bytes) -> None:
    """Steps 1, 2, ... with these outcomes."""
    before = Tables()
    for step, data in enumerate(outcomes, start=1):
        assembly = an_assembly(step=step, before=before, outcomes=data)
        assert store.commit_assembly(assembly)
        before = assembly.after


def test_outcomes_come_in_the_order_of_their_steps_and_in_pages(store: Store) -> None:
    assembled(store, b"one", b"two", b"three")
    assert store.outcomes(0, 9) == [b"one", b"two", b"three"]
    assert store.outcomes(0, 2) == [b"one", b"two"]
    assert store.outcomes(2, 9) == [b"three"]
    assert store.outcomes(3, 9) == []


def test_an_assembly_whose_fence_is_broken_leaves_no_outcomes(store: Store) -> None:
    assert not store.commit_assembly(an_assembly(fresh=["g-unknown"], outcomes=b"one"))
    assert store.outcomes(0, 9) == []


def test_a_kept_state_takes_the_place_of_the_outcomes_that_are_in_it(store: Store) -> None:
    assembled(store, b"one", b"two", b"three")
    assert store.selector_state() == SelectorState()
    state = SelectorState(round=4, through=2, data=b"\x00state\xff")
    assert store.keep_selector_state(state)
    assert store.selector_state() == state
    assert store.outcomes(0, 9) == []
    assert store.outcomes(2, 9) == [b"three"]


def test_a_state_of_an_older_round_changes_nothing(store: Store) -> None:
    assembled(store, b"one", b"two")
    newest = SelectorState(round=4, through=1, data=b"new")
    assert store.keep_selector_state(newest)
    assert not store.keep_selector_state(SelectorState(round=4, through=2, data=b"again"))
    assert not store.keep_selector_state(SelectorState(round=3, through=2, data=b"old"))
    assert store.selector_state() == newest
    assert store.outcomes(1, 9) == [b"two"]


def test_a_resumed_learner_finds_the_outcomes_of_the_batches_that_it_trains_again(store: Store) -> None:
    assembled(store, b"one", b"two")
    store.commit(2, 1)
    store.resume(1)
    assert store.outcomes(0, 9) == [b"one", b"two"]


def test_a_snapshot_holds_outcomes_state_and_spares_and_a_restore_brings_exactly_them_back(store: Store) -> None:
    assembled(store, b"one", b"two")
    store.keep_selector_state(SelectorState(round=2, through=1, data=b"state"))
    store.enqueue([], cursor=7, spares=3)
    image = store.image()
    assert (image.fresh_spares, image.outcomes) == (3, {2: b"two"})
    assert image.selector == SelectorState(round=2, through=1, data=b"state")
    later = an_assembly(step=3, before=store.tables(), outcomes=b"three")
    assert store.commit_assembly(later)
    store.keep_selector_state(SelectorState(round=3, through=3, data=b"later"))
    store.restore(image, [])
    assert store.image() == image
    assert store.outcomes(1, 9) == [b"two"]
    assert store.status().fresh_spares == 3


def test_spares_are_stored_with_a_cursor_that_rises_and_only_then(store: Store) -> None:
    store.enqueue([], cursor=4, spares=1)
    store.enqueue([], cursor=4, spares=2)
    assert store.status().fresh_spares == 1
    store.enqueue([], cursor=5)
    assert (store.status().cursor, store.status().fresh_spares) == (5, 1)
    stored(store, "a")
    assert store.status().fresh_spares == 1
