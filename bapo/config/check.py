"""Check a layer of settings against the tree, before pydantic sees the sum: unknown keys, sections, nulls, raw texts.

The messages name the place (file or override), the key and the way out; pydantic's own are turned into such lines too.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from bapo.config.layers import NULL, Key, Layer, RawText, dotted, flatten, preset_names
from bapo.config.names import ALIASES, advice_for, our_key
from bapo.config.tree import Config


def read_layer(layer: Layer) -> tuple[dict[str, Any], list[str]]:
    """The layer's values with nulls and raw texts resolved, and one line per problem."""
    problems: list[str] = []
    values = dict(_read(Config, layer.values, (), problems))
    return values, [_at(layer.source, problem) for problem in problems]


def explain(error: ValidationError, sources: Mapping[Key, str]) -> list[str]:
    """One line per error: where it was written, the key, its value, and what would be right.

    Args:
        sources: the layer that set each key.
    """
    return [_line(details, sources) for details in error.errors(include_url=False)]


@cache
def known_keys() -> tuple[str, ...]:
    """Every dotted key of the tree."""
    return tuple(dotted(key) for key, _ in flatten(Config().model_dump()))


def shown(value: Any) -> str:
    """A value as one writes it: null, true, "text", 1.0."""
    if value is None or isinstance(value, bool):
        return {None: NULL, True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(shown, value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _read(
    section: type[BaseModel], values: Mapping[str, Any], at: Key, problems: list[str]
) -> Iterator[tuple[str, Any]]:
    for written, value in values.items():
        name = ALIASES.get((*at, written), written)
        if name != written and name in values:
            problems.append(f"{dotted((*at, written))} is {dotted((*at, name))}: write one of the two")
        key = (*at, name)
        field = section.model_fields.get(name)
        if field is None:
            leaves = [leaf for leaf, _ in flatten(value, key)] if isinstance(value, Mapping) else []
            unknown = leaves if any(map(our_key, leaves)) else [key]  # a table of verl: each of its keys has its own
            problems += [f"{dotted(leaf)}: there is no such key{_nearest(leaf, section)}" for leaf in unknown]
        elif is_section(field.annotation):
            if isinstance(value, Mapping):
                yield name, dict(_read(field.annotation, value, key, problems))
            else:
                problems.append(f"{dotted(key)} is a section; write {dotted(key)}.KEY")
        else:
            resolved = _resolve(value, kinds=_kinds(field.annotation))
            if isinstance(resolved, bool) and not {bool, Any} & _kinds(field.annotation):
                problems.append(f"{dotted(key)} = {shown(resolved)}: write {_wanted(field.annotation)}")
            yield name, resolved


def _resolve(value: Any, kinds: frozenset[Any]) -> Any:
    """Nulls and raw texts of one leaf, also inside its lists and tables."""
    if isinstance(value, RawText):
        value = value.value(of_string_key=str in kinds)
    if isinstance(value, Mapping):
        return {name: _resolve(inner, frozenset()) for name, inner in value.items()}
    if isinstance(value, list):
        return [_resolve(inner, frozenset()) for inner in value]
    return None if value == NULL else value


def is_section(annotation: Any) -> typing.TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _kinds(annotation: Any) -> frozenset[Any]:
    """The plain types that an annotation admits: float | None -> {float, NoneType}."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return frozenset(typing.get_args(annotation))
    return frozenset({annotation})


def _wanted(annotation: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "a text", types.NoneType: NULL}
    kinds = [
        kind
        for part in _kinds(annotation)
        for kind in (typing.get_args(part) if typing.get_origin(part) is Literal else (part,))
    ]
    return " or ".join(sorted(names.get(kind, str(kind)) for kind in kinds))


def _nearest(key: Key, section: type[BaseModel]) -> str:
    """A hint for an unknown key: ours for another framework's name, a similar one in its section, or the same name in
    another section."""
    if advice := advice_for(key):
        return f"; {advice}"
    near = difflib.get_close_matches(key[-1], section.model_fields, n=1)
    elsewhere = [known for known in known_keys() if known.rpartition(".")[2] == key[-1]]
    found = [dotted((*key[:-1], near[0]))] if near else elsewhere
    return f" (did you mean {found[0]!r}?)" if found else ""


def _line(details: Any, sources: Mapping[Key, str]) -> str:
    loc: Sequence[Any] = details["loc"]
    message = details["msg"].removeprefix("Value error, ")
    if details["type"] == "value_error":
        # A rule about several keys names them itself; no single place wrote it.
        return f"{dotted(loc)}: {message}" if loc else message
    if details["type"] == "missing":
        loc, message = loc[:-1], "too few values"
    if details["type"] == "string_pattern_mismatch":
        message = "write letters, digits and . _ -, beginning with a letter or digit, 64 at most"
    if details["type"] == "literal_error" and (name := str(details["input"]).replace("_", "-")) in preset_names():
        message = f'a preset here: preset = "{name}"'
    if details["input"] == "bnpo":
        message += '. Of TRL: loss.aggregation = "token_mean"'
    key = tuple(str(part) for part in loc)
    source = next((sources[key[:n]] for n in range(len(key), 0, -1) if key[:n] in sources), "default")
    return _at(source, f"{dotted(key)} = {shown(details['input'])}: {message[:1].lower()}{message[1:]}")


def _at(source: str, problem: str) -> str:
    """The place before the problem; an override, which is named like its key, stands for both."""
    return f"--{problem}" if problem.startswith(source.removeprefix("--")) else f"{source}: {problem}"
