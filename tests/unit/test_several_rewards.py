"""Several rewards and facts: how they are written, what a response gets, and where each value goes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bapo.cli.buffer.group_files import _table
from bapo.cli.recorded.transcript import responses_as_maps, transcript
from bapo.cli.training.model_card import model_card
from bapo.config.load import dump_toml, load_config, load_resolved
from bapo.config.tree import Config, EvaluationConfig, TaskConfig
from bapo.core.batch_items import joined
from bapo.core.codec import pack_group, read_group_header, unpack_group
from bapo.core.errors import ConfigError, ContractError
from bapo.core.reward_details import mean_of_groups
from bapo.core.sequences import sequences_of
from bapo.core.types import Group, Origin, Purpose
from bapo.runtime.run_directory.responses import TokenFiles
from bapo.tasks.base import make_prompt
from bapo.tasks.grading.components import Component, components_of, grade_by_all
from bapo.tasks.grading.pool import Grades
from bapo.tasks.registry import load_task
from bapo.tasks.rewards import Verifier
from buffer_service.state import record_of
from learner.diagnostics.step_report import _reward_fields
from rollout_server.delivery import Delivery, outcome_counts
from rollout_server.rollouts.base import Rollout
from services.evaluator.loop import evaluation_row
from services.evaluator.plan import Target, measurements_of
from services.launcher.display.summary import rewards as rewards_sentence
from services.trackers.sender import measured, numbers_of
from tests.support.factories import make_batch, make_group, make_request, make_result
from tests.support.recorded_responses import token_row

PROMPT = make_prompt("sums", "1+1?", {"answer": "2"})
NAN = math.nan


def _config(reward: str) -> TaskConfig:
    return load_config([], ["--task.reward", reward]).task


def _graded(*rewards: tuple[dict[str, Any], Sequence[object]]) -> dict[str, Any]:
    """What a group gets of rewards with these settings that return these values."""
    settings = TaskConfig.model_validate({"reward": [{"function": "m:f", **own} for own, _ in rewards]})
    assert isinstance(settings.reward, tuple)

    def verifier(values: Sequence[object]) -> Verifier:
        return lambda prompt, texts: values  # type: ignore[return-value]

    components = [
        Component(verifier=verifier(values), range=own.range or settings.reward_range, settings=own)
        for own, (_, values) in zip(settings.reward, rewards, strict=True)
    ]
    return grade_by_all(components, PROMPT, [f"text {row}" for row in range(len(rewards[0][1]))])


def _detailed(**details: Sequence[float]) -> Group:
    columns = {name.replace("__", "/"): np.array(values, np.float32) for name, values in details.items()}
    return replace(make_group(rewards="10"), reward_details=columns)


# -- how they are written


@pytest.mark.parametrize(
    "text",
    [
        '[{ function = "m.py:format", weight = 0.2 }, "task"]',
        '[{"function": "m.py:format", "weight": 0.2}, {"function": "task"}]',
    ],
)
def test_a_list_is_toml_or_json_and_is_written_back(text: str, tmp_path: Path) -> None:
    config = load_config([], ["--task.reward", text])
    assert isinstance(config.task.reward, tuple)
    assert [(one.function, one.weight, one.name) for one in config.task.reward] == [
        ("m.py:format", 0.2, "format"),
        ("task", 1.0, "task"),
    ]
    (tmp_path / "c.toml").write_text(dump_toml(config))
    assert load_resolved(tmp_path / "c.toml") == config
    assert (config.task.reward_functions, config.task.has_another_reward) == (("m.py:format", "task"), False)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        ("trl:a.b.accuracy", "accuracy"),
        ("verl:rewards/dapo.py", "dapo"),
        ("m.py:_own", "own"),
        ("judge:rubrics/clear.toml", "clear"),
    ],
)
def test_a_name_is_that_of_the_function(function: str, name: str) -> None:
    (reward,) = TaskConfig.model_validate({"reward": [function]}).reward or ()
    assert not isinstance(reward, str)
    assert reward.name == name


@pytest.mark.parametrize(
    ("reward", "part"),
    [
        ("[]", "leave task.reward out"),
        ('[{ function = "m:f", wight = 1 }]', "did you mean 'weight'"),
        ('[{ function = "m:f", weight = 0 }]', "must be above 0; to record a number that does not count"),
        ('["a:f", "b:f"]', "2 rewards of the list are named 'f'"),
        ("[{ weight = 1 }]", "function"),
        ('[{ function = "m:f", range = [1, 0] }]', "low < high"),
        ("[{", "neither JSON nor TOML"),
    ],
)
def test_a_list_that_says_nothing_sure_is_refused(reward: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _config(reward)
    assert part in str(caught.value)


# -- what a response gets


def test_the_reward_is_the_mean_by_weights_that_are_divided_by_their_sum() -> None:
    answer = _graded(
        ({"name": "exact", "weight": 3.0}, [1.0, 0.0]), ({"name": "penalty", "range": (-1.0, 0.0)}, [-0.5, 0])
    )
    assert answer == {"rewards": [0.875, 0.25], "details": {"exact": [1.0, 0.0], "penalty": [0.5, 1.0]}}


def test_a_response_that_all_rewards_call_right_gets_exactly_1() -> None:
    assert _graded(*(({"name": f"r{i}", "weight": 0.1 * i}, [1.0]) for i in range(1, 9)))["rewards"] == [1.0]


def test_facts_have_the_name_of_their_reward_and_none_changes_it(capsys: pytest.CaptureFixture[str]) -> None:
    answer = _graded(
        ({"name": "a"}, [(1.0, {"length": 3, "is_long": True}), (0.0, {"length": np.float32(5), "text": "no number"})])
    )
    assert answer["rewards"] == [1.0, 0.0]
    assert answer["details"]["facts/a/length"] == [3.0, 5.0]
    assert answer["details"]["facts/a/is_long"] == [1.0, pytest.approx(NAN, nan_ok=True)]
    assert "'text' is not recorded" in capsys.readouterr().err


def test_too_many_facts_leave_the_rewards(capsys: pytest.CaptureFixture[str]) -> None:
    many = {f"fact {number}": number for number in range(70)}
    details = _graded(({"name": "a"}, [(1.0, many)]), ({"name": "b"}, [1.0]))["details"]
    assert (list(details)[:3], len(details)) == (["a", "b", "facts/a/fact 0"], 64)
    assert "'facts/a/fact 62' is not recorded" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("own", "values", "want"),
    [
        ({}, [None, None], "left 2 of 2 responses ungraded (it returned None); a reward that applies to some"),
        ({"optional": True}, [None, 1.0], "left 1 of 2 responses ungraded (it returned None)"),
    ],
)
def test_none_is_ungraded_unless_an_optional_reward_returns_it_for_the_group(
    own: dict[str, Any], values: list[float | None], want: str
) -> None:
    answer = _graded(({"name": "a"}, [1.0, 0.0]), ({"name": "b", **own}, values))
    assert (answer["ungraded"][: len(want)], answer["by"]) == (want, "m:f")


def test_an_optional_reward_that_does_not_apply_leaves_the_mean_to_the_others() -> None:
    answer = _graded(({"name": "a"}, [1.0, 0.0]), ({"name": "b", "weight": 9.0, "optional": True}, [None, None]))
    assert answer == {"rewards": [1.0, 0.0], "details": {"a": [1.0, 0.0]}}
    assert "ungraded" in _graded(({"name": "b", "optional": True}, [None]))


def test_one_that_returns_no_number_fails_the_group_by_its_name() -> None:
    answer = _graded(({"name": "a"}, [1.0]), ({"name": "b", "function": "other:g"}, [2.0]))
    assert answer["by"] == "other:g"
    assert answer["failed"].startswith("returned 2.0, which is not a number in [0, 1]")


def test_the_tasks_own_reward_is_one_of_several(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text("def half(prompt, text):\n    return 0.5\n")
    settings = TaskConfig.model_validate({"reward": ["task", f"{tmp_path}/m.py:half"]})
    task = load_task("countdown", {"num_train": 1})
    prompt = task.prompts("train")[0]
    answer = grade_by_all(components_of(task, settings), prompt, [task.gold(prompt) or "", "nothing"])
    assert answer["rewards"] == [0.75, 0.25]


def test_a_fact_whose_name_cannot_be_written_does_not_cost_the_group() -> None:
    answer = _graded(({"name": "a"}, [(1.0, {"\ud800" * 64: 1.0, "n\n": 1.0, "": 1.0, "n" * 65: 1.0, "ok": 1.0})]))
    assert answer["details"] == {"a": [1.0], "facts/a/ok": [1.0]}


def test_what_trls_functions_log_are_facts(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(
        "def f(completions, log_metric, log_extra, **kwargs):\n"
        "    log_extra('length', [len(c) for c in completions])\n"
        "    log_extra('solution', completions)\n"
        "    log_metric('share', 0.0)\n"
        "    log_metric('share', 0.5)\n"
        "    return [1.0, 0.0]\n"
    )
    settings = TaskConfig(reward=f"trl:{tmp_path}/m.py:f")
    answer = grade_by_all(components_of(load_task("countdown", {}), settings), PROMPT, ["abc", "de"])
    assert answer == {"rewards": [1.0, 0.0], "details": {"facts/share": [0.25, 0.25], "facts/length": [3.0, 2.0]}}


def test_a_column_of_trl_with_too_few_values_fails_the_group(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(
        "def f(completions, log_extra, **kw):\n    log_extra('a', [1])\n    return [1.0, 0.0]\n"
    )
    settings = TaskConfig(reward=f"trl:{tmp_path}/m.py:f")
    answer = grade_by_all(components_of(load_task("countdown", {}), settings), PROMPT, ["abc", "de"])
    assert "log_extra('a') got 1 values for 2 completions" in answer["failed"]


def test_numbers_of_verls_dicts_are_facts(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text("def compute_score(solution_str, **kw):\n    return {'score': 1, 'acc': True}\n")
    settings = TaskConfig(reward=f"verl:{tmp_path}/m.py")
    answer = grade_by_all(components_of(load_task("countdown", {}), settings), PROMPT, ["a"])
    assert answer == {"rewards": [1.0], "details": {"facts/acc": [1.0]}}


def test_a_response_with_an_agents_reward_has_no_details() -> None:
    class Grader:
        def grade(self, prompt: object, texts: Sequence[str]) -> Grades:
            return Grades(rewards=np.array([0.5], np.float32), details={"format": np.array([1.0], np.float32)})

    sequences = tuple(sequences_of(make_group(rewards="10")))
    rollout = Rollout(
        request=make_request(), prompt_token_ids=np.ones(1, np.int32), sequences=sequences, rewards=(1.0, NAN)
    )
    grades = Delivery._grades(SimpleNamespace(_grader=Grader()), rollout)  # type: ignore[arg-type]
    assert grades.rewards.tolist() == [1.0, 0.5]
    assert grades.details["format"].tolist() == [pytest.approx(NAN, nan_ok=True), 1.0]


def test_what_agents_report_besides_their_rewards_are_facts_of_their_responses() -> None:
    class Grader:
        def grade(self, prompt: object, texts: Sequence[str]) -> Grades:
            details = {"format": np.array([1.0], np.float32), "facts/steps": np.array([9.0], np.float32)}
            return Grades(rewards=np.array([0.5], np.float32), details=details)

    facts = {"facts/steps": np.array([3, NAN], np.float32), "facts/cost": np.array([NAN, 2], np.float32)}
    facts |= {f"facts/{number}": np.zeros(2, np.float32) for number in range(70)}

    def details(rewards: tuple[float, float]) -> dict[str, list[str]]:
        rollout = Rollout(
            request=make_request(),
            prompt_token_ids=np.ones(1, np.int32),
            sequences=tuple(sequences_of(make_group(rewards="10"))),
            rewards=rewards,
            facts=facts,
        )
        found = Delivery._grades(SimpleNamespace(_grader=Grader()), rollout).details  # type: ignore[arg-type]
        assert len(found) == 64
        return {name: [f"{value:g}" for value in values] for name, values in found.items()}

    graded = details((1.0, NAN))
    assert next(iter(graded)) == "format"
    assert (graded["format"], graded["facts/steps"], graded["facts/cost"]) == (["nan", "1"], ["3", "9"], ["nan", "2"])
    assert details((1.0, 0.0))["facts/steps"] == ["3", "nan"]


def test_a_busy_response_that_another_reward_gave_credit_is_not_counted_as_wrong_below_0() -> None:
    counts = outcome_counts(Grades(rewards=np.array([0.1, 1.0], np.float32), num_busy=1))
    assert counts == {"correct": 1, "wrong": 0, "busy": 0, "partial": 1}


# -- where each value goes


def test_a_group_carries_them_in_its_header() -> None:
    group = _detailed(format=[1.0, NAN], facts__length=[-3.5, 7.0])
    found = unpack_group(pack_group(group))
    assert {name: values.tolist()[0] for name, values in found.reward_details.items()} == {
        "format": 1.0,
        "facts/length": -3.5,
    }
    assert math.isnan(found.reward_details["format"][1])
    assert unpack_group(pack_group(make_group())).reward_details == {}


@pytest.mark.parametrize(
    "details",
    [
        {"a": [1.5, 0.0]},
        {"a": [1.0]},
        {"facts__a": [math.inf, 0.0]},
        {"a\n": [0.0, 0.0]},
        {f"a{i}": [0.0, 0.0] for i in range(65)},
    ],
)
def test_a_group_with_impossible_details_is_refused(details: dict[str, list[float]]) -> None:
    with pytest.raises(ContractError):
        _detailed(**details)


def test_the_record_of_a_group_has_means_over_sampled_responses() -> None:
    group = replace(
        make_group(rewards="1001", experts=(3,)),
        reward_details={"a": np.array([1, 0, NAN, 1], np.float32), "b": np.full(4, NAN, np.float32)},
    )
    record = record_of(read_group_header(pack_group(group)), 1, "d")
    assert record.reward_details == {"a": 0.5}
    assert record.result(None, "stale", 1).reward_details == {"a": 0.5}


def test_rows_of_groups_that_are_joined_keep_theirs() -> None:
    one, two = _detailed(a=[0.25, 0.75]), make_group(rewards="10")
    found = joined("item", [(one, (1,)), (two, None)]).reward_details
    assert found["a"].tolist() == [0.75, pytest.approx(NAN, nan_ok=True), pytest.approx(NAN, nan_ok=True)]


def test_a_step_reports_means_over_its_fresh_groups() -> None:
    def result(group_id: str, details: dict[str, float], **fields: Any) -> Any:
        return replace(make_result(group_id=group_id, **fields), reward_details=details)

    results = (
        result("a", {"format": 1.0, "facts/n": 10.0}),
        result("b", {"format": 0.5}, origin=None, reason="all_incorrect"),
        result("old", {"format": 0.0}, birth=0, origin=Origin.X3),
        result("again", {"format": 0.0}, purpose=Purpose.REEVALUATE),
        result("stale", {"format": 0.0}, origin=None, reason="stale"),
    )
    row = _reward_fields(replace(make_batch(), results=results))
    assert row == {"reward_parts": {"format": 0.75}, "reward_facts": {"n": 10.0}}
    assert _reward_fields(make_batch()) == {}
    assert numbers_of(row) == {"reward_parts/format": 0.75, "reward_facts/n": 10.0}
    assert rewards_sentence([{"step": 3, **row}]) == "format 0.75; n 10 in step 3"
    assert rewards_sentence([{"step": 3}]) == ""


def test_a_mean_has_all_rewards_beside_the_most_facts() -> None:
    many = {f"facts/{number}": 1.0 for number in range(70)}
    means = mean_of_groups([many, {"format": 0.5, "facts/more": 1.0}])
    assert (len(means), means["format"]) == (65, 0.5)


def test_a_measurement_has_means_over_its_responses() -> None:
    settings = EvaluationConfig(temperatures=[])
    measurement = measurements_of(["test"], settings, temperature=1.0, is_full=False)["test"]
    target = Target(version=1, num_prompts=2, is_full=False)
    groups = [_detailed(format=[1.0, 0.5]), _detailed(format=[0.0, 0.5])]
    row = evaluation_row(measurement, target, groups, num_asked=2, rollout=Config().rollout)
    assert row["reward_parts"] == {"format": 0.5}
    assert measured(row)["test/reward_parts/format"] == 0.5


def test_recorded_responses_have_their_own(tmp_path: Path) -> None:
    row = replace(token_row(0, ["a"]), reward=0.5, reward_details={"format": 1.0, "facts/n": 2.0})
    files = TokenFiles(tmp_path)
    files.write(1, [[row]])
    (read,) = files.read_group(1, row.group_id)
    assert read == row
    assert any("reward 0.5 (format 1; n 2)" in line.plain for line in transcript([read]))
    (shown,) = responses_as_maps([[read]])
    assert (shown["reward_parts"], shown["reward_facts"]) == ({"format": 1.0}, {"n": 2.0})


def test_an_export_of_the_buffer_has_them_as_json() -> None:
    table = _table([_detailed(format=[1.0, NAN])], [["high"]])
    assert json.loads(table["reward_details"][0].as_py()) == {"format": [1.0, None]}


def test_the_card_of_a_model_names_them_with_their_weights() -> None:
    config = load_config([], ["--task.reward", '[{ function = "m.py:f", weight = 0.2 }, "judge:r.toml"]'])
    card = model_card("me/it", config, 1, [], is_adapter=False)
    assert "- reward: weighted mean of `m.py:f` (0.2), `judge:r.toml` (1)\n" in card
