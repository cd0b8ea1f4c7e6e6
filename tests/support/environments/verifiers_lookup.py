"""The task `lookup` as a taskset of verifiers 0.4, with a harness that offers its tools."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import verifiers.v1 as vf

__all__ = ["Lookup", "LookupHarness"]

VALUES = ({"a": 37, "c": 5}, {"b": 61, "d": 12}, {"a": 9, "d": 20}, {"c": 44, "b": 3})


class LookupData(vf.TaskData):
    values: dict[str, int]


class LookupTask(vf.Task[LookupData]):
    @vf.reward
    async def right(self, task: LookupData, trace: vf.Trace) -> float:
        found = re.search(r"<answer>(\d+)</answer>", trace.root_reply or "")
        return float(found is not None and int(found[1]) == sum(task.values.values()) % 100)


class Lookup(vf.Taskset[LookupTask, vf.TasksetConfig]):
    def load(self) -> Any:
        for values in VALUES:
            yield LookupTask(LookupData(prompt="+".join(values), values=values), self.config.task)


def _tool(name: str, argument: str, text: str) -> Any:
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": text, "parameters": parameters}}


TOOLS = [
    _tool("get", "key", "The value of a key."),
    _tool("calc", "expression", "x+y or x-y of two integers, modulo 100."),
]


def answer(values: dict[str, int], name: str, given: str) -> str:
    arguments = json.loads(given)
    if name == "get":
        return str(values.get(arguments["key"], "unknown key"))
    found = re.fullmatch(r"(\d+)([-+])(\d+)", arguments["expression"].replace(" ", ""))
    if found is None:
        return "invalid expression"
    return str((int(found[1]) + int(f"{found[2]}{found[3]}")) % 100)


class LookupHarness(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> Any:
        messages = [{"role": "user", "content": data.prompt}]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            for _ in range(12):
                found = await client.chat.completions.create(model=ctx.model, messages=messages, tools=TOOLS)
                message = found.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    break
                for call in message.tool_calls:
                    text = answer(trace.task.data.values, call.function.name, call.function.arguments)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
        return vf.ProgramResult(0, "", "")
