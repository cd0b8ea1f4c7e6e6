"""The task `lookup` in each form that `agents.rollout` takes: an environment, tools, an environment of TRL."""

from __future__ import annotations

from typing import Any

from bapo.core.types import Prompt
from contrib.lookup.agent import TOOLS as SCHEMAS
from contrib.lookup.agent import calc as run_calc
from contrib.lookup.agent import get as run_get
from contrib.lookup.agent import run_tool
from contrib.lookup.task import LookupOptions, LookupTask

_TASK = LookupTask(LookupOptions())


class Episode:
    """An environment that offers its own tools."""

    tools = SCHEMAS

    def reset(self, prompt: Prompt) -> None:
        self._prompt = prompt

    def step(self, message: dict[str, Any]) -> tuple[Any, float | None, bool]:
        calls = message.get("tool_calls")
        if not calls:
            return None, _TASK.reward(self._prompt, message.get("content") or ""), True
        values = self._prompt.answer["values"]
        answers = [
            {
                "role": "tool",
                "tool_call_id": call["id"],
                "content": run_tool(values, call["function"]["name"], call["function"]["arguments"]),
            }
            for call in calls
        ]
        return answers, 0.0, False


class Trl:
    """What TRL takes as its environment_factory."""

    def reset(self, values: dict[str, int], **columns: Any) -> None:
        self._values = values

    def get(self, key: str) -> str:
        """The value of a key.

        Args:
            key: its name.
        """
        return run_get(self._values, key)

    def calc(self, expression: str) -> str:
        """x+y or x-y of two integers, modulo 100.

        Args:
            expression: the sum or difference.
        """
        return run_calc(self._values, expression)


def calc(expression: str) -> str:
    """x+y or x-y of two integers, modulo 100."""
    return run_calc({}, expression)


def get(key: str) -> str:
    """The value of a key."""
    return str({"a": 37, "b": 61, "c": 5, "d": 12}[key])


TOOLS = [get, calc]
