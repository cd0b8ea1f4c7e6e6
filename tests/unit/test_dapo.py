"""DAPO's rounds of generation, by hand."""

from __future__ import annotations

import pytest

from bapo.algorithms.composer import NeedMore, Reason
from tests.support.composers import compose, composer, decided, group
from tests.support.factories import make_stat

FAILED, MIXED, SOLVED = "0000", "1000", "1111"


def test_dapo_wants_another_round_while_less_than_b_groups_are_informative() -> None:
    first = [group("a", MIXED), group("b", FAILED), group("c", SOLVED), group("d", MIXED)]
    assert compose(composer("dapo"), first) == NeedMore(found=2, wanted=4)


def test_dapo_trains_the_first_b_informative_groups_of_all_rounds_and_counts_the_surplus() -> None:
    first = [group("a", MIXED), group("b", FAILED), group("c", SOLVED), group("d", MIXED)]
    second = [group("e", MIXED), group("a2", MIXED), group("f", MIXED), group("g", MIXED)]
    decision = decided(composer("dapo"), first + second, round=2)
    assert decision.x1 == ("a", "d", "e", "f")
    assert decision.reasons == {
        "a": Reason.INFORMATIVE, "b": Reason.ALL_INCORRECT, "c": Reason.ALL_CORRECT, "d": Reason.INFORMATIVE,
        "e": Reason.INFORMATIVE, "a2": Reason.DUPLICATE_PROMPT, "f": Reason.INFORMATIVE, "g": Reason.SURPLUS,
    }  # fmt: skip
    assert decision.r_tot == pytest.approx((1 + 0 + 4 + 1 + 1 + 1 + 1 + 1) / 32)


def test_dapo_trains_what_there_is_after_its_last_round() -> None:
    rounds = [group(f"{letter}", FAILED) for letter in "abcdefg"] + [group("h", MIXED)]
    assert compose(composer("dapo", max_rounds=3), rounds, round=2) == NeedMore(found=1, wanted=4)
    assert decided(composer("dapo", max_rounds=2), rounds, round=2).x1 == ("h",)


def test_dapo_keeps_every_group_of_fractional_rewards_that_has_a_deviation() -> None:
    fresh = [
        make_stat(rewards=(0.1, 0.2, 0.3, 0.3), prompt_id="a", group_id="a"),  # sum .9, less than 1
        make_stat(rewards=(1.0, 1.0, 1.0, 0.5), prompt_id="b", group_id="b"),  # sum 3.5, more than G - 1
        make_stat(rewards=(0.5, 0.5, 0.5, 0.5), prompt_id="c", group_id="c"),
    ]
    decision = decided(composer("dapo", max_rounds=1), fresh)
    assert decision.x1 == ("a", "b")
    assert decision.reasons["c"] == Reason.NO_VARIANCE
