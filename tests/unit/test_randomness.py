"""Draws and the order of prompts depend on seed, step and purpose alone, so that a resumed run draws the same."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo.algorithms.randomness import rng_for, sample_in_order
from bapo.algorithms.selectors.uniform import epoch_order, position


def test_the_same_seed_step_and_purpose_draw_the_same() -> None:
    assert [rng_for(42, 7, "x3").random() for _ in range(3)] == [rng_for(42, 7, "x3").random()] * 3


@pytest.mark.parametrize("other", [(43, 7, "x3"), (42, 8, "x3"), (42, 7, "x2")])
def test_another_seed_step_or_purpose_draws_something_else(other: tuple[int, int, str]) -> None:
    assert rng_for(*other).random() != rng_for(42, 7, "x3").random()


def test_draws_do_not_change_between_versions() -> None:
    # Pinned: a checkpoint of an older version must resume with the same batches. First 16 bytes of
    # sha256("42/7/x3"), little-endian, seed Python's Mersenne Twister.
    assert rng_for(42, 7, "x3").getrandbits(32) == 64517825


def test_a_sample_keeps_the_order_and_takes_at_most_what_is_there() -> None:
    items = list("abcdefgh")
    drawn = sample_in_order(items, 3, Random(0))
    assert len(set(drawn)) == 3
    assert drawn == sorted(drawn)
    assert sample_in_order(items, 8, Random(0)) == items
    assert sample_in_order(items, 99, Random(0)) == items


@pytest.mark.parametrize("most", [0, -2])
def test_no_room_gives_an_empty_sample(most: int) -> None:
    assert sample_in_order([1, 2, 3], most, Random(0)) == []
    assert sample_in_order([], most, Random(0)) == []


def test_every_item_is_drawn_equally_often() -> None:
    counts = Counter(x for seed in range(1000) for x in sample_in_order(range(5), 2, Random(seed)))
    assert all(340 <= counts[x] <= 460 for x in range(5))  # 400 expected, sigma 15.5


# -- epochs


@pytest.mark.parametrize(
    ("cursor", "want"),
    [
        (0, (0, 0)),
        (7, (0, 7)),
        (8, (1, 0)),  # 10 prompts hold 2 batches of 4: the last two of an epoch are left out
        (17, (2, 1)),
    ],
)
def test_an_epoch_holds_only_whole_batches(cursor: int, want: tuple[int, int]) -> None:
    assert position(cursor, num_prompts=10, batch_size=4) == want


def test_fewer_prompts_than_a_batch_are_refused() -> None:
    with pytest.raises(ValueError):
        position(0, num_prompts=3, batch_size=4)


@given(num_prompts=st.integers(1, 60), batch_size=st.integers(1, 60), step=st.integers(0, 40), seed=st.integers(0, 99))
def test_no_batch_holds_a_prompt_twice(num_prompts: int, batch_size: int, step: int, seed: int) -> None:
    if batch_size > num_prompts:
        return
    places = [position(cursor, num_prompts, batch_size) for cursor in range(step * batch_size, (step + 1) * batch_size)]
    batch = [epoch_order(seed, epoch, num_prompts)[index] for epoch, index in places]
    assert len(set(batch)) == batch_size


def test_every_epoch_is_another_permutation_of_all_prompts() -> None:
    first, second = epoch_order(42, 0, 50), epoch_order(42, 1, 50)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert first == epoch_order(42, 0, 50)
    assert first != epoch_order(43, 0, 50)
