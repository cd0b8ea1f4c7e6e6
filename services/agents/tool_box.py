"""Tools of one episode: what the model is offered, and what a call of it comes to.

A model is trained on what it wrote. Thus nothing that it writes ends an episode: an unknown tool, arguments that are no
JSON or do not fit, and a tool that raises are answered by a message that says so.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_type_hints

import msgspec

from bapo.core.errors import ConfigError
from bapo.core.user_code import place_of
from services.agents.conversation import Conversation, Message
from services.agents.threads import called
from services.agents.tool_schemas import Schema, schema_of

log = logging.getLogger(__name__)

Tool = Callable[..., Any]


def schemas_of(tools: Sequence[Tool], *, key: str) -> list[Schema]:
    """What the model is offered. Raises: ConfigError, also for two tools of one name."""
    found = [schema_of(tool, key=key) for tool in tools]
    names = [schema["function"]["name"] for schema in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{key}: two tools have the name {twice[0]!r}; a model calls a tool by its name")
    return found


class ToolBox:
    """Tools by name."""

    def __init__(self, tools: Sequence[Tool], *, checks_types: bool, show: Callable[[Any], str]) -> None:
        """
        Args:
            checks_types: whether an argument of another type than the hint is an error of the call.
            show: the text of what a tool returned.
        """
        self._tools = {tool.__name__: tool for tool in tools}
        self._checks_types, self._show = checks_types, show

    async def answer(self, call: Mapping[str, Any]) -> Message:
        """The message that follows a call of `message["tool_calls"]`."""
        function = call.get("function") or {}
        name = function.get("name", "unknown")
        try:
            if (tool := self._tools.get(name)) is None:
                raise ValueError(f"Tool {name} not found.")  # noqa: TRY301 - as TRL words it
            content = self._show(await called(tool, **self._arguments(tool, function.get("arguments"))))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a tool raises anything, and the model gave its arguments
            log.debug("the tool %s raised %s: %s%s", name, type(error).__name__, error, place_of(error))
            content = str({"error": str(error)})
        return {"role": "tool", "tool_call_id": call.get("id", ""), "name": name, "content": content}

    def _arguments(self, tool: Tool, given: Any) -> dict[str, Any]:
        try:
            found = json.loads(given) if isinstance(given, str) else given
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the arguments are not JSON: {error}") from error
        if not isinstance(found, dict):
            raise TypeError("the arguments are not a JSON object")
        inspect.signature(tool).bind(**found)
        if not self._checks_types:
            return found
        hints = get_type_hints(tool)
        try:
            return {name: msgspec.convert(value, hints[name]) for name, value in found.items()}
        except msgspec.ValidationError as error:
            raise TypeError(f"the arguments do not fit: {error}") from error


async def run_tools(conversation: Conversation, box: ToolBox) -> None:
    """Let the model talk and call tools, until it calls none, or a limit is reached."""
    while (message := await conversation.reply()) is not None:
        calls = message.get("tool_calls") or []
        if not calls:
            return
        for call in calls:
            conversation.messages.append(await box.answer(call))
