"""Check a layer of settings before pydantic validates the merged config: unknown keys, sections, nulls, raw texts.

Messages contain the source (file or override), the key and a remedy; pydantic's errors are converted to this form.
"""

from __future__ import annotations

import difflib
import operator
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, reduce
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError

from bapo.algorithms.methods import KINDS
from bapo.config.layers import NULL, Key, Layer, RawText, dotted, flatten, merge, nested, without
from bapo.config.names import ALIASES, FIXED, MOVED, advice_for, names_of_trl, of_value
from bapo.config.tree import Config
from bapo.core.errors import ConfigError

M = TypeVar("M", bound=BaseModel)


def read_layer(layer: Layer) -> tuple[dict[str, Any], list[str]]:
    """The values of a layer with nulls and raw texts resolved, and one line per problem."""
    problems: list[str] = []
    values = dict(read_section(Config, _moved(layer.values), (), problems))
    return values, [at_source(layer.source, problem) for problem in problems]


def read_options(section: type[M], values: Mapping[str, Any], at: Key) -> M:
    """The table `at` as the settings of a plug-in. Raises: ConfigError with one line per problem."""
    problems: list[str] = []
    read = dict(read_section(section, values, at, problems))
    try:
        made = section.model_validate(read)
    except ValidationError as error:
        raise ConfigError("\n".join([*problems, *explain(error, None, at)])) from error
    if problems:
        raise ConfigError("\n".join(problems))
    return made


def explain(error: ValidationError, sources: Mapping[Key, str] | None, at: Key = ()) -> list[str]:
    """One line per error: source, key, value, and the expected value.

    Args:
        sources: key -> layer that set it; None: the layers are not known here.
        at: key of the section that was validated.
    """
    found = [{**details, "loc": (*at, *details["loc"])} for details in error.errors(include_url=False)]
    return [_line(details, sources) for details in _one_per_key(found)]


