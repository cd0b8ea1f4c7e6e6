"""Draws depend on (seed, step, purpose) alone, so that a resumed run draws what an uninterrupted one would."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from bapo.algorithms.randomness import rng_for, sample_in_order


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
