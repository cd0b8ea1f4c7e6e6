"""The agent of `lookup`: an ordinary program of the openai package that offers two tools to a model.

    user       a+b
    assistant  get(key="a")               -> 37
    assistant  get(key="b")               -> 5
    assistant  calc(expression="37+5")    -> 42
    assistant  <answer>42</answer>

It does not know that its calls are recorded for training. A tool that is called in a wrong way answers with a text
that says so: a model is trained on what it wrote, thus nothing that it writes may end the program.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from bapo.core.types import Prompt
from contrib.lookup.task import MODULUS, OPERATIONS, LookupOptions, LookupTask

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types.chat import ChatCompletionFunctionToolParam, ChatCompletionMessageParam

MODEL = "policy"
MAX_CALLS = 12
"""Model calls of an episode: one for each key, each operation and the answer of a problem with 6 keys. More would not
fit into the 256 positions of lookup-tiny, if each has a calculation of its own before the tool call."""

UNKNOWN_KEY = "unknown key"
UNKNOWN_TOOL = "unknown tool"
INVALID_EXPRESSION = "invalid expression"
INVALID_ARGUMENTS = "invalid arguments"

_EXPRESSION = re.compile(r"\s*([0-9]{1,9})\s*([-+])\s*([0-9]{1,9})\s*")
_TASK = LookupTask(LookupOptions())
"""Its reward does not depend on its options."""


def get(values: Mapping[str, int], key: str) -> str:
    """The hidden value of a key."""
    return str(values[key]) if key in values else UNKNOWN_KEY


def calc(_: Mapping[str, int], expression: str) -> str:
    """The last two digits of a sum or difference; a difference below 0 continues at 99."""
    found = _EXPRESSION.fullmatch(expression)
    if found is None:
        return INVALID_EXPRESSION
    left, sign, right = found.groups()
    return str(OPERATIONS[sign](int(left), int(right)))


RUNS: Mapping[str, tuple[Callable[[Mapping[str, int], str], str], str]] = {
    "get": (get, "key"),
    "calc": (calc, "expression"),
}
"""Name of a tool -> the function behind it, and the name of its only argument, a string."""


def _schema(name: str, description: str) -> ChatCompletionFunctionToolParam:
    _, argument = RUNS[name]
    parameters: dict[str, object] = {
        "type": "object",
        "properties": {argument: {"type": "string"}},
        "required": [argument],
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = (
    _schema("get", "The value of a key."),
    _schema("calc", f"x+y or x-y of two integers, modulo {MODULUS}."),
)


def run_tool(values: Mapping[str, int], name: str, arguments: str) -> str:
    """What a tool answers, as text.

    Args:
        values: hidden value of each key.
        arguments: JSON, as the model wrote it.
    """
    if name not in RUNS:
        return UNKNOWN_TOOL
    function, argument = RUNS[name]
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError):  # brackets that are nested very deep
        return INVALID_ARGUMENTS
    if not isinstance(given, dict) or set(given) != {argument} or not isinstance(given[argument], str):
        return INVALID_ARGUMENTS
    return function(values, given[argument])


async def rollout(client: AsyncOpenAI, prompt: Prompt) -> float | None:
    """One episode. Returns: the reward of the last message; 0.0 if the calls are used up before an answer."""
    values: Mapping[str, int] = prompt.answer["values"]
    messages = cast("list[ChatCompletionMessageParam]", prompt.messages)
    for _ in range(MAX_CALLS):
        completion = await client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
        message = completion.choices[0].message
        messages.append(cast("Any", message.model_dump(exclude_none=True)))
        if not message.tool_calls:
            return _TASK.reward(prompt, message.content or "")
        for call in message.tool_calls:
            if call.type == "function":
                answer = run_tool(values, call.function.name, call.function.arguments)
            else:
                answer = UNKNOWN_TOOL
            messages.append({"role": "tool", "tool_call_id": call.id, "content": answer})
    return 0.0
