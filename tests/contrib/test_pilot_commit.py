"""Pilot and commit: which pilots are completed, and what trains, by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from bapo.algorithms.composer import AssemblyView, Decision, Reason
from bapo.algorithms.reward_levels import expected_variance
from bapo.algorithms.settings import AlgorithmConfig
from bapo.config.load import load_config
from bapo.core.batch_items import Part
from bapo.core.errors import ConfigError
from bapo.core.types import GroupStat, HardPrompt, Origin
from contrib.pilot_commit.composer import PilotCommit, is_promising
from tests.support.factories import make_hard, make_stat
from tests.unit.test_composer import rng_of

SETTINGS = AlgorithmConfig(composer="pilot_commit", batch_size=4)


def pilot(name: str, k: int, *, birth: int = 0) -> GroupStat:
    return make_stat(k=k, size=2, prompt_id=name, group_id=f"pilot-{name}", birth=birth)


def rest(name: str, k: int) -> GroupStat:
    return make_stat(k=k, size=6, prompt_id=name, group_id=f"rest-{name}")


def compose(
    fresh: Sequence[GroupStat], rests: Sequence[GroupStat] = (), waiting: Sequence[GroupStat] = (), size: int = 4
) -> Decision:
    view = AssemblyView(
        step=4,
        fresh=tuple(fresh),
        reevaluated=tuple(rests),
        bad=tuple(make_hard(prompt_id=stat.prompt_id, birth=3) for stat in waiting),
        high=tuple(waiting),
        previous_r_tot=None,
    )
    return PilotCommit(SETTINGS.model_copy(update={"batch_size": size})).compose(view, rng_of(4))


def test_expected_variance_is_that_of_a_uniform_pass_rate() -> None:
    assert expected_variance(1.0, 1.0) == pytest.approx(1 / 6)  # the integral of p - p^2 from 0 to 1
    assert expected_variance(0.0, 2.0) == 0


@pytest.mark.parametrize(
    ("r_tot", "promising"),
    [
        (1 / 8, (False, True, True)),  # few are correct: every success is worth more than a new prompt
        (1 / 2, (False, True, False)),  # a Beta(1, 1) before; Beta(1, 3) and Beta(3, 1) vary less
        (7 / 8, (True, True, False)),
    ],
)
def test_a_pilot_is_completed_where_the_rest_is_worth_more_than_a_new_prompt(
    r_tot: float, promising: tuple[bool, ...]
) -> None:
    assert tuple(is_promising(pilot("p", k), r_tot, 2.0) for k in range(3)) == promising


def test_pilots_wait_for_their_rest_and_do_not_train_alone() -> None:
    decision = compose([pilot("wrong", 0), pilot("one", 1), pilot("wrong-too", 0), pilot("none", 0)])
    assert decision.items == ()
    assert [prompt.prompt_id for prompt in decision.bad] == ["one"]
    assert [(stat.group_id, stat.birth) for stat in decision.high] == [("pilot-one", 4)]
    assert decision.reasons["pilot-one"] == Reason.PROMISING
    assert decision.reasons["pilot-wrong"] == Reason.DEFERRED


def test_a_completed_group_trains_with_both_parts_if_it_is_informative() -> None:
    waiting = [pilot("a", 1, birth=3), pilot("b", 2, birth=3), pilot("c", 1, birth=3)]
    decision = compose([pilot("x", 0)], [rest("a", 0), rest("b", 6)], waiting)
    (item,) = decision.items
    assert item.origin is Origin.X1
    assert item.parts == (Part(group_id="pilot-a", rows=(0, 1)), Part(group_id="rest-a", rows=(0, 1, 2, 3, 4, 5)))
    assert decision.reasons["rest-b"] == Reason.ALL_CORRECT
    assert [prompt.prompt_id for prompt in decision.bad] == ["c"], "a request that failed is repeated"
    assert [stat.group_id for stat in decision.high] == ["pilot-c"]


def test_an_answer_for_a_prompt_that_does_not_wait_is_not_used() -> None:
    decision = compose([pilot("x", 0)], [rest("a", 3)])
    assert decision.items == ()
    assert decision.reasons["rest-a"] == Reason.LEFT_BAD


def test_a_prompt_that_waits_is_not_piloted_twice() -> None:
    decision = compose([pilot("a", 1)], waiting=[pilot("a", 1, birth=3)])
    assert decision.reasons["pilot-a"] == Reason.DUPLICATE_PROMPT
    assert [stat.birth for stat in decision.high] == [3]


def test_at_most_a_batch_trains() -> None:
    waiting = [pilot(name, 1, birth=3) for name in "abc"]
    decision = compose([pilot("x", 0)], [rest(name, 3) for name in "abc"], waiting, size=2)
    assert len(decision.items) == 2
    assert decision.reasons["rest-c"] == Reason.NO_ROOM
    assert decision.bad == ()


def test_prompts_are_requested_in_the_steps_after_their_pilot() -> None:
    bad = [HardPrompt(prompt_id=name, birth=birth, mu=0.5) for name, birth in (("a", 3), ("b", 3), ("now", 4))]
    assert PilotCommit(SETTINGS).hard_prompts_to_ask(bad, 4, frozenset(), rng_of(4)) == ("a", "b")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("--algorithm.options.pilot_size=8", "use a smaller pilot_size"),
        ("--algorithm.use_x2=false", "and algorithm.use_x2 = true"),
        ("--cadence.wait_for_reevaluation=false", "requested twice; set cadence.wait_for_reevaluation = true"),
    ],
)
def test_settings_that_leave_nothing_to_complete_are_refused(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(["pilot-commit"], [setting])
