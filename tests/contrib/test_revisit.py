"""The composer `revisit`: who is asked again and when, and what is kept, by hand (G = 4, c1 = 1/8)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from bapo.algorithms.composer import AssemblyView, Decision, Reason
from bapo.algorithms.settings import AlgorithmConfig
from bapo.config.load import load_config
from bapo.core.errors import ConfigError
from bapo.core.types import GroupStat, HardPrompt
from contrib.revisit.composer import Revisit
from tests.support.factories import make_hard, make_stat
from tests.unit.test_composer import rng_of

STEP = 20
BAD = (
    make_hard(prompt_id="a", birth=4),
    make_hard(prompt_id="b", birth=9),
    make_hard(prompt_id="c", birth=10),
    make_hard(prompt_id="d", birth=11),
)


def revisit(which: str, *, capacity: int = 64, most: int = 8) -> Revisit:
    settings = AlgorithmConfig(
        composer="revisit", batch_size=8, group_size=4, bad_capacity=capacity, max_reevaluated=most,
        x3_policy="youngest", high_window=1,
    )  # fmt: skip
    return Revisit(settings, Revisit.Settings.model_validate({"which": which, "min_age": 10}))


def groups(kind: str, given: Mapping[str, int]) -> tuple[GroupStat, ...]:
    return tuple(make_stat(k=k, size=4, prompt_id=name, group_id=f"{kind}-{name}") for name, k in given.items())


def compose(
    rule: Revisit, *, fresh: Mapping[str, int], asked: Mapping[str, int], bad: Sequence[HardPrompt]
) -> Decision:
    view = AssemblyView(
        step=STEP,
        fresh=groups("f", fresh),
        reevaluated=groups("r", asked),
        bad=tuple(bad),
        high=(),
        previous_r_tot=None,
    )
    return rule.compose(view, rng_of(STEP))


def entries(decision: Decision) -> list[tuple[str, int, float]]:
    return [(entry.prompt_id, entry.birth, entry.mu) for entry in decision.bad]


@pytest.mark.parametrize("which", ["hard", "any"])
def test_a_prompt_is_asked_again_when_it_has_not_been_seen_for_ten_steps(which: str) -> None:
    rule = revisit(which)
    assert rule.hard_prompts_to_ask(BAD, STEP, frozenset(), rng_of(STEP)) == ("a", "b", "c")
    assert rule.hard_prompts_to_ask(BAD, STEP, frozenset("b"), rng_of(STEP)) == ("a", "c"), "b is asked as fresh"
    assert len(revisit(which, most=2).hard_prompts_to_ask(BAD, STEP, frozenset(), rng_of(STEP))) == 2


def test_of_hard_prompts_those_that_fail_again_wait_anew_and_the_others_leave() -> None:
    decision = compose(revisit("hard"), fresh={"x": 0, "y": 2, "z": 4}, asked={"a": 0, "b": 1, "c": 4}, bad=BAD)
    assert entries(decision) == [("d", 11, 0.0), ("a", 20, 0.0), ("x", 20, 0.0)]
    assert (decision.x1, decision.x2) == (("f-y",), ("r-b",))
    assert [decision.reasons[f"r-{name}"] for name in "abc"] == [Reason.STILL_HARD, Reason.IMPROVED, Reason.SOLVED]


def test_of_any_prompts_all_that_were_sampled_wait_whatever_their_result() -> None:
    decision = compose(revisit("any"), fresh={"x": 0, "y": 2, "z": 4}, asked={"a": 0, "b": 1, "c": 4}, bad=BAD)
    assert entries(decision) == [
        ("d", 11, 0.0), ("a", 20, 0.0), ("b", 20, 0.25), ("c", 20, 1.0), ("x", 20, 0.0), ("y", 20, 0.5), ("z", 20, 1.0),
    ]  # fmt: skip


def test_what_trains_does_not_depend_on_which_prompts_wait() -> None:
    fresh, asked = {"x": 0, "y": 2, "z": 4}, {"a": 0, "b": 1, "c": 4, "d": 3}
    hard, others = (compose(revisit(which), fresh=fresh, asked=asked, bad=BAD) for which in ("hard", "any"))
    assert hard.items == others.items
    assert (others.reasons["r-c"], others.reasons["r-a"]) == (Reason.ALL_CORRECT, Reason.STILL_HARD)


@pytest.mark.parametrize("which", ["hard", "any"])
def test_the_longest_unseen_leave_beyond_the_capacity_and_do_not_come_back(which: str) -> None:
    rule = revisit(which, capacity=2)
    decision = compose(rule, fresh={"x": 0}, asked={"a": 0, "gone": 0}, bad=BAD)
    assert entries(decision) == [("a", 20, 0.0), ("x", 20, 0.0)]
    assert decision.reasons["r-gone"] == Reason.LEFT_BAD


def test_without_x2_it_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"set algorithm\.use_x2 = true"):
        load_config(["bapo-reuse"], ["--algorithm.composer", "revisit"])
