"""Supervised examples of `lookup`, from a teacher who often does without the tools that it has.

    user       a+c-b
    assistant  get(key="a")                                    -> 37
    assistant  get(key="c")                                    -> 5
    assistant  37+5=43;get(key="b")                            -> 12      a calculation of its own, wrong here
    assistant  calc(expression="43-12")                        -> 31
    assistant  <answer>31</answer>

For a value it calls `get` with probability GETS, else it makes one up. For an operation it calls `calc` with
probability CALCS; else it writes the result itself, right with probability RIGHT, and else one too far. The model
learns how often to call which tool. It does not learn to calculate: its own results are right far less often than the
teacher's (the card says how often), so that reward can rise only by what it leaves to the tools. As it does without
`calc` more often than with it, a low temperature is no remedy.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast

from contrib.lookup.agent import run_tool
from contrib.lookup.task import (
    ANSWER_FORMAT,
    BASE_MODEL_BUCKETS,
    MAX_KEYS,
    MIN_KEYS,
    MODULUS,
    OPERATIONS,
    Problem,
    random_problem,
)

GETS, CALCS, RIGHT = 0.88, 0.4, 0.4

Message = dict[str, Any]
"""As the chat API has them."""


class Teacher:
    """Writes one episode. A message is what it says of its own accord, then one tool call or the answer."""

    def __init__(self, rng: random.Random, problem: Problem) -> None:
        self._rng, self._problem = rng, problem
        self._values = dict(zip(problem.keys, problem.values, strict=True))
        self._messages: list[Message] = [{"role": "user", "content": problem.text}]
        self._said = ""

    def messages(self) -> list[Message]:
        """The episode, from the user's message to the answer."""
        keys = self._problem.keys
        result = self._value(keys[0])
        for sign, key in zip(self._problem.signs, keys[1:], strict=True):
            result = self._result(result, sign, self._value(key))
        text = self._said + ANSWER_FORMAT.format(answer=result)
        return [*self._messages, {"role": "assistant", "content": text}]

    def _value(self, key: str) -> int:
        if self._rng.random() < GETS:
            return self._call("get", {"key": key})
        made_up = self._rng.randrange(MODULUS)
        self._said += f"{key}={made_up};"
        return made_up

    def _result(self, left: int, sign: str, right: int) -> int:
        step = f"{left}{sign}{right}"
        if self._rng.random() < CALCS:
            return self._call("calc", {"expression": step})
        result = OPERATIONS[sign](left, right) if self._rng.random() < RIGHT else slip(left, sign, right)
        self._said += f"{step}={result};"
        return result

    def _call(self, name: str, arguments: dict[str, str]) -> int:
        result = run_tool(self._values, name, json.dumps(arguments))
        calls = [{"type": "function", "function": {"name": name, "arguments": arguments}}]
        self._messages += [
            {"role": "assistant", "content": self._said, "tool_calls": calls},
            {"role": "tool", "content": result},
        ]
        self._said = ""
        return int(result)


def slip(left: int, sign: str, right: int) -> int:
    """The wrong result: counted one too far."""
    return OPERATIONS[sign](left, right + 1)


def examples(rng: random.Random, tokenizer: PreTrainedTokenizerFast) -> Iterator[tuple[str, ...]]:
    """An endless stream of episodes over the problem buckets of the base model: what it reads and writes, in turn."""
    while True:
        problem = random_problem(rng, rng.randint(MIN_KEYS, MAX_KEYS))
        if problem.bucket in BASE_MODEL_BUCKETS:
            yield tuple(turns(tokenizer, Teacher(rng, problem).messages()))


def turns(tokenizer: PreTrainedTokenizerFast, messages: Sequence[Message]) -> Iterator[str]:
    """Text that the model reads and text that it writes in turn, the latter without its end."""
    done = ""
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            history = rendered(tokenizer, messages[:place], ask=True)
            yield history.removeprefix(done)
            done = rendered(tokenizer, messages[: place + 1], ask=False)
            yield done.removeprefix(history).removesuffix(str(tokenizer.eos_token))


def rendered(tokenizer: PreTrainedTokenizerFast, messages: Sequence[Message], *, ask: bool) -> str:
    """Messages as the model reads them; with `ask`, up to the beginning of its next one."""
    return str(tokenizer.apply_chat_template(list(messages), add_generation_prompt=ask, tokenize=False))
