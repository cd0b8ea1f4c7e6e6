"""How token losses become one number: each aggregation as a weight per token, by hand and as a mean."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo.config.objective import Aggregation
from learner.losses.aggregation import token_weights


@pytest.mark.parametrize(
    ("aggregation", "want"),
    [
        # Group 0 has two fresh rows of 3 and 2 tokens and one replayed of 4; group 1 has one fresh row of 5.
        ("two_term", [1 / (2 * 2 * 3), 1 / (2 * 2 * 2), 1 / (2 * 1 * 4), 1 / (2 * 1 * 5)]),
        ("group_const_len", [1 / (2 * 10)] * 4),
    ],
)
def test_aggregations_by_group(aggregation: str, want: list[float]) -> None:
    weights = token_weights(
        np.array([3, 2, 4, 5]),
        aggregation,  # type: ignore[arg-type]
        10,
        group_R=np.array([0, 0, 0, 1]),
        replayed_R=np.array([False, False, True, False]),
    )
    assert weights.tolist() == pytest.approx(want)


@given(data=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.booleans()), min_size=1, max_size=20))
def test_the_weights_of_a_minibatch_add_up_to_a_mean(data: list[tuple[int, int, bool]]) -> None:
    lengths, groups, replayed = (np.array(column) for column in zip(*data, strict=True))
    kept = lengths > 0
    kinds = {(group, old) for length, group, old in data if length}
    want = {
        "token_mean": 1.0,
        "seq_mean_token_mean": 1.0,
        "seq_mean_token_sum": lengths.sum() / max(1, kept.sum()),
        "const_len": lengths.sum() / (max(1, kept.sum()) * 10),
        "group_const_len": lengths.sum() / (max(1, len(set(groups[kept]))) * 10),
        # One mean over fresh and one over replayed rows for each group that has them.
        "two_term": len(kinds) / max(1, len(set(groups[kept]))),
    }
    for aggregation in get_args(Aggregation):
        weights = token_weights(lengths, aggregation, 10, group_R=groups, replayed_R=replayed)
        assert float(weights @ lengths) == pytest.approx(want[aggregation] if kept.any() else 0.0), aggregation


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "const_len"])
def test_a_response_that_is_left_out_whole_has_no_weight_and_is_not_counted(aggregation: str) -> None:
    weights = token_weights(np.array([3, 0, 2]), aggregation, 4)  # type: ignore[arg-type]
    without = token_weights(np.array([3, 2]), aggregation, 4)  # type: ignore[arg-type]
    assert weights.tolist() == [without[0], 0.0, without[1]]
    assert token_weights(np.array([0, 0]), aggregation, 4).tolist() == [0.0, 0.0]  # type: ignore[arg-type]
