"""A question that is held out is not trained, however the training data write it."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bapo.tasks.base import Task
from bapo.tasks.registry import load_task
from tests.support.tasks import maker

make_task = maker("dataset")

TRAIN = ["What is 2+2? ", "Caf\u00e9?", "a\r\nb", "x", "a b"]
TEST = ["What is 2+2?", "Cafe\u0301?", "a\nb"]
"""The first three in other spaces, another normal form and other ends of lines."""
KEPT = ["x", "a b"]
WAYS = {
    "texts": {},
    "formatted": {"question_format": "Q: {prompt}\nThink."},
    "chat": {"chat": True, "system_prompt": "Be brief.", "message_format": "<{role}>{content}|"},
    "chat, formatted": {"chat": True, "question_format": "{prompt}\nThink.", "message_format": "<{role}>{content}|"},
}


def _jsonl(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def _said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_a_question_is_the_same_in_other_spaces_and_other_unicode(
    tmp_path: Path, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    train = _jsonl(tmp_path / "train.jsonl", *({"prompt": text, "answer": "4"} for text in TRAIN))
    test = _jsonl(tmp_path / "test.jsonl", *({"prompt": text, "answer": "4.0"} for text in TEST))
    with caplog.at_level(logging.WARNING):
        kept = make_task(path=train, held_out={"test": test}, **options).prompts("train")
    alone = make_task(path=train, **options).prompts("train")
    assert [prompt.prompt_id for prompt in kept] == [prompt.prompt_id for prompt in alone[3:]]
    assert [text in prompt.text for text, prompt in zip(KEPT, kept, strict=True)] == [True, True]
    assert "dropped 3 held-out prompts" in caplog.text


def test_a_conversation_is_held_out_as_messages_and_as_the_text_that_they_become(tmp_path: Path) -> None:
    rows = [{"prompt": _said("1+1? "), "answer": "2"}, {"prompt": _said("2+2?"), "answer": "4"}]
    rows.append({"prompt": _said("3+3?"), "answer": "6"})
    texts = [{"prompt": "1+1?", "answer": "2"}, {"prompt": "<user>2+2?|", "answer": "4"}]
    train, test = _jsonl(tmp_path / "train.jsonl", *rows), _jsonl(tmp_path / "test.jsonl", *texts)
    task = make_task(path=train, held_out={"test": test}, message_format="<{role}>{content}|")
    assert [prompt.text for prompt in task.prompts("train")] == ["<user>3+3?|"]


def test_one_question_with_two_answers_is_told_in_other_spaces_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": "a?", "answer": "1"}, {"prompt": "a? ", "answer": "2"}]
    with caplog.at_level(logging.WARNING):
        make_task(path=_jsonl(tmp_path / "train.jsonl", *rows)).prompts("train")
    assert "the first in rows 1 and 2" in caplog.text


SUMS = {0: [(3, "1+2"), (3, "2+1"), (4, "1+3"), (5, "2+3")], 1_000_003: [(4, "3+1"), (4, "1+3"), (6, "3+3")]}
"""Seed -> (the sum to make, the generator's solution)."""


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> Task:
    """A task of reasoning-gym, whose package is optional."""
    package, factory = ModuleType("reasoning_gym"), ModuleType("reasoning_gym.factory")
    vars(factory)["DATASETS"] = {"sums": None}
    vars(package)["create_dataset"] = lambda name, size, seed: [
        {"question": f"Make {total}", "answer": solution} for total, solution in SUMS[seed]
    ]
    monkeypatch.setitem(sys.modules, "reasoning_gym", package)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", factory)
    return load_task("reasoning_gym:sums", {"prompt_format": "{question}"})


def test_a_generators_question_is_held_out_and_repeated_whichever_its_solution(generated: Task) -> None:
    found = {
        split: [(one.text, one.answer["answer"]) for one in generated.prompts(split)] for split in ("train", "test")
    }
    assert found == {"train": [("Make 3", "1+2"), ("Make 5", "2+3")], "test": [("Make 4", "3+1"), ("Make 6", "3+3")]}


def test_the_id_of_a_generators_prompt_is_that_of_earlier_versions(generated: Task) -> None:
    assert generated.prompts("train")[0].prompt_id == "6d7ee80523573514"
