"""The order of prompts: epochs of whole batches, each in a new order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo.algorithms.selectors.uniform import epoch_order, position


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
    with pytest.raises(ValueError, match="3 prompts are fewer than one batch of 4"):
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
