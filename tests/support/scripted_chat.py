"""A model that says what a test wrote: in place of `openai.AsyncOpenAI`."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace
from typing import Any

import httpx
from openai import BadRequestError
from openai.types.chat import ChatCompletionMessage


def calls(*functions: tuple[str, Any]) -> dict[str, Any]:
    """A message that calls tools: names and arguments, as a map or as what the model wrote."""
    return {
        "content": None,
        "tool_calls": [
            {
                "id": f"call-{number}",
                "type": "function",
                "function": {"name": name, "arguments": given if isinstance(given, str) else json.dumps(given)},
            }
            for number, (name, given) in enumerate(functions)
        ],
    }


def refusal(message: str) -> BadRequestError:
    """What the SDK raises for a status of 400."""
    request = httpx.Request("POST", "http://agents/v1/chat/completions")
    return BadRequestError(message, response=httpx.Response(400, request=request), body=None)


class ScriptedClient:
    """Says one line after the other; an exception is raised. `asked`: the messages and tools of each call."""

    def __init__(self, *lines: Any) -> None:
        self._lines = list(lines)
        self.asked: list[list[dict[str, Any]]] = []
        self.offered: list[Any] = []
        self.chat = SimpleNamespace(completions=self)

    async def create(self, *, model: str, messages: list[dict[str, Any]], tools: Any = None) -> Any:
        assert model == "policy"
        self.asked.append(copy.deepcopy(messages))
        self.offered.append(tools)
        line = self._lines.pop(0)
        if isinstance(line, Exception):
            raise line
        said = {"content": line} if isinstance(line, str) else line
        message = ChatCompletionMessage.model_validate({"role": "assistant", **said})
        return SimpleNamespace(choices=[SimpleNamespace(message=message)])
