"""Make `docs/configuration.md` from the tree: `python -m bapo.config.document [FILE]`.

Every word of the page is in the code: the docstrings of the sections and of their keys, defaults, types and presets.
"""

from __future__ import annotations

import re
import sys
import types
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from bapo.config.check import is_section, shown
from bapo.config.names import NAMES
from bapo.config.preset_list import PRESET_GROUPS, about_preset
from bapo.config.tree import Config

PAGE = Path("docs/configuration.md")

INTRODUCTION = """\
# Configuration

<!-- Made by `python -m bapo.config.document` from bapo/config and bapo/algorithms/settings.py: edit those. -->

One TOML file is one run: `bapo train run.toml`. What a file does not say is taken from the preset that it names
(`preset = "bapo"`), and then from the defaults below. Several files lie on top of each other from left to right; on top
of all lie overrides from the command line:

    bapo train run.toml big.toml --learner.lr 1e-4 --algorithm.use_x2 false --run.name first

An override's value is TOML (`1e-4`, `true`, `[0.1, 0.5]`, `'{path = "a.jsonl"}'`), and plain text where it is not TOML.
A table in a file adds to the table below it; an override replaces it. TOML has no null, so `"null"` means null.
Unknown keys, wrong types and combinations that cannot work are refused before anything starts. `bapo config show`
prints the result; `bapo config diff A B` compares two.
"""


def document() -> str:
    parts = [INTRODUCTION, *_names(), *_presets(), "## `preset`\n", f"{_one_line(_docs(Config, 'preset'))}\n"]
    for name, field in Config.model_fields.items():
        if is_section(field.annotation):
            parts += _section(name, field.annotation)
    return "\n".join(parts)


def _presets() -> Iterator[str]:
    yield "## Presets\n"
    for heading, names in PRESET_GROUPS.items():
        yield f"**{heading}**\n\n| preset | what it is |\n|---|---|"
        for name in names:
            yield f"| `{name}` | {_cell(about_preset(name))} |"
        yield ""


def _names() -> Iterator[str]:
    yield "## Names in the paper, in TRL and in verl\n"
    yield "The paper's letters are accepted as keys (`cadence.v`). The others are not, and the message names ours.\n"
    yield "| key | paper | TRL | verl |\n|---|---|---|---|"
    for row in NAMES:
        yield f"| `{row.key}` | {row.symbol} | {_code(row.trl)} | {_code(row.verl)} |"
    yield ""


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _section(name: str, section: type[BaseModel]) -> Iterator[str]:
    yield f"## `[{name}]`\n"
    yield f"{_one_line(section.__doc__ or '')}\n"
    yield "| key | type | default | meaning |\n|---|---|---|---|"
    nested = {key: field.annotation for key, field in section.model_fields.items() if is_section(field.annotation)}
    for key, field in section.model_fields.items():
        if key in nested:
            continue
        default = shown(field.get_default(call_default_factory=True))
        yield f"| `{key}` | {_cell(_type_of(field))} | `{_cell(default)}` | {_cell(_docs(section, key))} |"
    yield ""
    for key, inner in nested.items():
        yield from _section(f"{name}.{key}", inner)


def _docs(section: type[BaseModel], key: str) -> str:
    return section.model_fields[key].description or ""


def _type_of(field: FieldInfo) -> str:
    """The annotation in words, with its bounds: "int, >= 1"."""
    bounds = [
        f"{sign} {getattr(rule, name)}"
        for rule in field.metadata
        for name, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
        if getattr(rule, name, None) is not None
    ]
    return ", ".join([_words(field.annotation), *bounds])


def _words(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is types.NoneType:
        return "null"
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_words(argument) for argument in arguments)
    if origin is typing.Annotated:
        return _words(arguments[0])
    if origin is tuple and arguments[-1] is Ellipsis:
        return f"list of {_words(arguments[0])}"
    if origin is tuple:
        return f"[{', '.join(_words(argument) for argument in arguments)}]"
    return "table" if origin is dict else str(annotation.__name__)


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def _cell(text: str) -> str:
    return _one_line(text).replace("|", "\\|")


def main() -> None:
    page = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    page.write_text(document(), encoding="utf-8")


if __name__ == "__main__":
    main()
