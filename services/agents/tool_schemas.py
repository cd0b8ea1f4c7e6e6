"""The schema of a tool, as OpenAI's API takes it, from a function's type hints and docstring.

    def get(key: str, most: int = 3) -> str:
        \"\"\"The values of a key.

        Args:
            key: its name.
            most: how many.
        \"\"\"

The same as `transformers.utils.get_json_schema` makes, without its `return`, which is not in OpenAI's format; a
parameter may be left out of the docstring.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from bapo.core.errors import ConfigError

Schema = dict[str, Any]
PLAIN: Mapping[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array"} | {
    dict: "object",
    tuple: "array",
    type(None): "null",
}
SECTIONS = re.compile(r"^\s*(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):\s*$", re.MULTILINE)
ARGUMENT = re.compile(r"^(\w+)(?:\s*\([^)]*\))?:\s*(.*)$")


def schema_of(function: Callable[..., Any], *, key: str) -> Schema:
    """The tool of a function; `key` names the setting in messages. Raises: ConfigError for what a model cannot fill."""
    name = getattr(function, "__name__", "")
    what = f"{key}: the tool {name or function!r}"
    if not name.isidentifier() or name == "<lambda>":
        raise ConfigError(f"{what} has no name: a tool is a function or method")
    try:
        hints = get_type_hints(function)
    except (NameError, TypeError) as error:
        raise ConfigError(f"{what}: its type hints cannot be read: {error}") from error
    text, descriptions = _described(inspect.getdoc(function) or "")
    properties, required = {}, []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"{what}: *args, **kwargs and positional-only parameters cannot be filled by a model")
        if parameter.name not in hints:
            raise ConfigError(f"{what}: its parameter {parameter.name!r} needs a type hint, for example str")
        schema = type_schema(hints[parameter.name], f"{what}: its parameter {parameter.name!r}")
        described = descriptions.get(parameter.name)
        properties[parameter.name] = {**schema, "description": described} if described else schema
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters: Schema = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    return {"type": "function", "function": {"name": name, "description": text, "parameters": parameters}}


def type_schema(hint: Any, what: str) -> Schema:
    """JSON schema of a type hint. Raises: ConfigError."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if origin in (Union, types.UnionType):
        return _union(arguments, what)
    if origin is Literal:
        kinds = {type(value) for value in arguments}
        if len(kinds) == 1 and kinds <= {str, int, float, bool}:
            return {"type": PLAIN[kinds.pop()], "enum": list(arguments)}
    elif origin is list or (origin is tuple and len(arguments) == 2 and arguments[1] is ...):
        return {"type": "array", "items": type_schema(arguments[0], what)}
    elif origin is dict and arguments[0] is str:
        return {"type": "object", "additionalProperties": type_schema(arguments[1], what)}
    elif hint in PLAIN:
        return {"type": PLAIN[hint]}
    raise ConfigError(
        f"{what} has the type {hint}, which no tool call can have; use str, int, float, bool, list, dict with str as "
        "keys, Literal of one type, Optional, or a union of these"
    )


def _union(hints: tuple[Any, ...], what: str) -> Schema:
    others = [type_schema(hint, what) for hint in hints if hint is not type(None)]
    if len(others) == 1:
        found = others[0]
    elif all(list(other) == ["type"] for other in others):
        found = {"type": sorted(other["type"] for other in others)}
    else:
        found = {"anyOf": others}
    return {**found, "nullable": True} if type(None) in hints else found


def _described(docstring: str) -> tuple[str, dict[str, str]]:
    """What a docstring says of the function, and of each parameter."""
    parts = SECTIONS.split(docstring)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    lines = next((sections[name] for name in ("Args", "Arguments", "Parameters") if name in sections), "")
    found: dict[str, str] = {}
    indent: int | None = None
    name = ""
    for line in lines.splitlines():
        if not line.strip():
            continue
        depth = len(line) - len(line.lstrip())
        indent = depth if indent is None else indent
        matched = ARGUMENT.match(line.strip()) if depth <= indent else None
        if matched is not None:
            name = matched[1]
            found[name] = matched[2].strip()
        elif name:
            found[name] = f"{found[name]} {line.strip()}".strip()
    return parts[0].strip(), found
