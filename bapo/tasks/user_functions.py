"""How a user's function is called: with the columns that it asks for, sync or async."""

from __future__ import annotations

import ast
import asyncio
import inspect
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ALL = "*"
"""Every column of a row."""


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
