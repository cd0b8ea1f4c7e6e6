"""What the agents' address writes of a data set's conversations, and what it could not write is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bapo.config.tree import Config
from bapo.core.errors import ConfigError
from bapo.tasks.base import Task
from bapo.tasks.registry import task_of

MODEL = "models/lookup-tiny"
ASK = {"role": "user", "content": "1+2?"}
BEGUN = {"role": "assistant", "content": "It is"}


def task(folder: Path, *messages: dict[str, str], agents: dict[str, Any] | None, **options: Any) -> Task:
    """The task of a run with one conversation."""
    (path := folder / "train.jsonl").write_text(json.dumps({"prompt": messages, "answer": "3"}) + "\n")
    table = {"name": "dataset", "options": {"path": str(path), **options}}
    return task_of(Config.model_validate({"model": {"path": MODEL}, "task": table, "agents": agents}))


def test_the_address_gets_the_variables_of_the_chat_template_and_its_date(tmp_path: Path) -> None:
    chosen = task(tmp_path, ASK, agents={}, chat_options={"enable_thinking": False}, chat_date="2026-11-22")
    variables = dict(chosen.chat_variables())
    assert variables.pop("strftime_now")("%d %b %Y") == "22 Nov 2026"
    assert variables == {"enable_thinking": False}
    assert task(tmp_path, ASK, agents={}).chat_variables()["strftime_now"]("%Y-%m-%d") == "2024-07-26"
    with pytest.raises(ConfigError, match="add_generation_prompt cannot be set"):
        task(tmp_path, ASK, agents={}, chat_options={"add_generation_prompt": False}).chat_variables()


@pytest.mark.parametrize(("name", "value"), [("message_format", "{content}|"), ("tokenizer", "models/chain-tiny")])
def test_another_format_than_the_models_chat_template_is_refused_with_agents(
    name: str, value: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"\[agents\] with task\.options\.{name}: .*chat_template\.jinja"):
        task(tmp_path, ASK, agents={}, **{name: value})
    assert task(tmp_path, ASK, agents=None, **{name: value}).name == "dataset"
    assert task(tmp_path, ASK, agents={}, tokenizer=MODEL).name == "dataset"


def test_a_conversation_that_the_model_is_to_continue_is_refused_with_agents(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"row 1: the conversation ends with an assistant's message"):
        task(tmp_path, ASK, BEGUN, agents={}).prompts("train")
    (prompt,) = task(tmp_path, ASK, BEGUN, agents=None).prompts("train")
    assert prompt.text == "<|user|>1+2?<|assistant|>It is"
    assert len(task(tmp_path, ASK, BEGUN, ASK, agents={}).prompts("train")) == 1