def _one_per_key(errors: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """pydantic has an error for each alternative of a type such as `float | Literal["auto"]`: they are joined."""
    found: list[Mapping[str, Any]] = []
    joined: dict[Key, dict[str, Any]] = {}
    for details in errors:
        key = tuple(str(part) for part in details["loc"][:-1])
        if not _has_alternatives(key):
            found.append(details)
        elif (first := joined.get(key)) is not None:
            first["msg"] += f", or {details['msg'][:1].lower()}{details['msg'][1:]}"
        else:
            joined[key] = {**details, "loc": details["loc"][:-1]}
            found.append(joined[key])
    return found


def _has_alternatives(key: Key) -> bool:
    """Whether the setting of this key has one of several types, besides null."""
    section: type[BaseModel] | None = Config
    annotation: Any = None
    for name in key:
        if section is None or name not in section.model_fields:
            return False
        annotation = section.model_fields[name].annotation
        section = section_of(annotation)
    return len(_kinds(annotation) - {types.NoneType}) > 1


@cache
def known_keys() -> tuple[str, ...]:
    """Every dotted key of the tree, with those of sections that are null by default."""
    return tuple(dotted(key) for key, _ in flatten(_with_optional(Config()).model_dump()))


def listening_sections(*, with_agents: bool) -> list[str]:
    """Sections with a port to listen on. Without agents not theirs: a key of a section that is null makes it."""
    sections = [key.removesuffix(".port") for key in known_keys() if key.endswith(".port")]
    return [section for section in sections if with_agents or section != "agents"]


def free_port_overrides(*, with_agents: bool) -> list[str]:
    """Command-line tokens after which a run listens on free ports."""
    return [f"--{section}.port=0" for section in listening_sections(with_agents=with_agents)]


def _with_optional(section: BaseModel) -> BaseModel:
    found: dict[str, BaseModel] = {}
    for name, field in type(section).model_fields.items():
        kind, value = section_of(field.annotation), getattr(section, name)
        if is_section(field.annotation):
            found[name] = _with_optional(value)
        elif kind is not None and value is None:
            found[name] = kind()
    return section.model_copy(update=found)


def shown(value: Any) -> str:
    """A value in TOML notation: null, true, "text", 1.0."""
    if value is None or isinstance(value, bool):
        return {None: NULL, True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(shown, value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def is_resolved(layer: Layer) -> bool:
    """Whether it is the config.toml of a run, or another complete one, and not what a user has written."""
    return len(list(flatten(layer.values))) > len(known_keys()) // 2


def without_former(layer: Layer) -> Layer:
    """The layer without keys that are settings no longer, whatever their values are."""
    return replace(layer, values=_without_fixed(layer.values, lambda _value, _only: True))


def _without_fixed(values: Mapping[str, Any], leaves: Callable[[Any, Any], bool]) -> dict[str, Any]:
    """The values without the former keys of which `leaves` says so, by their value and the only one that is left."""
    found = dict(flatten(values))
    former = ((tuple(name.split(".")), only) for name, only in FIXED.items())
    return reduce(without, (key for key, only in former if key in found and leaves(found[key], only)), dict(values))


def _moved(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with former keys of other sections under their keys, and without those that have their only value.

    A user's own part never had former keys.
    """
    found = dict(flatten(values))
    moved = _without_fixed(values, operator.eq)
    own = {kind.options for kind in KINDS if ":" in str(found.get(tuple(kind.key.split("."))))}
    for old, new in MOVED.items():
        key = tuple(old.split("."))
        if old != new and key in found:
            moved = without(moved, key)
            if new.rpartition(".")[0] not in own:
                moved = merge(moved, Layer(source="", values=nested(new.split("."), found[key])))
    return moved


def read_section(
    section: type[BaseModel], values: Mapping[str, Any], at: Key, problems: list[str]
) -> Iterator[tuple[str, Any]]:
    """The values of one section with nulls and raw texts resolved; problems are added to the list."""
    for written, value in values.items():
        name = ALIASES.get((*at, written), written)
        if name != written and name in values:
            problems.append(f"{dotted((*at, written))} is {dotted((*at, name))}: remove one of them")
        key = (*at, name)
        field = section.model_fields.get(name)
        if field is None:
            leaves = [leaf for leaf, _ in flatten(value, key)] if isinstance(value, Mapping) else []
            unknown = leaves if any(map(advice_for, leaves)) else [key]  # a table of verl: report each of its keys
            problems += [f"{dotted(leaf)}: unknown key{_nearest(leaf, section)}" for leaf in unknown]
        elif (kind := section_of(field.annotation)) is not None:
            if kind is not field.annotation and _resolve(value, frozenset()) is None:
                yield name, None
            else:
                yield from ((name, read) for read in _read_table(kind, value, key, problems))
        elif isinstance(value, Mapping) and (kind := section_of_values(field.annotation)) is not None:
            tables = ((each, _read_table(kind, inner, (*key, each), problems)) for each, inner in value.items())
            yield name, {each: read for each, found in tables for read in found}
        else:
            resolved = _resolve(value, kinds=_kinds(field.annotation))
            if isinstance(resolved, bool) and not {bool, Any} & _kinds(field.annotation):
                problems.append(f"{dotted(key)} = {shown(resolved)}: must be {_wanted(field.annotation)}")
            yield name, resolved


def _read_table(kind: type[BaseModel], value: Any, key: Key, problems: list[str]) -> Iterator[dict[str, Any]]:
    if isinstance(value, RawText):
        value = value.value(of_string_key=False)
    if isinstance(value, Mapping):
        yield dict(read_section(kind, value, key, problems))
    else:
        problems.append(f"{dotted(key)} is a section; use {dotted(key)}.KEY")


def _resolve(value: Any, kinds: frozenset[Any]) -> Any:
    """Resolve nulls and raw texts of one leaf, including nested lists and tables."""
    if isinstance(value, RawText):
        value = value.value(of_string_key=str in kinds)
    if isinstance(value, Mapping):
        return {name: _resolve(inner, frozenset()) for name, inner in value.items()}
    if isinstance(value, list):
        return [_resolve(inner, frozenset()) for inner in value]
    return None if value == NULL else value


def is_section(annotation: Any) -> typing.TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section of `Section` or `Section | None`; None for any other type."""
    return next(filter(is_section, (annotation, *_kinds(annotation))), None)


def section_of_values(annotation: Any) -> type[BaseModel] | None:
    """The section of `dict[str, Section]`."""
    found = next(filter(is_section, typing.get_args(annotation)), None)
    return found if typing.get_origin(annotation) is dict else None


def section_of_items(annotation: Any) -> type[BaseModel] | None:
    """The section of `tuple[Section, ...]`, alone or among other types."""
    items = (typing.get_args(kind)[0] for kind in _kinds(annotation) if typing.get_origin(kind) is tuple)
    return next(filter(is_section, items), None)


def _kinds(annotation: Any) -> frozenset[Any]:
    """The plain types in an annotation: float | None -> {float, NoneType}."""
    if typing.get_origin(annotation) is typing.Annotated:
        return _kinds(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return frozenset().union(*map(_kinds, typing.get_args(annotation)))
    return frozenset({annotation})


def _wanted(annotation: Any) -> str:
    names = {int: "an integer", float: "a number", str: "a string", types.NoneType: NULL}
    kinds = [
        kind
        for part in _kinds(annotation)
        for kind in (typing.get_args(part) if typing.get_origin(part) is Literal else (part,))
    ]
    return " or ".join(sorted(names.get(kind, str(kind)) for kind in kinds))


def _nearest(key: Key, section: type[BaseModel]) -> str:
    """A hint for an unknown key: the key for another framework's name, a similar key in its section, or the same name
    in another section."""
    key = (*key[:-1], key[-1].replace("-", "_"))  # TRL's command line takes both
    if advice := advice_for(key):
        return f"; {advice}"
    elsewhere = [known for known in known_keys() if known.rpartition(".")[2] == key[-1]]
    near = difflib.get_close_matches(key[-1], [*section.model_fields, *names_of_trl()], n=1)
    if near and near[0] not in section.model_fields:
        if not elsewhere:
            return f" (did you mean TRL's {near[0]!r}? {advice_for((near[0],))})"
        near = []
    found = [dotted((*key[:-1], near[0]))] if near else elsewhere
    return f" (did you mean {found[0]!r}?)" if found else ""


def _line(details: Any, sources: Mapping[Key, str] | None) -> str:
    loc: Sequence[Any] = details["loc"]
    message = details["msg"].removeprefix("Value error, ")
    if details["type"] == "value_error":
        # A rule about several keys includes their names; it has no single source.
        return f"{dotted(loc)}: {message}" if loc else message
    if details["type"] == "missing" and isinstance(loc[-1], str):
        return f"{dotted(loc)} is required"
    if details["type"] == "missing":
        loc, message = loc[:-1], "too few values"
    if details["type"] == "string_pattern_mismatch":
        message = "must be at most 64 letters, digits and . _ -, starting with a letter or digit"
    message += of_value(details["input"])
    key = tuple(str(part) for part in loc)
    problem = f"{dotted(key)} = {shown(details['input'])}: {message[:1].lower()}{message[1:]}"
    if sources is None:
        return problem
    source = next((sources[key[:n]] for n in range(len(key), 0, -1) if key[:n] in sources), "default")
    return at_source(source, problem)


def at_source(source: str, problem: str) -> str:
    """The place before the problem; an override, which is named like its key, stands for both."""
    return f"--{problem}" if problem.startswith(source.removeprefix("--")) else f"{source}: {problem}"
