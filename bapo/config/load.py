"""Load a validated `Config` from TOML files and `--section.key value`, and write it back to TOML.

    preset  <  presets and files, left to right  <  overrides, left to right

A file, or `--preset NAME`, may set the preset below all layers; a preset name also works as a file. All problems are
reported together, one line each: source, key, remedy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from bapo.config.check import explain, is_resolved, read_layer, shown, without_former
from bapo.config.layers import (
    NULL,
    Key,
    Layer,
    dotted,
    file_layer,
    flatten,
    merge,
    override_layers,
    preset_layers,
    preset_names,
)
from bapo.config.methods import with_methods
from bapo.config.tree import Config
from bapo.core.errors import ConfigError


def load_config(files: Sequence[str | Path], overrides: Sequence[str]) -> Config:
    """Load the config of a run.

    Args:
        files: TOML files or preset names; later ones take precedence.
        overrides: command-line tokens, for example ["--learner.lr", "1e-4", "--algorithm.use_x2=false"].
    Raises: ConfigError with one line per problem.
    """
    return load_layers([*(file_layer(file) for file in files), *override_layers(overrides)])


def load_layers(layers: Sequence[Layer]) -> Config:
    """Build the config of layers, in increasing precedence, on top of the preset set by the last layer that has one.

    Raises: ConfigError with one line per problem.
    """
    preset = _preset_of(layers)
    for layer in layers:
        own = layer.values.get("preset")
        if preset not in (None, own) and is_resolved(layer):
            raise ConfigError(
                f'preset = "{preset}" would change nothing: {layer.source} has every key (preset {own or "none"}), and '
                "files are above the preset; leave in the file what you set yourself, or train it without the preset"
            )
    return _build([*(preset_layers(preset) if preset else []), *layers], own_files=True, typed=layers)


def load_resolved(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Load a config written by `dump_toml`, which is complete, so its preset is not applied again.

    Raises: ConfigError.
    """
    return _build([file_layer(path), *override_layers(overrides)], own_files=bool(overrides))


def load_recorded(path: str | Path) -> Config:
    """Load the config of a run whose records are read and that is not continued: what it had of methods and settings
    that are gone is left out. Raises: ConfigError.
    """
    layer = without_former(file_layer(path))
    return _build([layer], own_files=False, is_record=True)


def dump_toml(config: Config) -> str:
    """All keys of the config as TOML, to be read by `load_resolved`, or by `load_config` on top of the config's preset.

    TOML has no null: it is the word "null" where the default or the preset has a value, and omitted elsewhere.
    """
    # A run of an earlier version may have a preset that was removed.
    layers = preset_layers(config.preset) if config.preset in preset_names() else []
    beneath = reduce(merge, layers, Config().model_dump())
    return tomli_w.dumps(_without_nulls(config.model_dump(), beneath))


def diff(a: Config, b: Config) -> list[str]:
    """One line per key whose value differs: "learner.lr: 1e-06 -> 0.0001"."""
    left, right = dict(flatten(a.model_dump())), dict(flatten(b.model_dump()))
    keys = [*left, *(key for key in right if key not in left)]
    return [
        f"{dotted(key)}: {_shown_in(left, key)} -> {_shown_in(right, key)}"
        for key in keys
        if left.get(key, _ABSENT) != right.get(key, _ABSENT)
    ]


_ABSENT = object()


def _shown_in(values: Mapping[Key, Any], key: Key) -> str:
    return shown(values[key]) if key in values else "(not set)"


def _preset_of(layers: Sequence[Layer]) -> str | None:
    """The preset set by the last layer that has one."""
    named = [read_layer(layer)[0]["preset"] for layer in layers if "preset" in layer.values]
    return named[-1] if named and isinstance(named[-1], str) else None


def _build(layers: Sequence[Layer], *, own_files: bool, typed: Sequence[Layer] = (), is_record: bool = False) -> Config:
    values: dict[str, Any] = {}
    sources: dict[Key, str] = {}
    problems: list[str] = []
    for layer in layers:
        read, found = read_layer(layer)
        problems += found
        values = merge(values, Layer(source=layer.source, values=read, at=layer.at))
        sources.update((key, layer.source) for key, _ in flatten(read))
    if problems:
        raise ConfigError("\n".join(problems))
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(explain(error, sources))) from error
    return with_methods(config, sources, typed, own_files=own_files, is_record=is_record)


def _without_nulls(values: Mapping[str, Any], beneath: Mapping[str, Any]) -> dict[str, Any]:
    return dict(_writable(values, beneath))


def _writable(values: Mapping[str, Any], beneath: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        lower = beneath.get(name, _ABSENT)
        if isinstance(value, Mapping):
            yield name, _without_nulls(value, lower if isinstance(lower, Mapping) else {})
        elif isinstance(value, list | tuple):
            yield name, [_without_nulls(one, dict.fromkeys(one)) if isinstance(one, Mapping) else one for one in value]
        elif value is not None:
            yield name, value
        elif lower is not None:
            yield name, NULL
