"""Environments, tools and environments of TRL as agents: what a model reads, what ends an episode, who rewards it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Optional

import pytest
from transformers.utils import get_json_schema

from bapo.config.agents import AgentsConfig
from bapo.core.errors import ConfigError
from bapo.core.types import Prompt
from bapo.core.user_code import load_object
from services.agents import GRADE
from services.agents.rollouts import load_rollout, standalone_of
from services.agents.threads import called
from services.agents.tool_schemas import schema_of
from tests.support.factories import make_prompt
from tests.support.scripted_chat import ScriptedClient, calls, refusal

Load = Callable[..., Any]
PROMPT = make_prompt()


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """The rollout function of a name, over a file `mine.py` with this source."""

    def rollout_of(name: str, source: str, **settings: Any) -> Any:
        path = tmp_path / "mine.py"
        path.write_text(source)
        return load_rollout(name.replace("mine.py", str(path)), AgentsConfig(**settings))

    return rollout_of


def run(rollout: Any, *lines: Any, prompt: Prompt = PROMPT) -> tuple[Any, ScriptedClient]:
    """One episode with a model that says these lines. Returns: how it ended, and what the model was asked."""
    client = ScriptedClient(*lines)
    return asyncio.run(rollout(client, prompt)), client


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


# -- names


def test_a_plain_name_is_the_function_itself(load: Load) -> None:
    rollout = load("mine.py:go", "async def go(client, prompt):\n    return 0.25\n")
    assert run(rollout)[0] == 0.25


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("vverifiers:gsm8k", "did you mean 'verifiers'"),
        ("gym:mine.py:Env", "prefixes env:, tools:, trl:, openenv:, skyrl_gym:, verifiers:"),
        ("tool:mine.py:TOOLS", "did you mean 'tools'"),
    ],
)
def test_an_unknown_prefix_is_refused_with_those_that_there_are(load: Load, name: str, said: str) -> None:
    with pytest.raises(ConfigError, match="neither a module nor a prefix") as refused:
        load(name, "")
    assert said in str(refused.value)


def test_packages_that_need_their_own_python_are_known_by_their_prefix() -> None:
    names = ("verifiers:a", "openenv:http://b:1", "skyrl_gym:c", "env:a.py:B", "verifiers.py:rollout", "verifiers:")
    assert [standalone_of(name) for name in names] == ["verifiers", "openenv", "skyrl_gym", None, None, None]


# -- environments

GUESS = """
class Guess:
    def reset(self, prompt):
        self.secret = str(prompt.answer["target"])
        self.left = 3

    def step(self, text):
        self.left -= 1
        if text == self.secret:
            return None, 1.0, True
        return f"No. {self.left} left.", 0.0, self.left == 0
"""


def test_an_environment_answers_each_message_until_it_is_done(load: Load) -> None:
    reward, client = run(load("env:mine.py:Guess", GUESS), "5", "6")
    assert reward == 1.0
    assert client.asked[1] == [user("1,2,3->6:"), {"role": "assistant", "content": "5"}, user("No. 2 left.")]
    assert client.offered == [None, None]


def test_rewards_of_steps_add_up_and_a_limit_keeps_those_before_it(load: Load) -> None:
    source = "class E:\n    def reset(self, p): pass\n    def step(self, text): return 'more', 0.25, False\n"
    assert run(load("env:mine.py:E", source, max_turns=3), "a", "b", "c")[0] == 0.75
    full = refusal("the episode has no room for a further token: give its reward")
    assert run(load("env:mine.py:E", source), "a", "b", full)[0] == 0.5


def test_an_environment_without_a_reward_leaves_it_to_the_task(load: Load) -> None:
    source = "class E:\n    def reset(self, p): pass\n    def step(self, text): return None, None, True\n"
    assert run(load("env:mine.py:E", source), "a")[0] is GRADE


@pytest.mark.parametrize(
    ("returned", "messages"),
    [
        ("None", [user("1,2,3->6:")]),
        ("'Hello'", [user("Hello")]),
        (
            "[{'role': 'system', 'content': 's'}, {'role': 'user', 'content': 'u'}]",
            [{"role": "system", "content": "s"}, user("u")],
        ),
    ],
)
def test_reset_opens_the_conversation_or_leaves_it_to_the_prompt(load: Load, returned: str, messages: Any) -> None:
    source = f"class E:\n    def reset(self, p): return {returned}\n    def step(self, text): return None, 1, True\n"
    assert run(load("env:mine.py:E", source), "a")[1].asked == [messages]


def test_async_methods_and_a_closed_environment_after_an_error(load: Load, tmp_path: Path) -> None:
    source = """
closed = []
class E:
    async def reset(self, prompt): return "go"
    async def step(self, text): raise ValueError("no browser")
    async def close(self): closed.append(1)
