"""Tasks of verifiers, run by its agents, whose endpoint is that of an episode: the part of `standalone.py` for it.

Stand-alone as well: it imports the standard library and verifiers, and lies next to `standalone.py`.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import logging
import os
import sys
import types
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

log = logging.getLogger("agents")

Episode = dict[str, Any]
Message = dict[str, Any]

CALL_TIMEOUT_S = 1800.0
LIMITS = ("give its reward", "maximum context length", "maximum model length")
"""In the refusals of a call that does not fit any more."""
HARNESS = "bapo_harness"
"""A module of this name exists in memory alone: verifiers finds a harness by its module."""


class UngradedError(Exception):
    """The episode has no reward."""


def tasks_of(name: str, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The package, and the tasks of a taskset by their keys."""
    vf: Any = importlib.import_module("verifiers.v1")
    loaders: Any = importlib.import_module("verifiers.v1.utils.loaders")
    config = loaders.taskset_config_type(name).model_validate({**options.get("taskset", {}), "id": name})
    taskset = vf.load_taskset(config)
    if not taskset.bounded or "limit" in options:
        taskset = taskset.take(int(options.get("limit", 1000)))
    return vf, {task.key: task for task in taskset}


def make_run(name: str, flags: argparse.Namespace, options: dict[str, Any]) -> Callable[[Episode], Awaitable[float]]:
    """Tasks of verifiers, run by one of its agents, whose endpoint is ours."""
    vf, tasks = tasks_of(name, options)
    loaders: Any = importlib.import_module("verifiers.v1.utils.loaders")
    wanted = dict(options.get("harness", {}))
    own = wanted.pop("id", None) or (name if loaders.default_harness_id(name) != "bash" else None)
    base = chat_harness(vf) if own is None else loaders.harness_class(own)
    module: Any = types.ModuleType(HARNESS)
    module.Replying, module.__all__ = with_root_reply(base), ["Replying"]
    sys.modules[HARNESS] = module
    harness = loaders.harness_config_type(HARNESS).model_validate({**wanted, "id": HARNESS})
    numbers = itertools.count()

    async def run(episode: Episode) -> float:
        key = episode["prompt"]["answer"].get("key")
        if key not in tasks:
            raise UngradedError(f"no task has the key {key!r}: make the prompts with --export, with the same options")
        variable = f"BAPO_EPISODE_{next(numbers)}"
        os.environ[variable] = episode["key"]
        try:
            agent = vf.make_agent(
                vf.AgentConfig(
                    harness=harness,
                    model=flags.model,
                    client=vf.EvalClientConfig(base_url=episode["base_url"], api_key_var=variable),
                    runtime=vf.SubprocessConfig(),
                    max_turns=flags.max_turns,
                    retries=vf.RetryConfig(max_retries=0),  # a second attempt would be part of the same episode
                )
            )
            trace = await agent.run(tasks[key])
        finally:
            del os.environ[variable]
        return reward_of(trace)

    return run


def reward_of(trace: Any) -> float:
    """Raises: UngradedError for one that says nothing about the model."""
    if not trace.ok:
        raise UngradedError(f"verifiers: {trace.errors[-1].message if trace.errors else trace.stop_condition}")
    if trace.num_turns == 0:
        raise UngradedError("verifiers: the model was not called")
    missing = [name for name, reward in trace.rewards.items() if reward is None]
    if missing or not trace.rewards:
        raise UngradedError(f"verifiers: no reward from {', '.join(missing) or 'the task'}")
    return float(trace.reward)


def with_root_reply(base: Any) -> Any:
    """The harness, with the model's last text as `trace.root_reply`, which a reward may read: harnesses that set none
    would have a reward of 0 for whatever the model says."""

    class Replying(base):  # type: ignore[misc]
        async def launch(self, ctx: Any, trace: Any, *args: Any, **options: Any) -> Any:
            found = await super().launch(ctx, trace, *args, **options)
            if trace.root_reply is None and trace.assistant_messages:
                trace.root_reply = trace.last_reply
            return found

    return Replying


def chat_harness(vf: Any) -> Any:
    """A chat with the tools of the task, in this process: the harnesses of verifiers install a program first."""
    openai: Any = importlib.import_module("openai")
    mcp: Any = importlib.import_module("verifiers.v1.harnesses.utils.mcp")

    class Chat(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
        APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = True
        EXECUTES_CODE = NEEDS_CONTAINER = False

        async def launch(
            self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
        ) -> Any:
            system, prompt = self.resolve_prompt(data)
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else []
            messages = messages or [message.model_dump(exclude_none=True) for message in prompt or []]
            if system is not None:
                messages.insert(0, {"role": "system", "content": system})
            servers = {"mcpServers": {name: {"url": url} for name, url in mcp_urls.items()}}
            async with AsyncExitStack() as stack:
                schemas, names, connections = await mcp.connect_mcp(servers, stack)
                client = await stack.enter_async_context(
                    openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=8, timeout=CALL_TIMEOUT_S)
                )
                extra = {"tools": schemas} if schemas else {}
                while True:
                    try:
                        found = await client.chat.completions.create(model=ctx.model, messages=messages, **extra)
                    except openai.BadRequestError as error:
                        is_limit = trace.stop_condition or any(phrase in str(error) for phrase in LIMITS)
                        if not is_limit:
                            raise
                        return vf.ProgramResult(0, "", "")
                    message = found.choices[0].message
                    messages.append(message.model_dump(exclude_none=True))
                    if not message.tool_calls:
                        return vf.ProgramResult(0, "", "")
                    messages += [await self._answer(mcp, connections, names, call) for call in message.tool_calls]

        async def _answer(self, mcp: Any, connections: Any, names: Any, call: Any) -> Message:
            try:
                arguments = json.loads(call.function.arguments)
                content = await mcp.call_mcp(connections, names, call.function.name, arguments)
            except Exception as error:  # noqa: BLE001 - the model wrote the call, and reads what was wrong with it
                content = str({"error": f"{type(error).__name__}: {error}"})
            return {"role": "tool", "tool_call_id": call.id, "content": content}

    return Chat


def export_tasks(name: str, path: str, options: dict[str, Any]) -> None:
    """A row of a data set for each task."""
    _, tasks = tasks_of(name, options)
    with Path(path).open("w", encoding="utf-8") as file:
        for key, task in tasks.items():
            row = {"prompt": task.data.prompt_text, "answer": "", "key": key}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    log.info("%d tasks in %s", len(tasks), path)
