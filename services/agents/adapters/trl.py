"""Environments of TRL: `agents.rollout = "trl:file.py:MyEnv"`, what `GRPOTrainer(environment_factory=...)` takes.

As in TRL 1.16: a factory without arguments, or a map of factories by the value of the column `environment`. Public
methods are the tools; `reset(**columns)` begins an episode, and a text that it returns follows the last message of the
prompt; `get_reward()`, sync or async, gives the reward, and without it the task's reward function grades the last text.
Instances are made once and reset often. A tool that raises is answered with {'error': ...}.

Other than in TRL: rewards must be in [0, 1]; the tools of one message are called in the order of the calls, and their
answers keep it; an instance is not used again if its episode failed; content of images is not supported.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from bapo.config.agents import AgentsConfig
from bapo.core.errors import ConfigError
from bapo.core.types import Prompt
from bapo.core.user_code import load_object, place_of
from bapo.tasks.base import columns_of
from services.agents.conversation import Conversation, Message
from services.agents.outcome import GRADE, OpenAIClient, Outcome, Rollout
from services.agents.threads import called
from services.agents.tool_box import ToolBox, run_tools, schemas_of
from services.agents.tool_schemas import Schema

KEY = "agents.rollout trl:"
ENVIRONMENT = "environment"
"""The column that names an environment, where there are several."""
RESET, REWARD = "reset", "get_reward"


def make_rollout(name: str, settings: AgentsConfig) -> Rollout:
    """Raises: ConfigError."""
    found = load_object(name, key=KEY)
    is_many = isinstance(found, Mapping)
    factories = found if is_many else {None: found}
    pools = {kind: _Pool(factory, f"{KEY} {name!r}") for kind, factory in factories.items()}

    async def rollout(client: OpenAIClient, prompt: Prompt) -> Outcome:
        messages = prompt.messages
        columns = {"prompt": messages, **columns_of(prompt)}
        kind = columns.pop(ENVIRONMENT, None) if is_many else None
        if kind not in pools:
            raise ConfigError(f"the column {ENVIRONMENT!r} is {kind!r}; {name} has {', '.join(map(str, pools))}")
        pool = pools[kind]
        environment = await pool.take()
        messages = _with(messages, await called(environment.reset, **columns))
        conversation = Conversation(client=client, settings=settings, messages=messages, tools=pool.schemas)
        await run_tools(conversation, ToolBox(_tools(environment), checks_types=False, show=str))
        reward: Outcome = await called(environment.get_reward) if pool.has_reward else GRADE
        pool.give(environment)
        return reward

    return rollout


class _Pool:
    """Instances of one factory."""

    def __init__(self, factory: Callable[[], Any], what: str) -> None:
        """Raises: ConfigError."""
        if not callable(factory):
            raise ConfigError(f"{what} must be a class, or a function that makes an environment, not {factory!r:.100}")
        self._factory = factory
        try:
            first = factory()
        except Exception as error:
            raise ConfigError(
                f"{what}() raised {type(error).__name__}: {error}{place_of(error)}; it is called without arguments"
            ) from error
        if RESET not in _functions(first):
            raise ConfigError(f"{what}: {type(first).__name__} must define reset(self, **columns) -> str | None")
        self.has_reward = REWARD in _functions(first)
        self.schemas: list[Schema] = schemas_of(_tools(first), key=what)
        self._free = deque([first])

    async def take(self) -> Any:
        """One that no other episode has."""
        return self._free.popleft() if self._free else await called(self._factory)

    def give(self, environment: Any) -> None:
        """It may be reset."""
        self._free.append(environment)


def _functions(environment: Any) -> list[str]:
    # Of the class: properties of the instance are not evaluated.
    return [name for name, _ in inspect.getmembers(type(environment), predicate=inspect.isfunction)]


def _tools(environment: Any) -> list[Callable[..., Any]]:
    names = (name for name in _functions(environment) if not name.startswith("_") and name not in (RESET, REWARD))
    return [getattr(environment, name) for name in names]


def _with(messages: list[Message], observation: Any) -> list[Message]:
    """The messages with an observation after the text of the last one."""
    if observation is None:
        return messages
    *before, last = messages
    content = last["content"]
    if isinstance(observation, list) and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if isinstance(observation, str) and isinstance(content, list):
        observation = [{"type": "text", "text": observation}]
    return [*before, {**last, "content": content + observation}]
