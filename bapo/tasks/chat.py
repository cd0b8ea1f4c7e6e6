"""Chat templates from the tokenizer's files.

    chat_template.jinja, or `chat_template` of tokenizer_config.json, rendered with the generation prompt at the end

Renders like transformers (tested), without its seconds of import time: every service builds prompts. Exception: a
template that asks for today's date gets a fixed one.
Not supported: tools, documents, named templates other than `default`.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

from bapo.core.errors import ConfigError

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

CHAT_DATE = "2024-07-26"
"""Default date of the templates of Llama 3.1 and 3.2."""

Render = Callable[[Sequence[Mapping[str, str]]], str]


def chat_template(tokenizer: str, options: Mapping[str, Any], *, today: str = CHAT_DATE) -> Render | None:
    """Renderer of conversations; None if the tokenizer has no template.

    Args:
        tokenizer: model directory or Hub id.
        options: extra template variables, such as `enable_thinking`.
        today: date for templates that print one, as YYYY-MM-DD.
    Raises: ConfigError for unreadable files, a template that does not compile, an invalid date; when called, for a
        conversation that the template rejects.
    """
    config = json.loads(_file(tokenizer, CONFIG_FILE) or "{}")
    source = _file(tokenizer, TEMPLATE_FILE) or _default(config.get("chat_template"))
    if source is None:
        return None
    template = _compiled(source, tokenizer, _midnight(today))
    special = {name: _token(config[name]) for name in SPECIAL_TOKENS if config.get(name) is not None}

    def render(messages: Sequence[Mapping[str, str]]) -> str:
        try:
            text: str = template.render(messages=messages, add_generation_prompt=True, **special, **options)
        except Exception as error:  # a template runs code of its own, which may raise anything
            raise ConfigError(f"the chat template of {tokenizer} failed for a conversation: {error}") from error
        return text

    return render


def _compiled(source: str, tokenizer: str, now: datetime) -> Any:
    # Imported lazily: jinja2 comes with torch and transformers, which text prompts do not need.
    try:
        jinja2, sandbox = importlib.import_module("jinja2"), importlib.import_module("jinja2.sandbox")
    except ImportError as error:
        raise ConfigError(f"the chat template of {tokenizer} requires jinja2 (pip install jinja2)") from error
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation()]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = now.strftime
    try:
        return environment.from_string(source)
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


def _file(tokenizer: str, name: str) -> str | None:
    """A text file of the tokenizer; None if it does not exist."""
    folder = Path(tokenizer)
    if folder.is_dir():
        path = folder / name
        return path.read_text(encoding="utf-8") if path.is_file() else None
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise ConfigError(f"{tokenizer!r} is not a folder, and a Hub id requires huggingface_hub") from error
    try:
        return Path(hub.hf_hub_download(tokenizer, name)).read_text(encoding="utf-8")
    except hub.errors.LocalEntryNotFoundError as error:
        if name == TEMPLATE_FILE:  # offline, and not among the files that were fetched: most models have none
            return None
        raise _unreadable(tokenizer, name, error) from error
    except hub.errors.EntryNotFoundError:
        return None
    except Exception as error:  # the Hub's client raises errors of its own and those of whatever HTTP library it has
        raise _unreadable(tokenizer, name, error) from error


def _unreadable(tokenizer: str, name: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"model.path: cannot read {name} of {tokenizer!r}, which defines its chat template: "
        f"{str(error).partition(chr(10))[0]}. Set task.options.message_format to format conversations without it"
    )


def _default(templates: Any) -> str | None:
    """One template, or a list of named ones."""
    if isinstance(templates, list):
        return next((one["template"] for one in templates if one.get("name") == "default"), None)
    return templates if isinstance(templates, str) else None


def _token(token: Any) -> str:
    return token["content"] if isinstance(token, Mapping) else str(token)


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
