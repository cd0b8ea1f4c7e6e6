"""The history of each prompt of V10, against what the vector says by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bapo.analysis.whatif.history import History
from bapo.analysis.whatif.recording import RecordedStep
from bapo.analysis.whatif.simulation import as_recorded
from bapo.core.types import Origin
from tests.support.whatif import FRESH, fresh_fate, recording_of, trace_config, trace_fates


def recorded_steps() -> tuple[RecordedStep, ...]:
    """V10, with the draw of step 4 that the vector leaves open."""
    fates = [trace_fates(step) for step in range(1, 5)]
    drawn = as_recorded(recording_of(fates))[3].decision.x3
    for group_id in drawn:
        _, born, prompt = group_id.split("-")
        fates[3].append(fresh_fate(prompt, FRESH[int(born) - 1][prompt], int(born), "reused", Origin.X3))
    return recording_of(fates).steps


@pytest.fixture
def history() -> History:
    found = History(trace_config())
    for step in recorded_steps():
        found.advance(step)
    assert found.differs == ""
    return found


def story(history: History, prompt_id: str) -> list[tuple[int, str, str]]:
    return [(event.step, event.table, event.change) for event in history.transitions(prompt_id)]


def test_a_hard_prompt_enters_is_asked_again_improves_and_leaves(history: History) -> None:
    first, second = history.visits("a")
    assert (first.step, first.kind, first.stat.mu, first.fate.origin) == (1, "fresh", 0.0, None)
    assert (second.step, second.kind, second.stat.mu, second.fate.origin) == (2, "reevaluated", 3 / 8, "x2")
    assert "c1 = 0.125 < mu' = 0.375 < 1" in second.sentence
    entered, left = history.transitions("a")
    assert (entered.step, entered.table, entered.change) == (1, "bad", "entered")
    assert entered.sentence == "fresh group with mu = 0 <= c1 = 0.125"
    assert (left.step, left.table, left.change) == (2, "bad", "left")
    assert left.sentence.startswith("trained as X2:")


def test_a_prompt_that_is_solved_leaves_untrained(history: History) -> None:
    left = history.transitions("h")[-1]
    assert (left.step, left.change) == (4, "left")
    assert left.sentence.startswith("solved:")
    assert history.visits("h")[-1].fate.origin is None


def test_a_reusable_group_enters_trains_again_and_leaves_when_it_is_too_old(history: History) -> None:
    visits = history.visits("b")
    assert [(visit.step, visit.kind) for visit in visits[:3]] == [(1, "fresh"), (2, "reused"), (3, "reused")]
    assert visits[1].stat.birth == 1
    assert "c2 = 0.25 <= mu = 0.25 <= c3 = 0.5" in visits[1].sentence
    assert story(history, "b") == [(1, "high", "entered"), (4, "high", "left")]
    assert history.transitions("b")[0].sentence == "fresh group with c2 = 0.25 <= mu = 0.25 <= c3 = 0.5"
    assert history.transitions("b")[1].sentence == "too old: 4 - 1 = 3 >= 3 = high_window steps"


def test_the_tables_of_now_are_those_of_the_vector(history: History) -> None:
    sizes = {name: len(ids) for name, ids in history.tables_now().items()}
    assert sizes == {"bad": 2, "high": 3}
    assert history.num_steps == 4
    assert len(history.prompt_ids) == len(set("abcdefghijklmnopqrsuvwxy"))


def test_a_recording_that_the_replay_does_not_give_tells_visits_and_no_tables() -> None:
    history = History(trace_config())
    steps = recorded_steps()
    wrong = replace(steps[0], fates=tuple(replace(fate, reason="filtered") for fate in steps[0].fates))
    history.advance(wrong)
    history.advance(steps[1])
    assert "since step 1" in history.differs
    assert [visit.step for visit in history.visits("a")] == [1, 2]
    assert history.visits("a")[0].sentence == "recorded as 'filtered'"
    assert history.transitions("a") == []
    assert not any(history.tables_now().values())
