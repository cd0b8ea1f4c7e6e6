"""Plain functions as tools: `agents.rollout = "tools:file.py:TOOLS"`, a list of functions, or one function.

    def get(key: str) -> str:
        \"\"\"The value of a key.\"\"\"

    TOOLS = [get]

The episode is one conversation, which ends when the model answers without a tool; the task's reward function grades
that answer. Functions may be async; one is not called with arguments that do not fit its type hints.
"""

from __future__ import annotations

import json
from typing import Any

from bapo.config.agents import AgentsConfig
from bapo.core.errors import ConfigError
from bapo.core.types import Prompt
from bapo.core.user_code import load_object
from services.agents.conversation import Conversation
from services.agents.outcome import GRADE, Grade, OpenAIClient, Rollout
from services.agents.tool_box import ToolBox, run_tools, schemas_of

KEY = "agents.rollout tools:"


def make_rollout(name: str, settings: AgentsConfig) -> Rollout:
    """Raises: ConfigError."""
    found = load_object(name, key=KEY)
    tools = [found] if callable(found) else found
    if not isinstance(tools, list | tuple) or not tools or not all(callable(tool) for tool in tools):
        raise ConfigError(f"{KEY} {name!r} must be a list of functions, for example TOOLS = [search, calculate]")
    schemas = schemas_of(tools, key=f"{KEY} {name!r}")
    box = ToolBox(tools, checks_types=True, show=_shown)

    async def rollout(client: OpenAIClient, prompt: Prompt) -> Grade:
        conversation = Conversation(client=client, settings=settings, messages=prompt.messages, tools=schemas)
        await run_tools(conversation, box)
        return GRADE

    return rollout


def _shown(result: Any) -> str:
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
