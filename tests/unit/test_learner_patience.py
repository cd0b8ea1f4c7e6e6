"""How long ranks of the learner bear with each other, and what they make of one that is gone."""

from __future__ import annotations

import pytest

from bapo.errors import RankLostError
from learner.distributed.world import lost_rank
from learner.startup import RANKS_SLACK_S, collective_timeout_s
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
    assert collective_timeout_s(config) == longest_s + 120.0 + RANKS_SLACK_S


@pytest.mark.parametrize(
    ("words", "is_lost"),
    [
        ("[/a/gloo/transport/tcp/pair.cc:553] Connection closed by peer. This is typically caused by a crash", True),
        ("[/a/gloo/transport/tcp/unbound_buffer.cc:129] Timed out waiting 302000ms for send operation", True),
        ("[enforce fail at /a/gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. 8 vs 4", False),
        ("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)", False),
    ],
)
def test_what_gloo_says_of_a_peer_is_told_from_errors_of_our_own(words: str, is_lost: bool) -> None:
    told = lost_rank(RuntimeError(words), 1)
    assert isinstance(told, RankLostError) is is_lost
    assert (told is None) is not is_lost
    assert "typically" not in str(told)
