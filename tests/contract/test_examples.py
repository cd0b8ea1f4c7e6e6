"""The gallery of examples: every file loads, and grades what it should."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from bapo.config.agents import AgentsConfig
from bapo.config.load import load_config
from bapo.core.types import Prompt
from bapo.tasks.base import make_prompt
from bapo.tasks.grading.components import components_of, grade_by_all
from bapo.tasks.registry import load_task, task_of
from bapo.tasks.rewards import load_reward
from services.agents.rollouts import load_rollout
from studies.plan import read_study
from tests.support.scripted_chat import ScriptedClient, calls

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ROW = {"numbers": [26, 72, 61], "target": 37, "answer": "<answer>(26+72)-61</answer>"}
RIGHT, WRONG = "so <answer>26+72-61</answer>", "so <answer>26+72</answer>"


@pytest.mark.parametrize(
    ("folder", "right", "wrong"),
    [("own_reward", 1.0, 0.0), ("multi_reward", 1.0, 0.2)],
)
def test_a_reward_of_the_gallery_grades(
    folder: str, right: float, wrong: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(EXAMPLES / folder)
    config = load_config(["../own_reward/run.toml", "run.toml"], [])
    components = components_of(task_of(config), config.task)
    answer = grade_by_all(components, make_prompt("dataset", "26,72,61->37:", ROW), [RIGHT, WRONG])
    assert answer["rewards"] == pytest.approx([right, wrong])


def test_the_data_of_the_first_example_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES / "own_reward")
    config = load_config(["run.toml"], [])
    task = task_of(config)
    assert (len(task.prompts("train")), len(task.prompts("test"))) == (1000, 200)
    reward = load_reward(config.task.reward_functions[0])
    assert all(reward(prompt, [task.gold(prompt) or ""]) == [1.0] for prompt in task.prompts("test"))


def test_the_files_over_the_first_example_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.chdir(EXAMPLES / "multi_reward")
    several = load_config(["../own_reward/run.toml", "run.toml"], [])
    assert several.task.options["path"] == "../own_reward/train.jsonl"
    monkeypatch.chdir(EXAMPLES / "own_task")
    own = load_config(["../own_reward/run.toml", "run.toml"], ["--task.options", "{}"])
    assert own.task.reward is None
    task = load_task(own.task.name, own.task.options)
    prompt = task.prompts("train")[0]
    assert (prompt.text, task.reward(prompt, "<answer>30+2</answer>"), task.reward(prompt, "32")) == ("30,2->32:", 1, 0)


def test_the_agent_of_the_documentation_reads_what_was_wrong_with_a_call_and_rewards_the_right_answer() -> None:
    rollout = load_rollout(f"{EXAMPLES}/agents/agent.py:rollout", AgentsConfig())
    row = Prompt(prompt_id="p", text="a+b", task="lookup", answer={"values": {"a": 37, "b": 5}, "value": 42})
    client = ScriptedClient(calls(("get", {"name": "a"})), calls(("get", {"key": "a"})), "<answer>42</answer>")
    assert asyncio.run(rollout(client, row)) == 1.0
    assert [message["content"] for message in client.asked[-1] if message["role"] == "tool"] == [
        "error: KeyError('key')",
        "37",
    ]
    assert asyncio.run(rollout(ScriptedClient("<answer>41</answer>"), row)) == 0.0


def test_the_environment_of_the_gallery_answers_calls_and_rewards_the_right_answer() -> None:
    settings = AgentsConfig(rollout=f"env:{EXAMPLES}/agents/environment.py:Lookup")
    rollout = load_rollout(settings.rollout or "", settings)
    row = Prompt(prompt_id="p", text="a+b", task="lookup", answer={"values": {"a": 37, "b": 5}, "value": 42})
    wrong = calls(("get", {"key": "z"}), ("calc", "{"))
    right = calls(("get", {"key": "a"}), ("calc", {"expression": "37+5"}))
    client = ScriptedClient(wrong, right, "<answer>42</answer>")
    assert asyncio.run(rollout(client, row)) == 1.0
    answers = [message["content"] for message in client.asked[-1] if message["role"] == "tool"]
    assert answers == ["invalid arguments", "invalid arguments", "37", "42"]


def test_the_study_plans_two_methods_of_three_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    assert [run.name for run in read_study(EXAMPLES / "study.toml").runs] == [
        f"{method}-s{seed}" for seed in (1, 2, 3) for method in ("grpo", "bapo")
    ]
