"""What the overview shows, from records small enough to check by eye."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bapo.analysis.whatif.history import History
from bapo.analysis.whatif.recording import RecordedStep
from bapo.config.load import load_resolved
from bapo.config.tree import Config
from bapo.core.errors import ContractError
from bapo.core.types import Fate, Origin, Purpose
from bapo.runtime.run_directory.files import Lines
from bapo.runtime.run_directory.layout import RunDirectory
from services.dashboard.endpoints import ENDPOINTS, Endpoint, ask, view_of
from services.dashboard.overview import PromptVisits, table_ages
from services.dashboard.run_view import RunView
from tests.support.synthetic_runs import fate, metrics_row, write_run

CONFIG = Config.model_validate(
    {"algorithm": {"batch_size": 4, "group_size": 4}, "learner": {"minibatch_size": 4}, "rollout": {"num_workers": 1}}
)


OVERVIEW = next(endpoint for endpoint in ENDPOINTS if endpoint.name == "overview")


def visit(prompt: str, rewards: str, step: int, **fields: Any) -> Fate:
    return fate(prompt, rewards, step=step, birth=step, **fields)


VISITS = {
    # a: 0 right, then 2, then 0 again; b: 1 right, then 3; c: 0 right, then 1; d comes once.
    1: [visit("a", "0000", 1), visit("b", "1000", 1, origin=Origin.X1), visit("c", "0000", 1)],
    2: [
        visit("c", "0100", 2, purpose=Purpose.REEVALUATE, origin=Origin.X2),
        fate("b", "1000", step=1, birth=1, origin=Origin.X3, reason="reused"),
        visit("d", "1111", 2),
    ],
    3: [visit("a", "0110", 3, origin=Origin.X1), visit("b", "0111", 3, origin=Origin.X1), visit("c", "0001", 3)],
    4: [visit("a", "0000", 4)],
}


def folded(kind: Any) -> dict[str, list[Any]]:
    fold = kind(CONFIG)
    for step, fates in VISITS.items():
        fold.advance(RecordedStep(step=step, fates=tuple(fates), metrics=metrics_row(step)))
    return fold.columns(0)  # type: ignore[no-any-return]


def test_bins_count_fresh_groups_of_the_step_and_no_reused_or_re_evaluated_ones() -> None:
    assert folded(PromptVisits)["bins"] == [[2, 1, 0, 0, 0], [0, 0, 0, 0, 1], [0, 1, 1, 1, 0], [1, 0, 0, 0, 0]]


def test_the_matrix_moves_a_prompt_from_its_last_bin_to_its_new_one() -> None:
    found = folded(PromptVisits)
    # Cells are first * 5 + last: c 0 -> 1, a 0 -> 2, b 1 -> 3; then a is back at 0.
    assert found["moved"] == [[], [], [1, 1, 2, 1, 8, 1], [0, 1, 2, -1]]
    assert found["revisited"] == [0, 0, 3, 3]


def test_a_rescued_prompt_names_what_trained_it_before_and_is_none_when_it_fails_again() -> None:
    found = folded(PromptVisits)
    assert found["unsolved"] == [0, 0, 2, 2]
    # At its second visit nothing of a had been trained; c had been trained as X2.
    assert found["attribution"] == [{}, {}, {"none of them": 1, "x2": 1}, {"x2": 1}]
    assert found["rescued"] == [0, 0, 2, 1]


def test_ages_are_those_of_the_replayed_tables() -> None:
    """a, c are hard from step 1 and are put in anew when they are seen again; sizes as the run recorded them."""
    fold = History(CONFIG)
    hard = [visit("a", "0000", 1, reason="all_wrong"), visit("c", "0000", 1, reason="all_wrong")]
    fold.advance(
        RecordedStep(step=1, fates=tuple(hard), metrics=metrics_row(1, reward_mean=0.0, num_bad=2, num_high=0))
    )
    later = [visit("e", "0000", 2, reason="all_wrong"), visit("f", "0011", 2, origin=Origin.X1)]
    fold.advance(RecordedStep(step=2, fates=tuple(later), metrics=metrics_row(2, num_bad=3)))
    found = table_ages(fold, 0)
    assert [ages[:3] for ages in found["bad_ages"]] == [[2, 0, 0], [1, 2, 0]]
    assert found["bad_oldest"] == [0, 1]


def test_ages_are_unknown_where_the_records_are_none_that_a_composer_can_do_with() -> None:
    fold = History(CONFIG)
    only_old = (fate("a", "0110", step=1, birth=1),)
    fold.advance(RecordedStep(step=2, fates=only_old, metrics=metrics_row(2)))
    assert table_ages(fold, 0)["bad_ages"] == [None]


# -- following a run
def whole(view: RunView, endpoint: Endpoint = OVERVIEW, **query: Any) -> dict[str, Any]:
    while not (found := ask(view, endpoint, **query))["is_complete"]:
        pass
    return found


def viewed(run: RunDirectory) -> RunView:
    return view_of(run, load_resolved(run.config_path))


def test_a_line_that_is_being_written_is_left_for_later(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    lines = Lines(path, None)
    assert list(lines.read()) == []
    path.write_text('{"a": 1}\n{"a"')
    assert list(lines.read()) == [{"a": 1}]
    with path.open("a") as file:
        file.write(': 2}\n{"a": 3}\n')
    assert list(lines.read()) == [{"a": 2}, {"a": 3}]
    assert not lines.is_another_file()
    path.unlink()
    assert lines.is_another_file()


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\nnonsense\n')
    with pytest.raises(ContractError, match=r"rows\.jsonl line 2 is not JSON"):
        list(Lines(path, None).read())


def test_groups_that_cannot_be_read_are_named_and_the_curves_stay(tmp_path: Path) -> None:
    run = write_run(tmp_path / "mine", metrics=[metrics_row(1, x1=3)])
    found = whole(viewed(run))
    assert "groups of step 1 cannot be read" in found["problem"]
    assert (found["steps"]["x1"], found["steps"]["bins"], found["steps"]["bad_ages"]) == ([3], [None], [None])