"""
    rollout = load("env:mine.py:E", source)
    with pytest.raises(ValueError, match="no browser"):
        run(rollout, "a")
    assert load_object(f"{tmp_path / 'mine.py'}:closed", key="test") == [1]


def test_an_environment_with_tools_reads_the_call_and_answers_as_a_tool(load: Load) -> None:
    source = """
class E:
    tools = [{"type": "function", "function": {"name": "look"}}]
    def reset(self, prompt): pass
    def step(self, message):
        if "tool_calls" not in message:
            return None, float(message["content"] == "blue"), True
        call = message["tool_calls"][0]
        return [{"role": "tool", "tool_call_id": call["id"], "content": "blue"}], 0.0, False
"""
    reward, client = run(load("env:mine.py:E", source), calls(("look", {})), "blue")
    assert reward == 1.0
    assert client.asked[1][-1] == {"role": "tool", "tool_call_id": "call-0", "content": "blue"}
    assert client.offered[0] == [{"type": "function", "function": {"name": "look"}}]


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ("return 'a'", "not a tuple"),
        ("return None, 0.5, False", "neither an observation nor done"),
        ("return 3, 0.5, False", "step returned 3"),
    ],
)
def test_a_step_that_returns_something_else_says_what(load: Load, step: str, said: str) -> None:
    source = f"class E:\n    def reset(self, p): pass\n    def step(self, text):\n        {step}\n"
    with pytest.raises((TypeError, ValueError), match=said):
        run(load("env:mine.py:E", source), "a")


def test_a_class_that_is_not_an_environment_is_a_mistake_of_the_config(load: Load) -> None:
    with pytest.raises(ConfigError, match="has no method step"):
        load("env:mine.py:E", "class E:\n    def reset(self, p): pass\n")


def test_a_refusal_that_is_not_a_limit_and_one_of_the_first_call_are_errors(load: Load) -> None:
    rollout = load("env:mine.py:Guess", GUESS)
    for lines in (["5", refusal("tools[0] is malformed")], [refusal("give its reward")]):
        with pytest.raises(Exception, match=r"malformed|give its reward"):
            run(rollout, *lines)


def test_a_method_that_blocks_runs_in_a_thread_of_its_own_and_its_error_arrives() -> None:
    def fails(word: str) -> None:
        raise StopIteration(word)

    async def scenario() -> None:
        assert await called(threading.get_ident) != threading.get_ident()
        assert await called(threading.current_thread) is not threading.current_thread()
        with pytest.raises(RuntimeError, match="StopIteration: end"):
            await called(fails, "end")

    asyncio.run(scenario())


def test_a_wait_for_a_hanging_method_can_be_cancelled() -> None:
    release = threading.Event()

    async def scenario() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await called(release.wait, 5)
        release.set()
        await asyncio.sleep(0.02)  # its result arrives and meets nobody

    asyncio.run(scenario())


# -- tools

TOOLS = '''
def get(key: str) -> str:
    """The value of a key."""
    return {"a": "37"}[key]

async def add(x: int, y: int = 1) -> dict:
    """A sum."""
    return {"sum": x + y}

TOOLS = [get, add]
'''


def test_tools_are_called_until_an_answer_comes_without_one(load: Load) -> None:
    both = calls(("get", {"key": "a"}), ("add", {"x": 2}))
    outcome, client = run(load("tools:mine.py:TOOLS", TOOLS), both, "37")
    assert outcome is GRADE
    assert [tool["function"]["name"] for tool in client.offered[0]] == ["get", "add"]
    assert client.asked[1][-2:] == [
        {"role": "tool", "tool_call_id": "call-0", "name": "get", "content": "37"},
        {"role": "tool", "tool_call_id": "call-1", "name": "add", "content": '{"sum": 3}'},
    ]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (("get", {"key": "b"}), "{'error': \"'b'\"}"),
        (("got", {}), "{'error': 'Tool got not found.'}"),
        (("get", "{"), "the arguments are not JSON"),
        (("get", "[" * 100_000), "the arguments are not JSON"),
        (("get", "3"), "the arguments are not a JSON object"),
        (("get", {}), "missing a required argument: 'key'"),
        (("get", {"key": "a", "more": 1}), "unexpected keyword argument 'more'"),
        (("add", {"x": "2"}), "Expected `int`, got `str`"),
    ],
)
def test_whatever_a_model_calls_is_answered_and_the_episode_continues(load: Load, call: Any, said: str) -> None:
    outcome, client = run(load("tools:mine.py:TOOLS", TOOLS), calls(call), "so be it")
    assert outcome is GRADE
    assert said in client.asked[1][-1]["content"]


def test_calls_of_the_last_turn_are_not_run(load: Load) -> None:
    outcome, client = run(load("tools:mine.py:TOOLS", TOOLS, max_turns=1), calls(("get", {"key": "a"})))
    assert (outcome, len(client.asked)) == (GRADE, 1)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("TOOLS = 3", "must be a list of functions"),
        ("TOOLS = [lambda x: x]", "has no name"),
        ("def f(x): pass\nTOOLS = [f]", "its parameter 'x' needs a type hint"),
        ("def f(*x: int): pass\nTOOLS = [f]", "cannot be filled by a model"),
        ("def f(x: bytes): pass\nTOOLS = [f]", "which no tool call can have"),
        ("def f(x: 'Missing'): pass\nTOOLS = [f]", "type hints cannot be read"),
        ("def f(): pass\nTOOLS = [f, f]", "two tools have the name 'f'"),
    ],
)
def test_what_cannot_be_a_tool_is_a_mistake_of_the_config(load: Load, source: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load("tools:mine.py:TOOLS", source)


def documented(
    name: str,
    count: int,
    share: float,
    is_new: bool,
    words: list[str],
    table: dict[str, int],
    kind: Literal["a", "b"],
    perhaps: Optional[int] = None,  # noqa: UP045 - as users write it
    either: int | str = 3,
    nested: list[dict[str, float]] | None = None,
) -> str:
    """Does a thing
    on two lines.

    Args:
        name: of it
        count: how many,
            on two lines
        share: a part
        is_new: whether
        words: some
        table: a map
        kind: which
        perhaps: or not
        either: of both
        nested: deep

    Returns:
        A text.
    """
    return ""


def test_schemas_are_those_of_transformers_which_trl_shows_its_models() -> None:
    expected = get_json_schema(documented)
    del expected["function"]["return"]
    assert schema_of(documented, key="k") == expected


def test_a_parameter_without_a_description_is_offered_without_one() -> None:
    def plain(x: int = 1) -> None:
        """One."""

    assert schema_of(plain, key="k") == {
        "type": "function",
        "function": {
            "name": "plain",
            "description": "One.",
            "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
        },
    }


# -- environments of TRL

TRL = '''
made = []
class Counter:
    def __init__(self):
        made.append(self)
    @property
    def trap(self):
        raise AssertionError("properties are not evaluated")
    def reset(self, target, **columns):
        self.count, self.target = 0, target
        self.columns = columns
        return f" (reset {len(made)})"
    def increment(self, step: int) -> int:
        """Count.

        Args:
            step: how far.
        """
        if step < 0:
            raise ValueError("only up")
        self.count += step
        return self.count
    def _hidden(self): ...
    async def get_reward(self):
        return float(self.count == self.target)
'''


def test_an_environment_of_trl_has_its_methods_as_tools_and_gives_the_reward(load: Load) -> None:
    rollout = load("trl:mine.py:Counter", TRL)
    up = calls(("increment", {"step": 4}), ("increment", {"step": -1}), ("increment", {"step": 2}))
    reward, client = run(rollout, up, "done")
    assert reward == 1.0
    assert client.asked[0] == [user("1,2,3->6: (reset 1)")]
    assert [message["content"] for message in client.asked[1][-3:]] == ["4", "{'error': 'only up'}", "6"]
    assert [tool["function"]["name"] for tool in client.offered[0]] == ["increment"]


def test_instances_of_trl_are_reset_and_used_again_unless_their_episode_failed(load: Load) -> None:
    rollout = load("trl:mine.py:Counter", TRL)
    assert run(rollout, "done")[0] == 0.0
    assert run(rollout, "done")[1].asked[0] == [user("1,2,3->6: (reset 1)")]
    with pytest.raises(ConnectionError):
        run(rollout, ConnectionError("gone"))
    assert run(rollout, "done")[1].asked[0] == [user("1,2,3->6: (reset 2)")]


@pytest.mark.parametrize(
    ("method", "outcome"), [("", GRADE), ("    def get_reward(self): return None\n", None)], ids=["none", "null"]
)
def test_without_get_reward_the_task_grades_and_a_reward_of_none_is_ungraded(
    load: Load, method: str, outcome: Any
) -> None:
    source = f"class E:\n    def reset(self, **columns): pass\n{method}"
    assert run(load("trl:mine.py:E", source), "a")[0] is outcome


def test_of_several_environments_the_row_names_one(load: Load) -> None:
    source = """
class A:
    def reset(self, **columns): return str(sorted(columns))
    def get_reward(self): return 0.5
class B(A):
    def get_reward(self): return 0.25
BOTH = {"a": A, "b": B}
"""
    rollout = load("trl:mine.py:BOTH", source)
    row = Prompt(prompt_id="p", text="t", task="t", answer={"environment": "b", "x": 1})
    reward, client = run(rollout, "done", prompt=row)
    assert (reward, client.asked[0][0]["content"]) == (0.25, "t['prompt', 'x']")
    with pytest.raises(ConfigError, match="the column 'environment' is None"):
        run(rollout, "done")


def test_a_class_without_reset_is_no_environment_of_trl(load: Load) -> None:
    with pytest.raises(ConfigError, match="must define reset"):
        load("trl:mine.py:E", "class E: pass")
