"""One meaning of "correct" everywhere: reward 1. With partial credit a mean is called mean reward, never accuracy.

One recorded run with rewards {0, .1, 1}. By hand, before training: p [.1 .1 0 0], q [0 0 0 0]: mean .2 / 8 = 2.5 %,
pass@1 0 %. After: p [1 .1 .1 0], q [.1 .1 0 0]: mean 1.4 / 8 = 17.5 %; one response of 8 is correct: pass@1
(1/4 + 0) / 2 = 12.5 %, pass@2 (1 - C(3,2) / C(4,2)) / 2 = (1 - 3/6) / 2 = 25 %, pass@4 1/2 = 50 %.
"""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from bapo.cli.running.runs import state_of
from bapo.config.tree import Config
from bapo.core.correctness import has_partial_credit, pass_at_k, pass_sizes
from bapo.runtime.run_directory.layout import RunDirectory
from services.dashboard.overview import held_out
from services.launcher.display.console import evaluation_line
from services.launcher.display.summary import evaluation_summary, summary
from services.launcher.display.table import accuracies
from services.trackers.sender import measured
from tests.support.run_rows import easy_first
from tests.support.synthetic_runs import evaluation_row, write_run

BEFORE = {"p": [0.1, 0.1, 0.0, 0.0], "q": [0.0, 0.0, 0.0, 0.0]}
AFTER = {"p": [1.0, 0.1, 0.1, 0.0], "q": [0.1, 0.1, 0.0, 0.0]}


def row_of(rewards: dict[str, list[float]], version: int) -> dict[str, Any]:
    every = [reward for own in rewards.values() for reward in own]
    plain = evaluation_row("hard", version, {"p": "0000", "q": "0000"})
    return plain | {"rewards": rewards, "accuracy": sum(every) / len(every)}


@pytest.fixture
def partial(tmp_path: Path) -> RunDirectory:
    return write_run(tmp_path / "mine-s1", evaluations=[row_of(BEFORE, 1), row_of(AFTER, 3)])


def drawn(content: RenderableType, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), highlight=False)
    console.print(content)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_and_the_lines_say_mean_reward(partial: RunDirectory) -> None:
    rows = partial.read_evaluations()
    assert list(accuracies(rows)) == ["hard mean reward 2.5 % -> 17.5 % (step 2)"]
    assert evaluation_line(rows[-1], "mean reward").startswith("held-out hard at step 2: mean reward 17.5 % [")
    state = state_of(partial)
    assert (state.accuracies, state.measures) == ({"hard": pytest.approx(0.175)}, {"hard": "mean reward"})


def test_the_summary_and_bapo_eval_say_mean_reward_and_pass_at_k_with_its_threshold(partial: RunDirectory) -> None:
    for text in (
        drawn(summary(partial, Config.model_validate({"algorithm": {"group_size": 4}}))),
        drawn(evaluation_summary(partial)),
    ):
        assert "17.5 %" in text
        assert "mean reward" in text
        assert "accuracy" not in text
        assert "hard, step 0   0.0 %   0.0 %   0.0 %" in text
        assert "hard, step 2  12.5 %  25.0 %  50.0 %" in text
        assert "a response passes with reward 1" in text
        assert max(map(len, text.splitlines())) <= 80
    assert re.search(r"hard +1 +17\.5 % .* avg@4 ", text), "at its temperature, and a mean over its responses"


def test_the_page_says_mean_reward_and_counts_a_prompt_as_passed_from_reward_one(partial: RunDirectory) -> None:
    (split,) = held_out(partial.read_evaluations())
    assert split["measure"] == "mean reward"
    assert split["accuracy"] == [0.025, 0.175]
    assert split["passed"] == [0.0, 0.5]
    assert split["matrices"][1] == [[1, 1, 0, 0, 0], *([[0] * 5] * 4)]  # p: 0 -> 1 correct, q: 0 -> 0


def test_trackers_get_an_accuracy_only_for_rewards_of_zero_and_one(partial: RunDirectory) -> None:
    assert "hard/accuracy" not in measured(partial.read_evaluations()[-1])
    assert measured(partial.read_evaluations()[-1])["hard/mean_reward"] == pytest.approx(0.175)
    binary = measured(evaluation_row("easy", 1, {"p": "1000"}))
    assert (binary["easy/accuracy"], binary["easy/mean_reward"]) == (0.25, 0.25)


def test_the_summary_of_a_stopped_run_is_over_the_prompts_that_were_measured_twice(tmp_path: Path) -> None:
    run = write_run(tmp_path / "mine-s1", evaluations=easy_first(sampling={"temperature": 1.0}))
    (line,) = (line for line in drawn(summary(run, Config()), 120).splitlines() if line.startswith("easy"))
    assert re.split(" {2,}", line.strip()) == [
        "easy",
        "100.0 % [34.2, 100.0]",
        "75.0 % [73.0, 77.0]",
        "-25.0 [-74.0, +24.0]",
    ]


def test_rounding_of_zero_and_one_is_no_partial_credit() -> None:
    assert not has_partial_credit([0.0, 1.0, 1e-9, 1 - 1e-7])
    assert has_partial_credit([0.0, 0.1])


@pytest.mark.parametrize(
    ("rewards", "k", "expected"),
    [
        ([1, 0, 0, 0], 1, 1 / 4),
        ([1, 0, 0, 0], 2, 1 / 2),
        ([1, 1, 0, 0], 2, 5 / 6),
        ([1, 0.1, 0], 3, 1.0),
        ([0.9], 1, 0),
    ],
)
def test_pass_at_k_is_unbiased(rewards: list[float], k: int, expected: float) -> None:
    assert pass_at_k(rewards, k) == pytest.approx(expected)


def test_k_goes_up_to_the_number_of_responses() -> None:
    assert [pass_sizes(n) for n in (1, 2, 6, 8)] == [(1,), (1, 2), (1, 2, 4, 6), (1, 2, 4, 8)]
