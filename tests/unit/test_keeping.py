"""The best checkpoints are kept, and a run ends when held-out measurements no longer improve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bapo.algorithms.settings import CadenceConfig
from bapo.cli.app import app
from bapo.cli.running.runs import state_of
from bapo.cli.training.model_card import model_card
from bapo.config.load import dump_toml, load_config
from bapo.config.tree import Config
from bapo.core.errors import ConfigError
from bapo.core.types import Batch, Progress
from bapo.runtime.run_directory.best import Measured, best_first, best_of, last_improvement, measured, scope_of
from bapo.runtime.run_directory.layout import RunDirectory
from learner.checkpoint import complete_steps
from learner.loop import Learner
from services.evaluator.plan import final_version, measurements_of, next_target
from services.launcher.display.summary import summary
from services.stalls import blocked_on
from tests.support.learner import FakeBuffer, FakeFleet, FakeRecords, learner_config, make_test_learner, random_batch
from tests.support.run_rows import easy_first, make_evaluation, make_row
from tests.unit.test_launcher_display import drawn
from tests.unit.test_scheduler import STATUS


def means(*values: float) -> list[Measured]:
    return [Measured(split="easy", step=10 * number, mean=mean) for number, mean in enumerate(values)]


def test_weights_are_compared_over_the_prompts_that_all_measurements_have() -> None:
    rewards = [{"a": [1, 1], "b": [0, 0], "c": [1, 1], "d": [1, 1]}, {"a": [1, 1], "b": [1, 0]}]
    rows = [make_evaluation("easy", 1, 0.75, rewards=rewards[0]), make_evaluation("hard", 1, 0.1, rewards={"z": [0]})]
    rows += [make_evaluation("easy", 31, 0.75, rewards=rewards[1])]
    assert measured(rows, None) == [
        Measured(split="easy", step=0, mean=0.5),  # of a and b: (1 + 0) / 2
        Measured(split="easy", step=30, mean=0.75),
    ]
    assert [one.step for one in best_first(measured(rows, None))] == [30, 0]
    assert [(one.step, one.mean) for one in measured(rows, "hard")] == [(0, 0.0)]


def test_a_measurement_that_mostly_failed_chooses_nothing() -> None:
    rows = [
        make_evaluation(
            "easy", version, mean, rewards={str(i): [float(i < 10 * mean)] for i in range(10)}, num_prompts=10
        )
        for version, mean in ((1, 0.1), (11, 0.5), (21, 0.3))
    ]
    away = make_evaluation("easy", 31, 0.0, rewards={"9": [0.0]}, num_prompts=1, num_dropped=9)
    assert [(one.step, one.mean) for one in measured([*rows, away], None)] == [(0, 0.1), (10, 0.5), (20, 0.3)]


def test_the_best_says_which_weights_have_sampled_it() -> None:
    first = make_evaluation("easy", 1, 0.1, rewards={"a": [0.1]}, versions=[1, 1])
    later = make_evaluation("easy", 31, 0.5, rewards={"a": [0.5]}, versions=[32, 33])
    best = best_of([first, later], None)
    assert best is not None
    assert (best.step, best.sampled_after) == (30, (31, 32))
    assert scope_of(best, [first, later]) == " (sampled by the weights after steps 31 to 32)"
    own = best_of([first, later | {"versions": [31, 31]}], None)
    assert own is not None
    assert scope_of(own, [first, later]) == ""


def test_of_equal_measurements_the_earlier_is_the_better() -> None:
    assert [one.step for one in best_first(means(0.25, 0.5, 0.5))] == [10, 20, 0]


@pytest.mark.parametrize(
    ("values", "least", "last"),
    [
        ((0.2,), 0.0, 0),
        ((0.2, 0.2), 0.0, 0),  # not higher
        ((0.2, 0.3, 0.25, 0.31), 0.0, 3),
        ((0.2, 0.3, 0.25, 0.305), 0.01, 1),
        ((0.2, 0.205, 0.209, 0.215), 0.01, 3),  # little by little
    ],
)
def test_the_last_improvement(values: tuple[float, ...], least: float, last: int) -> None:
    assert last_improvement(means(*values), least) == last


@pytest.mark.parametrize(
    ("v", "every", "versions"),
    [(1, 10, [11, 21, 31]), (6, 10, [12, 24, 36]), (5, 5, [10, 15, 20, 25, 30, 35, 40]), (20, 10, [20, 40])],
)
def test_the_versions_that_will_be_measured(v: int, every: int, versions: list[int]) -> None:
    cadence = CadenceConfig(weight_sync_interval=v, reevaluation_interval=v)
    assert [version for version in range(1, 41) if cadence.is_first_after(version, every)] == versions


def keeping(model_path: Path, **sections: Mapping[str, Any]) -> Config:
    values: dict[str, Mapping[str, Any]] = {
        "run": {"num_steps": 12},
        "cadence": {"weight_sync_interval": 1, "reevaluation_interval": 1, "max_steps_ahead": 0},
        "checkpoint": {"every": 4, "keep_last": 1, "keep_best": 1},
        "evaluation": {"every": 2},
    }
    return learner_config(model_path, **(values | sections))


def trained(config: Config, path: Path, arrives: Mapping[int, tuple[int, float]]) -> tuple[Learner, FakeBuffer]:
    """A finished learner.

    Args:
        arrives: step -> (version, mean) of the measurement that is written while the learner waits for its batch.
    """
    path.mkdir(exist_ok=True)
    run = RunDirectory(path)

    def make(step: int) -> Batch:
        if step in arrives:
            run.append_evaluation(make_evaluation("easy", *arrives[step]))
        return random_batch(step=step, num_groups=2)

    buffer = FakeBuffer(make)
    learner = make_test_learner(config, path, buffer=buffer, fleet=FakeFleet())
    learner.run(1)
    return learner, buffer


FALLING = {1: (1, 0.2), 4: (3, 0.5), 6: (5, 0.4), 8: (7, 0.3), 10: (9, 0.3), 12: (11, 0.3)}


def test_a_run_without_patience_keeps_its_best_checkpoint_and_its_last(model_path: Path, tmp_path: Path) -> None:
    learner, buffer = trained(keeping(model_path), tmp_path / "run", FALLING)
    assert complete_steps(tmp_path / "run/checkpoints") == [2, 12]
    assert learner.checkpoints.oldest_kept == 12  # batches are not kept for the best
    assert buffer.told[-1] == ("progress", (13, 13))


def test_a_checkpoint_waits_for_its_measurement(model_path: Path, tmp_path: Path) -> None:
    late = {1: (1, 0.2), 11: (3, 0.5)}
    seen: dict[int, list[int]] = {}
    path = tmp_path / "run"
    config = keeping(model_path, run={"num_steps": 8})
    path.mkdir()

    def make(step: int) -> Batch:
        seen[step] = complete_steps(path / "checkpoints")
        return random_batch(step=step, num_groups=2)

    RunDirectory(path).append_evaluation(make_evaluation("easy", *late[1]))
    make_test_learner(config, path, buffer=FakeBuffer(make), fleet=FakeFleet()).run(1)
    assert (seen[3], seen[5], seen[7], seen[8]) == ([2], [2, 4], [2, 4, 6], [2, 4, 6])
    RunDirectory(path).append_evaluation(make_evaluation("easy", 5, 0.1))
    held_out = make_test_learner(config, path, buffer=FakeBuffer(make), fleet=FakeFleet()).held_out
    assert held_out.kept([2, 4, 6, 8]) == {4, 6, 8}  # nothing measures version 3 any more


def test_without_keep_best_only_the_last_stay(model_path: Path, tmp_path: Path) -> None:
    config = keeping(model_path, checkpoint={"every": 4, "keep_last": 2})
    trained(config, tmp_path / "run", FALLING)
    assert complete_steps(tmp_path / "run/checkpoints") == [8, 12]


def test_a_run_ends_after_patience_measurements_without_improvement(model_path: Path, tmp_path: Path) -> None:
    config = keeping(model_path, evaluation={"every": 2, "patience": 2})
    learner, buffer = trained(config, tmp_path / "run", FALLING)
    assert isinstance(learner.records, FakeRecords)
    assert [row.get("ended") for row in learner.records.rows] == [None] * 7 + [
        "no improvement in 2 measurements of easy since step 2 (50.0 %)"
    ]
    assert complete_steps(tmp_path / "run/checkpoints") == [2, 8]
    # Weights of step 8 are version 9; step T + 1 ends scheduler and evaluator.
    assert buffer.told[-2:] == [("commit", (8, 8)), ("progress", (13, 9))]


def test_a_learner_that_resumes_at_the_end_trains_nothing_and_reports_it_again(
    model_path: Path, tmp_path: Path
) -> None:
    config = keeping(model_path, evaluation={"every": 2, "patience": 2})
    buffer = FakeBuffer(lambda step: random_batch(step=step))
    learner = make_test_learner(config, tmp_path, buffer=buffer, fleet=FakeFleet())
    learner.ended = "as its last row says"
    learner.run(9)
    assert buffer.told == [("progress", (13, 9))]


def test_a_restarted_learner_does_not_end_by_what_was_measured_of_later_weights(
    model_path: Path, tmp_path: Path
) -> None:
    config = keeping(model_path, evaluation={"every": 2, "patience": 2})
    learner, _ = trained(config, tmp_path / "run", FALLING)
    assert learner.held_out.reason_to_end(6) != ""
    assert learner.held_out.reason_to_end(5) == ""
    assert learner.held_out.reason_to_end(12) == ""  # the last step anyway


def test_the_last_weights_of_a_run_that_ended_early_are_measured_wholly() -> None:
    config = Config.model_validate({"run": {"num_steps": 40}, "evaluation": {"every": 10}})
    ended = Progress(step=41, policy_version=24)
    assert (final_version(ended, 40), final_version(Progress(step=24, policy_version=24), 40)) == (24, None)
    target = next_target(ended, (1, 12), num_steps=40, settings=config.evaluation, cadence=config.cadence)
    assert target is not None
    assert (target.version, target.num_prompts, target.is_full) == (24, 1000, True)
    done = replace(STATUS, step=41, policy_version=24, assembled_step=23, committed_step=23)
    assert blocked_on(done, 8, 40).startswith("training is done")


def test_with_keep_best_a_late_evaluator_skips_weights_that_have_no_checkpoint() -> None:
    config = Config.model_validate({"cadence": {"weight_sync_interval": 1, "reevaluation_interval": 1}})
    settings = config.evaluation.model_copy(update={"every": 10})
    for step, version in ((11, 11), (13, None), (21, 21)):
        progress = Progress(step=step, policy_version=step)
        target = next_target(progress, (1,), num_steps=40, settings=settings, cadence=config.cadence, skips_late=True)
        assert (target.version if target else None) == version


def test_the_measure_of_the_best_is_measured_during_the_run_too() -> None:
    settings = Config.model_validate({"evaluation": {"best_measure": "easy@0.3"}}).evaluation
    assert [*measurements_of(("easy", "hard"), settings, temperature=1.0, is_full=False)] == [
        "easy",
        "hard",
        "easy@0.3",
    ]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["--checkpoint.keep_best", "1", "--evaluation.every", "0"], "nothing is measured during the run"),
        (["--evaluation.patience", "3", "--evaluation.every", "0"], "nothing is measured during the run"),
        (
            ["--evaluation.patience", "3", "--run.deterministic", "true", "--cadence.max_steps_ahead", "0"],
            "depend on when a measurement arrives",
        ),
    ],
)
def test_what_could_not_choose_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(["bapo"], overrides)


def test_a_measure_must_be_one_of_the_task() -> None:
    settings = load_config(["bapo"], ["--evaluation.best_measure", "esy"]).evaluation
    with pytest.raises(ConfigError, match=r"did you mean 'easy'"):
        settings.require_splits(("easy",), 1.0)
    settings = load_config(["bapo"], ["--evaluation.patience", "3"]).evaluation
    with pytest.raises(ConfigError, match="no held-out split"):
        settings.require_splits((), 1.0)


@pytest.fixture
def ended(tmp_path: Path) -> RunDirectory:
    """A run that ended after step 8 of 100, best at step 4."""
    config = load_config(["bapo"], ["--run.num_steps", "100", "--checkpoint.keep_best", "1"])
    run = RunDirectory.create(tmp_path / "run", dump_toml(config))
    for step in range(1, 9):
        run.append_metrics(make_row(step, **({"ended": "no improvement"} if step == 8 else {})))
    for version, mean in ((1, 0.2), (5, 0.5), (9, 0.4)):
        run.append_evaluation(make_evaluation("easy", version, mean))
    return run


def keep(run: RunDirectory, *steps: int) -> None:
    for step in steps:
        run.checkpoint_dir(step).mkdir()
        (run.checkpoint_dir(step) / "state.json").write_text("{}")
        (run.checkpoint_dir(step) / "hf").mkdir()


def test_the_best_mean_says_where_it_is_not_that_of_its_own_evaluation() -> None:
    # After step 8 a second prompt was measured, too: 0.9 and 0.1, so 50 % alone and 90 % of what all have.
    row = make_evaluation("easy", 9, 0.5) | {"rewards": {"a": [0.9], "b": [0.1]}}
    first = make_evaluation("easy", 1, 0.2) | {"rewards": {"a": [0.2]}}
    best = best_of([first, row], None)
    assert best is not None
    assert (best.step, best.mean) == (8, pytest.approx(0.9))
    assert scope_of(best, [first, row]) == " over the prompts that all have"
    assert scope_of(best, [first, row | {"accuracy": 0.9}]) == ""


def test_tables_say_why_a_run_ended_and_which_weights_are_the_best(ended: RunDirectory) -> None:
    keep(ended, 4, 8)
    state = state_of(ended)
    assert (state.state, state.ended, state.best_step, state.best_mean) == ("finished", "no improvement", 4, 0.5)
    text = CliRunner().invoke(app, ["status", str(ended.path)]).output
    assert "after step 8: no improvement" in text
    assert "easy after step 4: 50.0 %" in text
    config = load_config([str(ended.config_path)], [])
    shown = "\n".join(drawn(summary(ended, config), 400))
    assert "after step 8 of 100: no improvement" in shown
    assert "after step 4: easy 50.0 %, the highest of 3 measurements, so partly luck" in shown


def test_the_card_of_a_model_says_which_weights_have_sampled_a_measurement() -> None:
    rows = [make_evaluation("easy", 1, 0.25, versions=[1, 1])]
    rows += [make_evaluation("easy", 31, 0.5, versions=[32, 34]), make_evaluation("hard", 31, 0.5, versions=[31, 31])]
    card = model_card("me/it", load_config([], []), 30, rows, is_adapter=False)
    cells = {line.split(" | ")[0]: line.split(" | ")[3:5] for line in card.splitlines() if "200 x 2" in line}
    assert cells == {
        "| easy": ["25.0 % [23.0, 27.0]", "50.0 % [48.0, 52.0] (sampled by the weights after steps 31 to 33)"],
        "| hard": ["not measured", "50.0 % [48.0, 52.0]"],
    }


def test_the_card_compares_with_the_base_model_on_the_prompts_of_the_measurement() -> None:
    card = model_card(
        "me/it",
        load_config([], []),
        4,
        [one | {"versions": [one["version"]] * 2} for one in easy_first()],
        is_adapter=False,
    )
    (row,) = (line for line in card.splitlines() if line.startswith("| easy"))
    # All 4 responses: Wilson's interval for 2 prompts begins at 2 / (2 + 1.96^2). The changes are 0 and -1/2.
    assert row.split(" | ")[2:] == ["2 x 2", "100.0 % [34.2, 100.0]", "75.0 % [73.0, 77.0]", "-25.0 [-74.0, +24.0] |"]


def refused(*arguments: str) -> str:
    error = CliRunner().invoke(app, arguments).exception
    assert isinstance(error, ConfigError)
    return str(error)


def test_export_takes_the_best_checkpoint_or_says_why_there_is_none(ended: RunDirectory) -> None:
    run = str(ended.path)
    keep(ended, 8)
    words = refused("export", run, "--best")
    assert "the weights after step 4 measured best (easy 50.0 %), but have no checkpoint" in words
    assert "--step 8 (40.0 %)" in words
    keep(ended, 4)
    result = CliRunner().invoke(app, ["export", run, "--best"])
    assert result.output.strip() == str(ended.checkpoint_dir(4) / "hf")
    assert "both choose a checkpoint" in refused("export", run, "--best", "--step", "4")
    ended.append_evaluation(make_evaluation("easy", 1, 0.9))
    assert "the base model measured best" in refused("export", run, "--best")
