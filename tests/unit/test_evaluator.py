"""When the evaluator measures, and what it writes."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bapo.config.tree import Config, EvaluationConfig
from bapo.core.codec import request_from_map
from bapo.core.errors import ConfigError, ContractError, DeadlineError, UnavailableError
from bapo.core.json_values import to_map
from bapo.core.types import Group, Progress, Prompt, Purpose, RolloutRequest
from bapo.runtime.metrics.server import Telemetry
from bapo.runtime.process import Flags
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.tasks.base import Task
from bapo.transport.buffer_client import BufferStatus
from services.evaluator import __main__ as process
from services.evaluator.loop import Evaluator
from services.evaluator.majority import MajorityVote, majority_reward
from services.evaluator.plan import Target, due_budget, measurements_of, next_target, requests_of
from tests.support.factories import make_group, make_prompt, make_request
from tests.unit.test_scheduler import STATUS

SETTINGS = EvaluationConfig(every=10, num_prompts=2, num_prompts_final=3, num_samples=4, temperatures=[])
CONFIG = Config.model_validate(
    {
        "run": {"num_steps": 40},
        "cadence": {"weight_sync_interval": 6, "reevaluation_interval": 6},
        "evaluation": SETTINGS.model_dump(),
    }
)


@pytest.mark.parametrize(
    ("step", "version", "measured", "want"),
    [
        (0, 0, (), 1),  # before the learner's first word: the base model is there
        (3, 1, (), 1),
        (3, 1, (1,), None),
        (6, 6, (1,), None),  # five steps behind version 6
        (12, 12, (1,), 12),  # the first version behind ten steps
        (12, 12, (), 12),  # the base was missed: its weights are gone
        (18, 18, (1, 12), None),
        (24, 24, (1, 12), 24),
        (16, 15, (1,), 12),  # resumed behind step 15: version 15 never was, and the workers get 12 again
        (24, 23, (1, 12), None),  # resumed behind step 23, with version 18
        (36, 36, (1, 12), 36),
        (41, 41, (1, 36), 41),  # T + 1
        (41, 41, (1, 36, 41), None),
    ],
)
def test_the_versions_that_are_measured(step: int, version: int, measured: tuple[int, ...], want: int | None) -> None:
    progress = Progress(step=step, policy_version=version)
    target = next_target(progress, measured, num_steps=40, settings=SETTINGS, cadence=CONFIG.cadence)
    assert (target.version if target else None) == want


def test_every_zero_measures_only_before_and_after() -> None:
    settings = SETTINGS.model_copy(update={"every": 0})
    assert (
        next_target(Progress(step=30, policy_version=30), (1,), num_steps=40, settings=settings, cadence=CONFIG.cadence)
        is None
    )


class TwoSplits(Task):
    """A task with two held-out splits of five prompts."""

    name = "fake"
    held_out_splits: tuple[str, ...] = ("easy", "hard")

    def prompts(self, split: str) -> Sequence[Prompt]:
        return [make_prompt(prompt_id=f"{split}{i}") for i in range(5)]

    def reward(self, prompt: Prompt, text: str) -> float:
        raise AssertionError("the workers grade")

    def gold(self, prompt: Prompt) -> str | None:
        return None


def test_without_a_held_out_split_it_ends_before_anything_watches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory.create(tmp_path / "run")
    task = TwoSplits()
    task.held_out_splits = ()
    monkeypatch.setattr(process, "task_of", lambda config: task)
    process.main(Flags(config=Config(), run=run, extra=Namespace(buffer_url=None, once=False)))
    assert run.read_port("evaluator") is None


class FakeBuffer:
    """Answers evaluation requests at once, but for the prompts that always fail."""

    def __init__(self, progress: Sequence[Progress], *, failing: Sequence[str] = (), settles: bool = True) -> None:
        self._progress = list(progress)
        self._failing = failing
        self._settles = settles
        self.asked: dict[str, list[RolloutRequest]] = {}
        self.forgotten: list[str] = []

    def progress(self) -> Progress:
        return self._progress.pop(0) if len(self._progress) > 1 else self._progress[0]

    def status(self) -> BufferStatus:
        held = {label: requests for label, requests in self.asked.items() if label not in self.forgotten}
        settled = {label: len(requests) if self._settles else 1 for label, requests in held.items()}
        return replace(STATUS, evaluations=settled)

    def enqueue(self, requests: Sequence[RolloutRequest], *, cursor: int | None = None) -> int:
        assert cursor is None
        self.asked[requests[0].label] = list(requests)
        return len(requests)

    def collect(self, label: str) -> list[Group]:
        return [
            make_group(rewards="1000", prompt=request.prompt, version=request.min_version)
            for request in self.asked[label]
            if request.prompt.prompt_id not in self._failing
        ]

    def forget(self, label: str) -> None:
        self.forgotten.append(label)


def make_evaluator(
    tmp_path: Path,
    buffer: FakeBuffer,
    task: TwoSplits | None = None,
    config: Config = CONFIG,
    telemetry: Telemetry | None = None,
) -> tuple[Evaluator, RunDirectory]:
    run = RunDirectory.create(tmp_path / "run")
    ticks = iter(range(10_000))
    evaluator = Evaluator(
        config,
        task or TwoSplits(),
        buffer,
        run,
        telemetry or Telemetry(),
        sleep=lambda _: None,
        now=lambda: 100.0 * next(ticks),
    )
    return evaluator, run


def test_a_run_is_measured_before_between_and_after_and_then_the_evaluator_ends(tmp_path: Path) -> None:
    marks = [(0, 0), (1, 1), (12, 12), (13, 12), (41, 41)]
    buffer = FakeBuffer([Progress(step=step, policy_version=version) for step, version in marks])
    evaluator, run = make_evaluator(tmp_path, buffer)
    evaluator.run()
    rows = [(row["split"], row["version"], row["num_prompts"]) for row in run.read_evaluations()]
    assert rows == [
        ("easy", 1, 3), ("hard", 1, 3), ("easy", 12, 2), ("hard", 12, 2), ("easy", 41, 3), ("hard", 41, 3),
    ]  # fmt: skip
    assert buffer.forgotten == list(buffer.asked)
    first = buffer.asked["hard@12"][1]
    assert (first.request_id, first.group_size) == ("evaluate-000012-hard-00001", 4)
    assert (first.purpose, first.min_version) == (Purpose.EVALUATE, 12)


class EasyFirst(FakeBuffer):
    """Only the first prompt of a split is solved, always."""

    def collect(self, label: str) -> list[Group]:
        rewards = ["1111", *["0000"] * 4]
        groups = zip(rewards, self.asked[label], strict=False)
        return [make_group(rewards=own, prompt=one.prompt, version=one.min_version) for own, one in groups]


@pytest.mark.parametrize("is_restarted", [False, True])
def test_the_gauges_of_fewer_prompts_are_those_of_the_base_model_plus_the_change(
    tmp_path: Path, is_restarted: bool
) -> None:
    telemetry = Telemetry()
    evaluator, run = make_evaluator(tmp_path, EasyFirst([Progress(step=0, policy_version=1)]), telemetry=telemetry)
    evaluator.measure(Target(version=1, num_prompts=3, is_full=True))
    if is_restarted:
        telemetry = Telemetry()
        ended = EasyFirst([Progress(step=41, policy_version=41)])
        evaluator = Evaluator(CONFIG, TwoSplits(), ended, run, telemetry, sleep=lambda _: None)
        evaluator.run()
    evaluator.measure(Target(version=12, num_prompts=2))
    names = {"bapo_eval_accuracy_ratio": {"split": "easy"}, "bapo_eval_passk_ratio": {"split": "easy", "k": "4"}}
    found = [telemetry.registry.get_sample_value(name, labels) for name, labels in names.items()]
    assert found == pytest.approx([1 / 3, 1 / 3])  # 1 of 2 is what was measured


def test_a_split_has_its_own_number_of_responses_and_sampling(tmp_path: Path) -> None:
    own = {"hard": {"num_samples": 32, "temperature": 0.6, "max_response_tokens": 100}}
    config = CONFIG.model_copy(
        update={"evaluation": EvaluationConfig.model_validate({**SETTINGS.model_dump(), "splits": own})}
    )
    buffer = FakeBuffer([Progress(step=41, policy_version=41)])
    evaluator, run = make_evaluator(tmp_path, buffer, config=config)
    evaluator.run()
    easy, hard = (buffer.asked[f"{split}@41"][0] for split in ("easy", "hard"))
    assert (easy.group_size, easy.temperature, easy.max_response_tokens) == (4, None, None)
    assert (hard.group_size, hard.temperature, hard.top_p, hard.max_response_tokens) == (32, 0.6, None, 100)
    rows = {row["split"]: row["sampling"] for row in run.read_evaluations()}
    rollout = config.rollout
    assert rows["easy"]["max_response_tokens"] == rollout.max_response_tokens
    assert rows["hard"] == {"temperature": 0.6, "top_p": rollout.top_p, "max_response_tokens": 100}


def test_all_splits_have_the_sampling_of_the_evaluation_and_one_may_have_another() -> None:
    asked = {"top_k": 20, "min_p": 0.05, "stop": ["</answer>"], "splits": {"hard": {"top_k": 1, "stop": []}}}
    settings = EvaluationConfig.model_validate(asked)
    found = measurements_of(("easy", "hard"), settings, temperature=1.0, is_full=True)
    target = Target(version=3, num_prompts=1)
    easy, hard, easy_cold, hard_cold = (
        requests_of(target, found[name], [make_prompt()], settings)[0]
        for name in ("easy", "hard", "easy@0.3", "hard@0.3")
    )
    assert (easy.top_k, easy.min_p, easy.stop, easy.temperature) == (20, 0.05, ("</answer>",), None)
    assert (hard.top_k, hard.min_p, hard.stop) == (1, 0.05, ())
    assert (easy_cold.top_k, easy_cold.temperature, hard_cold.top_k) == (20, 0.3, 1)
    assert request_from_map(to_map(easy)) == easy
    rollout = CONFIG.rollout.model_copy(update={"stop": ("\n\n",), "temperature": 0.9})
    limits = {"top_p": 1.0, "max_response_tokens": rollout.max_response_tokens}
    shown = [rollout.sampling(found[name].settings) for name in ("easy", "hard", "hard@0.3")]
    assert shown == [
        {"temperature": 0.9, "top_k": 20, "min_p": 0.05, "stop": ("</answer>",), **limits},
        {"temperature": 0.9, "top_k": 1, "min_p": 0.05, **limits},
        {"temperature": 0.3, "top_k": 1, "min_p": 0.05, **limits},
    ]


def test_a_request_of_a_version_without_these_fields_is_read_and_training_may_not_have_them() -> None:
    fresh = to_map(make_request())
    further = ("top_k", "min_p", "min_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty", "stop")
    former = {name: value for name, value in fresh.items() if name not in further}
    assert request_from_map(former) == make_request()
    for name, value in zip(further, (1, 0.1, 2, 1.1, 0.5, 0.5, ["x"]), strict=True):
        with pytest.raises(ContractError, match="only an evaluation"):
            request_from_map({**former, name: value})


def test_a_split_is_measured_once_at_its_own_temperature() -> None:
    settings = EvaluationConfig.model_validate({"temperatures": [0.3, 1.0], "splits": {"hard": {"temperature": 0.3}}})
    found = measurements_of(("easy", "hard"), settings, temperature=1.0, is_full=True)
    assert [*found] == ["easy", "hard", "easy@0.3", "hard@1"]


def test_further_temperatures_are_measured_before_and_after_training_only(tmp_path: Path) -> None:
    further = {"temperatures": [0.3], "splits": {"hard": {"num_samples": 32}}}
    config = CONFIG.model_copy(
        update={"evaluation": EvaluationConfig.model_validate({**SETTINGS.model_dump(), **further})}
    )
    marks = [(1, 1), (12, 12), (41, 41)]
    buffer = FakeBuffer([Progress(step=step, policy_version=version) for step, version in marks])
    evaluator, run = make_evaluator(tmp_path, buffer, config=config)
    evaluator.run()
    names = ["easy", "hard", "easy@0.3", "hard@0.3"]
    rows = [(row["split"], row["version"]) for row in run.read_evaluations()]
    assert rows == [*((name, 1) for name in names), ("easy", 12), ("hard", 12), *((name, 41) for name in names)]
    hard = buffer.asked["hard@0.3@41"]
    assert [request.prompt.prompt_id for request in hard] == ["hard0", "hard1", "hard2"]
    assert (hard[0].temperature, hard[0].group_size, buffer.asked["hard@41"][0].temperature) == (0.3, 32, None)
    assert [row["sampling"]["temperature"] for row in run.read_evaluations()][:4] == [1.0, 1.0, 0.3, 0.3]
    again, _ = make_evaluator(tmp_path / "again", buffer, config=config)
    assert config.evaluation.samples_of("hard@0.3") == 32
    assert again._measured_versions() == set()
    assert evaluator._measured_versions() == {1, 12, 41}


def test_settings_of_a_split_that_does_not_exist_are_refused() -> None:
    settings = EvaluationConfig.model_validate({"splits": {"aime42": {"num_samples": 32}}})
    with pytest.raises(ConfigError, match=r"evaluation\.splits\.aime42"):
        settings.require_splits(("aime24", "amc"), 1.0)
    with pytest.raises(ConfigError, match="an @ is a temperature; rename the split"):
        EvaluationConfig().require_splits(("aime@32",), 1.0)


def test_a_restarted_evaluator_measures_only_what_has_no_row(tmp_path: Path) -> None:
    buffer = FakeBuffer([Progress(step=41, policy_version=41)])
    evaluator, run = make_evaluator(tmp_path, buffer)
    run.append_evaluation({"split": "easy", "version": 41, "accuracy": 0.5, "num_samples": 2, "rewards": {"p": [0, 1]}})
    evaluator.run()
    assert list(buffer.asked) == ["hard@41"]
    assert [(row["split"], row["version"]) for row in run.read_evaluations()] == [("easy", 41), ("hard", 41)]
    assert buffer.forgotten == ["easy@41", "hard@41"]


def test_what_a_killed_evaluator_did_not_measure_of_the_base_model_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    evaluator, run = make_evaluator(tmp_path, FakeBuffer([Progress(step=41, policy_version=41)]))
    run.append_evaluation({"split": "easy", "version": 1, "accuracy": 0.5, "num_samples": 2, "rewards": {"p": [0, 1]}})
    evaluator.run()
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "base model was not evaluated on hard before" in warning


def test_what_a_killed_evaluator_had_asked_for_is_deleted_with_the_next_measurement(tmp_path: Path) -> None:
    buffer = FakeBuffer([Progress(step=41, policy_version=41)])
    for label in ("easy@12", "hard@12", "somebody@else", "theirs@7"):
        buffer.asked[label] = []
    evaluator, _ = make_evaluator(tmp_path, buffer)
    evaluator.run()
    assert buffer.forgotten == ["easy@12", "hard@12", "easy@41", "hard@41"]


def test_groups_that_failed_for_good_are_counted_not_taken_as_wrong(tmp_path: Path) -> None:
    buffer = FakeBuffer([Progress(step=41, policy_version=41)], failing=["easy1"])
    evaluator, run = make_evaluator(tmp_path, buffer)
    evaluator.run()
    row = run.read_evaluations()[0]
    assert (row["num_prompts"], row["num_dropped"], row["accuracy"]) == (2, 1, 0.25)


def test_a_split_of_which_every_group_failed_ends_the_evaluator(tmp_path: Path) -> None:
    buffer = FakeBuffer([Progress(step=41, policy_version=41)], failing=[f"easy{i}" for i in range(5)])
    evaluator, _ = make_evaluator(tmp_path, buffer)
    with pytest.raises(UnavailableError):
        evaluator.run()


def test_a_measurement_that_does_not_move_has_a_deadline_with_its_numbers(tmp_path: Path) -> None:
    buffer = FakeBuffer([Progress(step=41, policy_version=41)], settles=False)
    evaluator, _ = make_evaluator(tmp_path, buffer)
    with pytest.raises(DeadlineError, match="easy@41: 1/3"):
        evaluator.run()


@pytest.mark.parametrize(
    ("sampled", "measured", "due"),
    [(99, (), None), (100, (), 100), (150, (100,), None), (250, (), 200), (250, (200,), None), (250, (100,), 200)],
)
def test_a_budget_of_responses_is_measured_once_and_the_largest_of_those_that_have_passed(
    sampled: int, measured: tuple[int, ...], due: int | None
) -> None:
    assert due_budget([100, 200], sampled, measured) == due


def test_at_a_budget_of_responses_everything_is_measured_as_after_training(tmp_path: Path) -> None:
    settings = {"every": 10, "num_prompts": 2, "num_prompts_final": 3, "temperatures": [0.3], "at_responses": [64]}
    config = CONFIG.model_copy(update={"evaluation": EvaluationConfig.model_validate(settings)})
    steps = [Progress(step=step, policy_version=step) for step in (1, 6, 12, 18, 41)]
    evaluator, run = make_evaluator(tmp_path, FakeBuffer(steps), TwoSplits(), config)
    for step in range(1, 9):
        run.append_metrics({"step": step, "num_responses": 8})
    run.append_metrics({"step": 9, "num_responses": 1})
    evaluator.run()
    rows = [(row["version"], row["split"], row["num_prompts"], row["at_responses"]) for row in run.read_evaluations()]
    names = ("easy", "hard", "easy@0.3", "hard@0.3")
    # The base at version 1; the budget is reached by step 8, and version 12 is the first one published after it.
    assert rows == [
        *((1, name, 3, None) for name in names),
        *((12, name, 3, 64) for name in names),
        *((41, name, 3, None) for name in names),
    ]


def test_a_budget_that_the_last_step_reaches_is_measured_with_the_last_weights(tmp_path: Path) -> None:
    settings = {"every": 0, "num_prompts_final": 3, "at_responses": [320]}
    config = CONFIG.model_copy(update={"evaluation": EvaluationConfig.model_validate(settings)})
    steps = [Progress(step=40, policy_version=40), Progress(step=41, policy_version=41)]
    evaluator, run = make_evaluator(tmp_path, FakeBuffer(steps), TwoSplits(), config)
    for step in range(1, 41):
        run.append_metrics({"step": step, "num_responses": 8})
    evaluator.run()
    assert {(row["version"], row["at_responses"]) for row in run.read_evaluations()} == {(41, None)}


@pytest.mark.parametrize(
    ("answers", "rewards", "want"),
    [
        (["7", "7", "3", None], [1.0, 1.0, 0.0, 0.0], 1.0),
        (["3", "3", "7", None], [0.0, 0.0, 1.0, 0.0], 0.0),
        (["7", "3"], [1.0, 0.0], 0.5),  # a tie
        ([None, None, "7"], [0.0, 0.0, 1.0], 1.0),  # without an answer there is no vote
        ([None, None], [0.0, 0.0], 0.0),
    ],
)
def test_the_majority_votes_for_the_most_frequent_answer(
    answers: list[str | None], rewards: list[float], want: float
) -> None:
    assert majority_reward(answers, rewards) == want


def test_votes_are_read_from_the_tokens_of_each_response() -> None:
    group = make_group(rewards="110", prompt_id="p", lengths=[1, 2, 1])
    group = replace(group, token_ids=np.array([5, 8, 5, 9], dtype=np.int32))
    vote = MajorityVote(lambda _, text: text.split()[-1], lambda: lambda ids: " ".join(map(str, ids)))
    assert vote.of([group]) == {"p": 1.0}
    assert MajorityVote(None, lambda: str).of([group]) is None


def test_without_any_answer_there_is_no_majority_rather_than_a_wrong_one() -> None:
    vote = MajorityVote(lambda _, text: None, lambda: lambda ids: "text")
    assert vote.of([make_group(rewards="11", prompt_id="p", lengths=[1, 1])]) is None
