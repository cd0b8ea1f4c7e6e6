"""How long ranks of the learner bear with rank 0 when it says nothing."""

from __future__ import annotations

import pytest

from learner.rank import RANKS_SLACK_S, longest_silence_s
from tests.learner_setup import learner_config


@pytest.mark.parametrize(
    ("start_s", "batch_s", "longest_s"),
    [
        (300.0, 600.0, 900.0),  # the defaults: buffer, buffer again, first worker
        (1800.0, 600.0, 5400.0),  # engines of a large model
        (10.0, 600.0, 600.0),
    ],
)
def test_no_wait_that_a_setting_allows_is_too_long_for_the_other_ranks(
    start_s: float, batch_s: float, longest_s: float
) -> None:
    rollout = {"start_timeout_s": start_s, "sync_timeout_s": 120.0, "max_prompt_tokens": 12, "max_response_tokens": 24}
    config = learner_config(rollout=rollout, learner={"batch_timeout_s": batch_s})
    assert longest_silence_s(config) == longest_s + 120.0 + RANKS_SLACK_S
