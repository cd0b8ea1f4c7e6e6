"""Environments with reset and step (../environment.py): `agents.rollout = "env:file.py:MyEnv"`.

The episode is one conversation: each observation follows as the next message. It ends when the environment says so, or
at a limit (`agents.max_turns`, the tokens of a call or an episode), with the rewards until then.
"""

from __future__ import annotations

from typing import Any

from bapo.config.agents import AgentsConfig
from bapo.core.errors import ConfigError
from bapo.core.types import Prompt
from bapo.core.user_code import load_function
from services.agents.conversation import Conversation, Message
from services.agents.outcome import GRADE, OpenAIClient, Outcome, Rollout
from services.agents.threads import called

KEY = "agents.rollout env:"
METHODS = ("reset", "step")


def make_rollout(name: str, settings: AgentsConfig) -> Rollout:
    """Raises: ConfigError."""
    factory = load_function(name, key=KEY)
    if isinstance(factory, type):
        _require_methods(factory, f"{KEY} {name!r}")

    async def rollout(client: OpenAIClient, prompt: Prompt) -> Outcome:
        environment = await called(factory)
        _require_methods(environment, f"{KEY} {name!r}")
        try:
            return await _run(environment, client, prompt, settings)
        finally:
            if hasattr(environment, "close"):
                await called(environment.close)

    return rollout


async def _run(environment: Any, client: OpenAIClient, prompt: Prompt, settings: AgentsConfig) -> Outcome:
    opening = _messages(await called(environment.reset, prompt), "reset")
    tools = list(getattr(environment, "tools", None) or ())
    conversation = Conversation(client=client, settings=settings, messages=opening or prompt.messages, tools=tools)
    rewards: list[float] = []
    while (message := await conversation.reply()) is not None:
        step = await called(environment.step, message if tools else message.get("content") or "")
        if not isinstance(step, tuple) or len(step) != 3:
            raise TypeError(f"step returned {step!r:.200}, not a tuple (observation, reward, done)")
        observation, reward, is_done = step
        if reward is not None:
            rewards.append(float(reward))
        if is_done:
            break
        following = _messages(observation, "step")
        if not following:
            raise ValueError("step returned neither an observation nor done: the model has nothing to answer")
        conversation.messages += following
    return sum(rewards) if rewards else GRADE


def _messages(found: Any, method: str) -> list[Message]:
    if found is None:
        return []
    if isinstance(found, str):
        return [{"role": "user", "content": found}]
    if isinstance(found, list | tuple) and all(isinstance(one, dict) and "role" in one for one in found):
        return [dict(one) for one in found]
    raise TypeError(f"{method} returned {found!r:.200}, which is neither a text, nor a list of messages, nor None")


def _require_methods(environment: Any, what: str) -> None:
    for method in METHODS:
        if not callable(getattr(environment, method, None)):
            raise ConfigError(f"{what} has no method {method}; an environment has reset(prompt) and step(text)")
