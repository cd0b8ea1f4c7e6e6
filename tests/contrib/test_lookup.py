"""Lookup: hidden values, two tools that never fail, an episode of many turns, and the base model's chat format."""

import asyncio
import json
import random
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bapo.core.errors import ConfigError
from contrib.lookup.agent import MAX_CALLS, TOOLS, rollout, run_tool
from contrib.lookup.task import (
    BASE_MODEL_BUCKETS,
    HELD_OUT_BUCKETS,
    MOST_KEYS,
    TRAIN_BUCKETS,
    Problem,
    distinct_problems,
    prompt_of,
)
from tests.support.tasks import maker

make_task = maker("lookup")

SHIPPED = Path(__file__).parents[2] / "models" / "lookup-tiny"
PROBLEM = Problem(keys="acb", signs=("+", "-"), values=(37, 5, 60))
VALUES = {"a": 37, "c": 5, "b": 60}


def test_operations_go_from_left_to_right_and_keep_two_digits() -> None:
    # 37+5 = 42, 42-60 = -18, which continues at 99
    assert prompt_of(PROBLEM).text == "a+c-b"
    assert prompt_of(PROBLEM).answer == {"values": VALUES, "value": 82, "num_keys": 3}
    assert Problem(keys="xy", signs=("+",), values=(60, 45)).result == 5


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<answer>82</answer>", 1.0),
        ("42-60=82;<answer> 82 </answer>", 1.0),
        ("<answer>5</answer><answer>82</answer>", 1.0),
        ("<answer>82</answer><answer>5</answer>", 0.0),
        ("<answer>-18</answer>", 0.0),
        ("82", 0.0),
        ("", 0.0),
    ],
)
def test_only_the_last_answer_counts(text: str, reward: float) -> None:
    assert make_task().reward(prompt_of(PROBLEM), text) == reward


def test_splits_have_their_sizes_and_no_problem_in_common() -> None:
    task = make_task(num_train=300, num_held_out=300)
    assert task.held_out_splits == ("lookup",)
    prompts = {split: task.prompts(split) for split in ("train", "lookup")}
    assert [{task.level(prompt) for prompt in prompts[split]} for split in prompts] == [{2, 3, 4}, {2, 3, 4}]
    assert len({prompt.prompt_id for split in prompts for prompt in prompts[split]}) == 600
    assert not TRAIN_BUCKETS & HELD_OUT_BUCKETS
    assert not (TRAIN_BUCKETS | HELD_OUT_BUCKETS) & BASE_MODEL_BUCKETS
    problems = islice(distinct_problems(random.Random(0), (2, 4), TRAIN_BUCKETS), 50)
    assert {problem.bucket for problem in problems} == {8}


def test_other_seeds_train_other_problems_and_measure_the_same() -> None:
    one, two = make_task(num_train=20, num_held_out=20, seed=1), make_task(num_train=20, num_held_out=20, seed=2)
    assert one.prompts("train") != two.prompts("train")
    assert one.prompts("lookup") == two.prompts("lookup")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_keys": 4, "max_keys": 3}, "more than max_keys"),
        ({"min_keys": 1}, "min_keys"),
        ({"max_keys": 7}, "max_keys"),
        ({"held_out": ["lookup-long"]}, "lookup"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_task(**options)


@pytest.mark.parametrize(
    ("name", "arguments", "answer"),
    [
        ("get", '{"key": "a"}', "37"),
        ("get", '{"key": "z"}', "unknown key"),
        ("get", '{"key": "37+5"}', "unknown key"),
        ("calc", '{"expression": "37+5"}', "42"),
        ("calc", '{"expression": "60+45"}', "5"),
        ("calc", '{"expression": "42-60"}', "82"),
        ("calc", '{"expression": " 42 - 60 "}', "82"),
        ("calc", '{"expression": "a+c"}', "invalid expression"),
        ("calc", '{"expression": "1+2+3"}', "invalid expression"),
        ("calc", '{"expression": "2**9"}', "invalid expression"),
        ("calc", '{"expression": "\\u0663+1"}', "invalid expression"),  # a digit, but not of ASCII
        ("calc", json.dumps({"expression": "9" * 5000 + "+1"}), "invalid expression"),
        ("calc", '{"expression": ""}', "invalid expression"),
        ("get", '{"key": "a"', "invalid arguments"),
        ("get", "", "invalid arguments"),
        ("get", "[" * 100_000, "invalid arguments"),
        ("get", '["a"]', "invalid arguments"),
        ("get", '{"name": "a"}', "invalid arguments"),
        ("get", '{"key": "a", "default": "b"}', "invalid arguments"),
        ("get", '{"key": ["a"]}', "invalid arguments"),
        ("calc", '{"expression": 42}', "invalid arguments"),
        ("eval", '{"key": "a"}', "unknown tool"),
    ],
)
def test_a_tool_answers_anything_with_a_text(name: str, arguments: str, answer: str) -> None:
    assert run_tool(VALUES, name, arguments) == answer


class Scripted:
    """A client that replies with the given messages; the last one again and again."""

    def __init__(self, *replies: Any) -> None:
        self.chat = SimpleNamespace(completions=self)
        self.asked: list[dict[str, Any]] = []
        self._replies = list(replies)

    async def create(self, **request: Any) -> SimpleNamespace:
        self.asked.append(request | {"messages": list(request["messages"])})
        message = self._replies[min(len(self.asked), len(self._replies)) - 1]
        return SimpleNamespace(choices=[SimpleNamespace(message=message)])


def reply(content: str | None, *calls: tuple[str, str]) -> Any:
    chat = pytest.importorskip("openai.types.chat", reason="the openai package")
    called = [
        {"id": f"call-{name}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in calls
    ]
    return chat.ChatCompletionMessage.model_validate(
        {"role": "assistant", "content": content, "tool_calls": called or None}
    )


def test_an_episode_runs_the_tools_until_a_message_calls_none_and_grades_that_message() -> None:
    client = Scripted(
        reply(None, ("get", '{"key": "a"}')),
        reply("b=60;", ("get", '{"key": "c"}'), ("calc", "37+5")),
        reply("<answer>82</answer>"),
    )
    assert asyncio.run(rollout(client, prompt_of(PROBLEM))) == 1.0  # type: ignore[arg-type]
    assert len(client.asked) == 3
    assert (client.asked[0]["model"], client.asked[0]["tools"]) == ("policy", TOOLS)
    last = client.asked[-1]["messages"]
    assert [message["role"] for message in last] == ["user", "assistant", "tool", "assistant", "tool", "tool"]
    assert last[0]["content"] == "a+c-b"
    assert "content" not in last[1]
    assert (last[2]["tool_call_id"], last[2]["content"]) == ("call-get", "37")
    assert last[3]["content"] == "b=60;"
    assert [message["content"] for message in last[4:]] == ["5", "invalid arguments"]


@pytest.mark.parametrize("last", ["<answer>18</answer>", "", None])
def test_a_wrong_or_missing_answer_is_worth_nothing(last: str | None) -> None:
    assert asyncio.run(rollout(Scripted(reply(last)), prompt_of(PROBLEM))) == 0.0  # type: ignore[arg-type]


def test_an_episode_without_an_end_uses_up_its_calls_and_is_worth_nothing() -> None:
    client = Scripted(reply("<answer>82</answer>", ("get", '{"key": "a"}')))
    assert asyncio.run(rollout(client, prompt_of(PROBLEM))) == 0.0  # type: ignore[arg-type]
    assert len(client.asked) == MAX_CALLS == 2 * MOST_KEYS
