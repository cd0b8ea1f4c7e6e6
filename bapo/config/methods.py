"""Composer, selector and loss of a config: found, their own settings read, and what they demand of the rest checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

from pydantic import BaseModel, ValidationError

from bapo.algorithms.methods import KINDS, Method, MethodSettings, own_settings
from bapo.config.check import at_source, explain, read_section
from bapo.config.layers import Key, Layer, dotted, flatten, preset_names
from bapo.config.names import MOVED, of_value
from bapo.config.tree import Config
from bapo.core.errors import ConfigError
from bapo.core.plugins import Kind


def with_methods(
    config: Config,
    sources: Mapping[Key, str],
    layers: Sequence[Layer],
    *,
    own_files: bool,
    is_record: bool = False,
) -> Config:
    """The config with all settings of its composer, selector, loss and advantage.

    Args:
        sources: key -> layer that set it.
        layers: those in which a setting of a method that is not chosen is an error; elsewhere it has no effect.
        own_files: also those of a user's own file. A process of a run leaves them to the process that needs them.
        is_record: it is only read: leave a method that there is not as it is, and leave out what one had of settings.
    Raises: ConfigError with one line per problem.
    """
    problems: list[str] = []
    for kind in KINDS:
        name = value_of(config, kind.key)
        if not kind.is_installed or (":" in name and not own_files):
            continue
        if is_record and ":" not in name and name not in kind.names():
            continue
        own, found = _read(kind, config, sources, is_record=is_record)
        problems += found
        if own is not None:
            problems += _of_another(kind, config, own, layers)
            config = _replaced(config, kind.options.split("."), own.model_dump())
    if problems:
        raise ConfigError("\n".join(problems))
    return config


def part_of(kind: Kind, config: Config) -> tuple[type[Method], MethodSettings]:
    """The part of this kind that the config names, and its own settings. Raises: ConfigError."""
    part: type[Method] = kind.find(value_of(config, kind.key))
    return part, own_settings(kind, part.Settings, value_of(config, kind.options))


def _read(
    kind: Kind, config: Config, sources: Mapping[Key, str], *, is_record: bool
) -> tuple[MethodSettings | None, list[str]]:
    """Its own settings, and one line per problem with them or with what it demands."""
    name, key = str(value_of(config, kind.key)), tuple(kind.key.split("."))
    try:
        part: type[Method] = kind.find(name)
    except ConfigError as error:
        preset = name.replace("_", "-")
        is_preset = preset in preset_names()
        what = f'{kind.key} = "{name}": this is a preset: set preset = "{preset}"' if is_preset else str(error)
        return None, [at_source(sources.get(key, "default"), f"{what}{of_value(name)}")]
    at, options, former = tuple(kind.options.split(".")), value_of(config, kind.options), _of_any(kind)
    of_others = {name for name in options if name not in part.Settings.model_fields and (is_record or name in former)}
    problems: list[str] = []
    values = dict(read_section(part.Settings, {k: v for k, v in options.items() if k not in of_others}, at, problems))
    problems = [at_source(_source(sources, at), problem) for problem in problems]
    try:
        own = part.Settings.model_validate(values)
    except ValidationError as error:
        return None, problems + explain(error, sources, at)
    return own, problems if is_record else problems + list(part.check(config, own))


def _of_another(kind: Kind, config: Config, own: MethodSettings, layers: Sequence[Layer]) -> list[str]:
    """One line per setting that only a method which is not chosen has. A layer that chooses that method too may lie
    beneath one that chooses another, and former keys stood in every config: neither is an error."""
    chosen, at = tuple(kind.key.split(".")), tuple(kind.options.split("."))
    others = _of_any(kind) - set(type(own).model_fields)
    lines = []
    for layer in layers:
        keys = [key for key, _ in flatten(layer.values)]
        former = layer.source.removeprefix("--")
        if chosen in keys or MOVED.get(former, former) != former:
            continue
        lines += [
            at_source(layer.source, f"{dotted(key)}: {_who_has(kind, key[-1], config)}")
            for key in keys
            if key[:-1] == at and key[-1] in others
        ]
    return lines


def _who_has(kind: Kind, option: str, config: Config) -> str:
    names = [name for name in kind.names() if option in kind.find(name).Settings.model_fields]
    who = f"{', '.join(names)} has" if names else "no method has it any more"
    return f'{kind.key} = "{value_of(config, kind.key)}" has no such setting; {who}'


def _of_any(kind: Kind) -> set[str]:
    """Settings that every config had once."""
    return {key.rpartition(".")[2] for key in MOVED.values() if key.rpartition(".")[0] == kind.options}


def _source(sources: Mapping[Key, str], at: Key) -> str:
    return next((source for key, source in reversed(list(sources.items())) if key[: len(at)] == at), "default")


def value_of(config: Config, key: str) -> Any:
    """The value of a dotted key."""
    return reduce(getattr, key.split("."), config)


def _replaced(section: Any, key: list[str], value: Any) -> Any:
    """The section with this value at that key."""
    assert isinstance(section, BaseModel)
    inner = value if len(key) == 1 else _replaced(getattr(section, key[0]), key[1:], value)
    return section.model_copy(update={key[0]: inner})
