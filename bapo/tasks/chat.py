"""Conversations as the text that a model reads: by its chat template, or by any other function of messages.

A conversation that ends with the assistant's message is continued (transformers' `continue_final_message`); any other
one gets the generation prompt. The template's variables are those that transformers gives it, and the text is the same
(tested), without transformers' seconds of import time: every service builds prompts. Exception: a template that asks
for today's date gets a fixed one.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, datetime, time
from typing import Any

from bapo.core.errors import ConfigError
from bapo.tasks.base import ASSISTANT
from bapo.tasks.tokenizer_files import TokenizerFiles

CHAT_DATE = "2024-07-26"
"""Default date of the templates of Llama 3.1 and 3.2."""
RESERVED_OPTIONS = ("messages", "add_generation_prompt", "continue_final_message")
OPEN_END = "OpenEndOfTheLastMessage "
"""Put behind the message to continue, to find its end in the text. It shows whether a template strips messages."""

Messages = Sequence[Mapping[str, Any]]
Render = Callable[[Messages], str]


def chat_template(tokenizer: str, options: Mapping[str, Any], *, today: str = CHAT_DATE) -> Render | None:
    """Renderer of conversations; None if the tokenizer has no template.

    Args:
        tokenizer: model directory or Hub id.
        options: extra template variables, such as `enable_thinking`; also `tools` and `documents`.
        today: date for templates that print one, as YYYY-MM-DD.
    Raises: ConfigError for unreadable files, a template that does not compile, an invalid date or option; when called,
        for a conversation that the template rejects or cannot continue.
    """
    variables = chat_variables(options, today)
    files = TokenizerFiles(tokenizer)
    source = files.template(with_tools=options.get("tools") is not None)
    if source is None:
        return None
    template, used = _compiled(source, tokenizer)
    context = {"tools": None, "documents": None, **files.special_tokens(used - options.keys()), **variables}

    def render(messages: Messages) -> str:
        def write(shown: Messages) -> str:
            ask = {"messages": shown, "add_generation_prompt": not is_open(messages)}
            try:
                return str(template.render(**context, **ask))
            except Exception as error:  # a template runs code of its own, which may raise anything
                raise ConfigError(f"the chat template of {tokenizer} failed for a conversation: {error}") from error

        return written_open(write, messages) if is_open(messages) else write(messages)

    return render


def chat_variables(options: Mapping[str, Any], today: str) -> dict[str, Any]:
    """What a template finds besides the conversation and special tokens; arguments as above. Raises: ConfigError."""
    if reserved := [name for name in RESERVED_OPTIONS if name in options]:
        raise ConfigError(f"task.options.chat_options: {reserved[0]} cannot be set; it follows from each conversation")
    return {"strftime_now": _midnight(today).strftime, **options}


def is_open(messages: Messages) -> bool:
    """Whether a conversation ends with the beginning of an assistant's message, which the model continues."""
    return bool(messages) and messages[-1].get("role") == ASSISTANT


def written_open(write: Render, messages: Messages) -> str:
    """Text up to the end of the last message's content. Raises: ConfigError if `write` drops or changes the content."""
    content = messages[-1]["content"]
    text = write([*messages[:-1], {**messages[-1], "content": content + OPEN_END}])
    end = text.rfind(OPEN_END.strip(" "))
    if end < 0 or content.strip() not in text:
        raise ConfigError(
            f"the conversation ends with an assistant's message, which is to be continued, and its format changes or "
            f"omits {content!r:.80}; write another beginning, or remove the message"
        )
    is_stripped = not text.startswith(OPEN_END, end)
    return text[:end].rstrip() if is_stripped else text[:end]


def _compiled(source: str, tokenizer: str) -> tuple[Any, frozenset[str]]:
    """The template and the names of its variables."""
    # Imported lazily: jinja2 comes with torch and transformers, which text prompts do not need.
    try:
        jinja2, sandbox, meta = map(importlib.import_module, ("jinja2", "jinja2.sandbox", "jinja2.meta"))
    except ImportError as error:
        raise ConfigError(f"the chat template of {tokenizer} requires jinja2 (pip install jinja2)") from error
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation()]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    try:
        variables: Iterable[str] = meta.find_undeclared_variables(environment.parse(source))
        return environment.from_string(source), frozenset(variables)
    except jinja2.TemplateError as error:
        raise ConfigError(f"the chat template of {tokenizer} is malformed: {error}") from error


def _generation() -> type:
    """The block {% generation %}, which transformers uses for assistant masks. It does not change the text."""
    nodes, extensions = importlib.import_module("jinja2.nodes"), importlib.import_module("jinja2.ext")

    def parse(_: Any, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.Scope(body).set_lineno(line)

    return type("Generation", (extensions.Extension,), {"tags": {"generation"}, "parse": parse})


def _midnight(today: str) -> datetime:
    try:
        return datetime.combine(date.fromisoformat(today), time())
    except ValueError as error:
        raise ConfigError(f"task.options.chat_date = {today!r} is not a date: use YYYY-MM-DD") from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Same arguments as transformers' filter, in the same order; jinja2's built-in filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise ValueError(message)
