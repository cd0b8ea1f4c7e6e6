"""Layers of settings: TOML files and command-line overrides as nested maps, with the source of each value.

A file's tables are merged key by key into those below it; an override replaces the value at its key.
TOML has no null, so the word "null" (as a string in a file, bare on the command line) means null everywhere.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bapo.config.names import MOVED, as_override
from bapo.core.errors import ConfigError, did_you_mean
from bapo.core.plugins import CONTRIB

Key = tuple[str, ...]
"""("learner", "lr")."""

NULL = "null"
PRESETS = Path(__file__).with_name("presets")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Settings from one source."""

    source: str
    """Name in messages: a file name, "preset bapo" or "--learner.lr"."""
    values: Mapping[str, Any]
    """Nested as in TOML."""
    at: Key = ()
    """Key of an override, whose value replaces that of lower layers, including tables. Empty for a file."""


def preset_paths() -> dict[str, Path]:
    """Name -> file of each preset, of the core and of the folders of `contrib`, sorted by name."""
    contrib = find_spec(CONTRIB)
    folders = [] if contrib is None else contrib.submodule_search_locations or []
    files = [*PRESETS.glob("*.toml"), *(path for folder in folders for path in Path(folder).glob("*/*.toml"))]
    return {path.stem: path for path in sorted(files, key=lambda path: path.stem)}


def preset_names() -> tuple[str, ...]:
    return tuple(preset_paths())


def file_layer(file: str | Path) -> Layer:
    """The layer of a TOML file, or of a preset given by name.

    Raises: ConfigError if there is no such file or it is not TOML.
    """
    path = Path(file)
    if not path.exists() and (override := as_override(str(file))):
        raise ConfigError(f"{file}: overrides have the form {override}")
    if not path.is_file() and str(file) in preset_names():
        return Layer(source=f"preset {file}", values={"preset": str(file)})
    values = _read_toml(path)
    if "study" in values and "methods" in values:
        raise ConfigError(f"{file}: this is a study, not a run; start it with: bapo study {file}")
    return Layer(source=str(file), values=values)


def preset_layers(name: str, above: Sequence[str] = ()) -> list[Layer]:
    """The layer of a preset, on top of the layers of its own preset.

    Raises: ConfigError for an unknown name or a cycle.
    """
    if name not in preset_names():
        raise ConfigError(
            f"preset = {name!r}: unknown preset{did_you_mean(name, preset_names())}; "
            "start with grpo, dapo, bapo-v1 or bapo; `bapo config presets` lists all"
        )
    if name in above:
        raise ConfigError(f"presets form a cycle: {' -> '.join([*above, name])}")
    values = _read_toml(preset_paths()[name])
    beneath = preset_layers(values["preset"], [*above, name]) if "preset" in values else []
    return [*beneath, Layer(source=f"preset {name}", values=values)]


def override_layers(tokens: Sequence[str]) -> list[Layer]:
    """The layers of `--section.key value` and `--section.key=value` tokens, in order.

    Raises: ConfigError if a token is not of this form.
    """
    layers = []
    rest = list(tokens)
    while rest:
        token = rest.pop(0)
        if not token.startswith("--") or len(token) == 2:
            raise ConfigError(f"{token!r} is not an override; use --section.key value, for example --learner.lr 1e-4")
        name, equals, text = token[2:].partition("=")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"--{name} needs a value; use --{name} VALUE or --{name}=VALUE")
            text = rest.pop(0)
        key = tuple(MOVED.get(name, name).split("."))
        layers.append(Layer(source=f"--{name}", values=nested(key, RawText(text)), at=key))
    return layers


class RawText(str):
    """The text of an override, whose type depends on its key: `learner.lr` or `run.name` = 1e3."""

    __slots__ = ()

    def value(self, *, of_string_key: bool) -> Any:
        """Parse as a TOML value; plain text if it is not TOML, or if the key is a string."""
        if self == NULL:
            return None
        try:
            parsed = tomllib.loads(f"value = {self}")["value"]
        except tomllib.TOMLDecodeError:
            return str(self)
        return str(self) if of_string_key and not isinstance(parsed, str) else parsed


def merge(below: Mapping[str, Any], layer: Layer) -> dict[str, Any]:
    """Merge a layer on top of `below`."""
    return _merge(below, layer.values, len(layer.at))


def flatten(values: Mapping[str, Any], prefix: Key = ()) -> Iterator[tuple[Key, Any]]:
    """(key, value) of every leaf; an empty map is a leaf."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, (*prefix, name))
        else:
            yield (*prefix, name), value


def dotted(key: Sequence[Any]) -> str:
    """("learner", "lr") -> "learner.lr"."""
    return ".".join(str(part) for part in key)


def _merge(below: Mapping[str, Any], above: Mapping[str, Any], depth: int) -> dict[str, Any]:
    """`depth`: length of the key whose value is replaced; 0: maps are merged at every depth."""
    merged = dict(below)
    for name, value in above.items():
        lower = merged.get(name)
        if depth != 1 and isinstance(value, Mapping) and isinstance(lower, Mapping):
            merged[name] = _merge(lower, value, max(0, depth - 1))
        else:
            merged[name] = value
    return merged


def nested(key: Sequence[str], value: Any) -> dict[str, Any]:
    """("learner", "lr"), 1e-4 -> {"learner": {"lr": 1e-4}}."""
    for name in reversed(key):
        value = {name: value}
    return dict(value)


def without(values: Mapping[str, Any], key: Key) -> dict[str, Any]:
    """The values without this key, and without tables that it leaves empty."""
    first, *rest = key
    if not rest:
        return {name: value for name, value in values.items() if name != first}
    inner = without(values[first], tuple(rest))
    return {name: inner if name == first else value for name, value in values.items() if name != first or inner}


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        hint = did_you_mean(str(path), preset_names())
        raise ConfigError(f"{path}: no such file or preset{hint}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    return values
