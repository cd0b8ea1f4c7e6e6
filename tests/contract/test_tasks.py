"""What every task must keep. A new file in bapo/tasks/ or contrib/NAME/task.py is tested without being named here."""

import json
from pathlib import Path
from typing import Any

import pytest

from bapo.core.errors import ConfigError
from bapo.core.types import Prompt
from bapo.tasks.base import Task
from bapo.tasks.registry import built_in_tasks, load_task

NEEDED_OPTIONS: dict[str, dict[str, Any]] = {
    "dataset": {"path": "train.jsonl", "held_out": {"test": "test.jsonl"}},
    "mathematics": {"path": "train.jsonl", "held_out": {"test": "test.jsonl"}, "chat": False},
    "reasoning_gym:chain_sum": {"num_train": 60, "num_held_out": 20},
}
"""Only for tasks that cannot be made without options; files stand in the working directory."""

MEMBERS = {"reasoning_gym": "reasoning_gym:chain_sum"}
"""Of each family, one that stands for all."""
PACKAGES = {"reasoning_gym": "reasoning_gym"}
"""Optional: requirements/reasoning-gym.txt."""

GARBAGE = ["", " ", "garbage", "<answer></answer>", "<answer>", "0", "nan", "\0", "²", "(" * 5000, "🙂" * 500]


@pytest.fixture(params=built_in_tasks())
def task(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Task:
    for split, first in (("train", 0), ("test", 100)):
        rows = [{"prompt": f"double {n}?", "answer": f"it is {2 * n}"} for n in range(first, first + 20)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    if request.param in PACKAGES:
        pytest.importorskip(PACKAGES[request.param], reason="pip install --no-deps -r requirements/reasoning-gym.txt")
    return _make(MEMBERS.get(request.param, request.param))


def _make(name: str) -> Task:
    return load_task(name, NEEDED_OPTIONS.get(name, {}))


def _question(prompt: Prompt) -> tuple[str, ...]:
    """What the model reads, without the answer; of `lookup` also what its tools say."""
    return prompt.text, *prompt.images, str(prompt.answer.get("values"))


def _splits(task: Task) -> list[str]:
    return ["train", *task.held_out_splits]


def test_a_task_calls_its_prompts_by_its_own_name(task: Task) -> None:
    assert {prompt.task for split in _splits(task) for prompt in task.prompts(split)} == {task.name}


def test_gold_is_rewarded_one(task: Task) -> None:
    for split in _splits(task):
        for prompt in task.prompts(split)[:50]:
            gold = task.gold(prompt)
            assert gold is not None
            assert task.reward(prompt, gold) == 1.0


@pytest.mark.parametrize("text", GARBAGE)
def test_garbage_is_rewarded_zero(task: Task, text: str) -> None:
    for prompt in task.prompts("train")[:20]:
        assert task.reward(prompt, text) == 0.0


def test_the_same_options_give_the_same_prompts_in_the_same_order(task: Task) -> None:
    again = _make(task.name)
    for split in _splits(task):
        assert list(again.prompts(split)) == list(task.prompts(split))


def test_ids_are_unique_within_a_split(task: Task) -> None:
    for split in _splits(task):
        ids = [prompt.prompt_id for prompt in task.prompts(split)]
        assert len(ids) > 0
        assert len(set(ids)) == len(ids)


def test_no_training_prompt_is_held_out(task: Task) -> None:
    train = set(map(_question, task.prompts("train")))
    for split in task.held_out_splits:
        assert not train & set(map(_question, task.prompts(split)))


def test_answers_travel_as_json(task: Task) -> None:
    for prompt in task.prompts("train")[:50]:
        assert json.loads(json.dumps(prompt.answer)) == prompt.answer


def test_an_unknown_split_is_refused_and_the_known_ones_are_named(task: Task) -> None:
    with pytest.raises(ConfigError, match="train"):
        task.prompts("no such split")
