"""The name under which the processes of a run find a reward function of a script or notebook.

A function of a module is found where it is. One of a notebook, or of the script itself, is written to a file with what
it uses of its module: imports, other functions, constants. Source, never pickle: the file can be read, and is the same
on every machine. Does not cover: closures, lambdas, methods, partials, and functions that use other objects.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from bapo.core.errors import ConfigError
from bapo.tasks.adapters.plain import PARAMETERS_OF

INSTEAD = 'write it to a file and pass its name, reward="my_rewards.py:function"'


def name_of(function: Callable[..., Any], file: Path) -> tuple[str, str]:
    """`task.reward` for a function, and what to write to `file` for it; "" for one of a module.

    Raises: ConfigError for what has no source of its own.
    """
    if not isinstance(function, FunctionType):
        raise ConfigError(f"reward: {function!r} is not a function defined by def; {INSTEAD}")
    name = function.__name__
    if name == "<lambda>":
        raise ConfigError(f"reward: a lambda has no name to be found by; define a function, or {INSTEAD}")
    if free := function.__code__.co_freevars:
        raise ConfigError(
            f"reward: {name} uses {', '.join(free)} of the function around it, which other processes do not have; "
            f"give it these as constants of the module, or {INSTEAD}"
        )
    prefix = next((f"{other.lower()}:" for key, other in PARAMETERS_OF.items() if key in _parameters(function)), "")
    module = inspect.getmodule(function)
    if module is not None and module.__name__ != "__main__" and function.__qualname__ == name:
        is_in_package = bool(module.__package__) or not (module.__file__ or "").endswith(".py")
        place = module.__name__ if is_in_package else Path(str(module.__file__)).resolve()
        return f"{prefix}{place}:{name}", ""
    text = "\n\n".join(["from __future__ import annotations", *_parts(function, {})])
    return f"{prefix}{file}:{name}", f"{text}\n"


def _parameters(function: FunctionType) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def _parts(function: FunctionType | type, seen: dict[str, object]) -> Iterator[str]:
    """The source of what a function uses, then its own. Raises: ConfigError."""
    name = function.__name__
    seen[name] = function
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError) as error:
        raise ConfigError(f"reward: the source of {name} is not there ({error}); {INSTEAD}") from error
    known = _globals_of(function)
    for used in dict.fromkeys(node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)):
        if used in known and used not in seen and not hasattr(builtins, used):
            seen[used] = known[used]
            yield from _part(used, known[used], name, seen)
    yield source.rstrip()


def _globals_of(function: FunctionType | type) -> dict[str, Any]:
    if isinstance(function, FunctionType):
        return function.__globals__
    module = inspect.getmodule(function)
    return vars(module) if module else {}


def _part(used: str, value: Any, user: str, seen: dict[str, object]) -> Iterator[str]:
    """What defines one name that a function uses."""
    if isinstance(value, ModuleType):
        yield f"import {value.__name__} as {used}"
        return
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if isinstance(value, FunctionType | type) and module == "__main__" and value.__name__ == used:
        yield from _parts(value, seen)
    elif module not in (None, "__main__") and name.isidentifier():
        yield f"from {module} import {name} as {used}"
    elif _is_constant(value):
        yield f"{used} = {value!r}"
    else:
        raise ConfigError(
            f"reward: {user} uses {used}, a {type(value).__name__}, which cannot be written to a file; create it in "
            f"{user}, or {INSTEAD}"
        )


def _is_constant(value: Any) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False
