"""Find a user's function by name, and say where in the user's file something went wrong.

    "package.module:function"   a module that Python finds
    "folder/file.py:function"   a file, relative to the working directory; what lies next to it can be imported
    "package.module.function"   the same as the first, as TRL writes it (only where an adapter says so)

Every mistake is a ConfigError that says what was searched for and what exists.
"""

from __future__ import annotations

import ast
import asyncio
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import bapo
from bapo.core.errors import ConfigError, did_you_mean

ALL = "*"
"""Every column of a row."""


def load_function(name: str, *, key: str, dots: bool = False) -> Callable[..., Any]:
    """The callable of that name; `key` names the setting in the messages.

    Args:
        dots: "package.module.function" is a name as well.
    Raises: ConfigError.
    """
    place, _, attribute = name.rpartition(":")
    if dots and not place:
        place, _, attribute = name.rpartition(".")
    if not place or not attribute:
        raise ConfigError(f'{key} {name!r} must have the form "package.module:function" or "file.py:function"')
    module = _module(place, f"{key} {name!r}")
    found = getattr(module, attribute, None)
    if found is None:
        hint = did_you_mean(attribute, (known for known in vars(module) if not known.startswith("_")))
        raise ConfigError(f"{key} {name!r}: {place} has no {attribute!r}{hint}")
    if not callable(found):
        raise ConfigError(f"{key} {name!r}: {attribute} is a {type(found).__name__}, not a function")
    return cast(Callable[..., Any], found)


def call_with(function: Callable[..., Any], given: Mapping[str, Any], columns: Mapping[str, Any]) -> Any:
    """Call with the arguments in `given` and those columns that the function has a name, or `**row`, for.

    Raises: TypeError that names an argument for which there is no column.
    """
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    named = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    arguments = {**columns, **given}
    missing = [p.name for p in parameters if p.name in named - arguments.keys() and p.default is p.empty]
    if missing:
        raise TypeError(
            f"it requires {', '.join(map(repr, missing))}, but the columns are "
            f"{', '.join(columns) or 'none'}. Add columns to task.options.extra_columns (bapo reward test: --columns)"
        )
    return function(**(arguments if takes_all else {name: arguments[name] for name in arguments if name in named}))


def columns_asked(name: str, *, dots: bool = False) -> frozenset[str]:
    """The names that a function takes, and `ALL` when it reads its `**kwargs`; by its source, nothing is imported.

    Args:
        name, dots: as for `load_function`. Nothing for a function whose source is not found by its name.
    """
    place, _, function = name.rpartition(":") if not dots or ":" in name else name.rpartition(".")
    path = place if place.endswith(".py") else f"{place.replace('.', '/')}.py"
    file = next((file for folder in ("", *sys.path) if (file := Path(folder, path)).is_file()), None)
    try:
        tree = ast.parse(file.read_bytes()) if file else ast.Module([], [])
    except (OSError, SyntaxError, ValueError):  # whoever loads it says what is wrong
        return frozenset()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function:
            rest = node.args.kwarg.arg if node.args.kwarg else None
            reads_rest = any(isinstance(inner, ast.Name) and inner.id == rest for inner in ast.walk(node))
            return frozenset(a.arg for a in (*node.args.args, *node.args.kwonlyargs)) | ({ALL} if reads_rest else set())
    return frozenset()


def settled(found: Sequence[Any]) -> list[Any]:
    """What the calls of a sync or async function come to. The calls themselves ran outside of any event loop."""

    async def together(waiting: Sequence[Awaitable[Any]]) -> list[Any]:
        return await asyncio.gather(*waiting)

    waiting = [one for one in found if inspect.isawaitable(one)]
    if not waiting:
        return list(found)
    done = iter(asyncio.run(together(waiting)))
    return [next(done) if inspect.isawaitable(one) else one for one in found]


def place_of(error: BaseException) -> str:
    """File and line of the innermost frame that raised `error`: " (score.py line 12)"; empty when only ours ran."""
    # Python's own frames follow a failed import.
    ours = ("<frozen", f"{Path(bapo.__file__).parent}{os.sep}")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
    return f" ({Path(frames[-1].filename).name} line {frames[-1].lineno})" if frames else ""


def _module(place: str, what: str) -> ModuleType:
    is_file = place.endswith(".py")
    if is_file and not Path(place).is_file():
        raise ConfigError(f"{what}: file {place} not found (in {Path.cwd()})")
    try:
        return _file_module(Path(place).resolve()) if is_file else importlib.import_module(place)
    except Exception as error:  # importing runs a user's module, which may raise anything
        advice = (
            "" if is_file else "; add the folder of a module next to the config to PYTHONPATH, or use file.py:function"
        )
        raise ConfigError(
            f"{what}: importing {place} failed: {type(error).__name__}: {error}{place_of(error)}{advice}"
        ) from error


def _file_module(path: Path) -> ModuleType:
    """The file as a module: loaded once, under a name that no other module has."""
    name = f"bapo_user_file:{path}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Last in the path: a file called `random.py` next to it must not hide the real one.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:  # Ctrl-C, too, must not leave half a module where the next import finds it
        del sys.modules[name]
        raise
    return module
