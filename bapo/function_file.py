"""The names under which the processes of a run find reward functions of a script or notebook.

A function of a module is found where it is. One of a notebook, or of the script itself, is written to a file with what
it uses of its module: imports, other functions, constants. Source, never pickle: the file can be read, and is the same
on every machine. Does not cover: closures, lambdas, methods, partials, and functions that use other objects.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from bapo.core.errors import ConfigError
from bapo.tasks.adapters.plain import PARAMETERS_OF

Reward = Callable[..., Any] | str
Rewards = Reward | Sequence[Reward | Mapping[str, Any]]
"""As `task.reward`, with functions in the place of names."""
INSTEAD = 'write it to a file and pass its name, reward="my_rewards.py:function"'


def named(rewards: Rewards, file: Path) -> tuple[Any, str]:
    """`task.reward` by names, and what to write to `file` for its functions; "" if each is one of a module.

    Raises: ConfigError for what has no source of its own.
    """
    parts: list[str] = []
    seen: dict[str, object] = {}

    def name(one: Any) -> Any:
        if isinstance(one, Mapping):
            return {key: name(value) if key == "function" else value for key, value in one.items()}
        return one if isinstance(one, str) else _name_of(one, file, seen, parts)

    names = [name(one) for one in rewards] if isinstance(rewards, list | tuple) else name(rewards)
    text = "\n\n".join(["from __future__ import annotations", *parts])
    return names, f"{text}\n" if parts else ""


def _name_of(function: Callable[..., Any], file: Path, seen: dict[str, object], parts: list[str]) -> str:
    """The name of one function, whose source goes to `parts` without what is `seen` there."""
    if not isinstance(function, FunctionType):
        raise ConfigError(f"reward: {function!r} is not a function defined by def; {INSTEAD}")
    name = function.__name__
    if name == "<lambda>":
        raise ConfigError(f"reward: a lambda has no name to be found by; define a function, or {INSTEAD}")
    _refuse_closure(function)
    prefix = next((f"{other.lower()}:" for key, other in PARAMETERS_OF.items() if key in _parameters(function)), "")
    module = inspect.getmodule(function)
    if module is not None and module.__name__ != "__main__" and function.__qualname__ == name:
        is_in_package = bool(module.__package__) or not (module.__file__ or "").endswith(".py")
        place = module.__name__ if is_in_package else Path(str(module.__file__)).resolve()
        return f"{prefix}{place}:{name}"
    if _is_new(name, function, seen):
        parts += _parts(function, seen)
    return f"{prefix}{file}:{name}"


def _refuse_closure(function: FunctionType) -> None:
    if free := function.__code__.co_freevars:
        raise ConfigError(
            f"reward: {function.__name__} uses {', '.join(free)} of the function around it, which other processes do "
            f"not have; give it these as constants of the module, or {INSTEAD}"
        )


def _parameters(function: FunctionType) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def _is_new(name: str, value: object, seen: Mapping[str, object]) -> bool:
    """Raises: ConfigError for another value of this name."""
    if name in seen and seen[name] is not value:
        raise ConfigError(f"reward: two functions use the name {name} for different things; rename one, or {INSTEAD}")
    return name not in seen


def _parts(function: FunctionType | type, seen: dict[str, object]) -> Iterator[str]:
    """The source of what a function uses, then its own. Raises: ConfigError."""
    name = function.__name__
    seen[name] = function
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError) as error:
        raise ConfigError(f"reward: the source of {name} is not there ({error}); {INSTEAD}") from error
    known, tree = _globals_of(function), ast.parse(source)
    if isinstance(inner := inspect.unwrap(function), FunctionType):  # the source is that of what a decorator wraps
        _refuse_closure(inner)
        _refuse_moved_defaults(inner, tree.body[0], known)
    for used in dict.fromkeys(node.id for node in ast.walk(tree) if isinstance(node, ast.Name)):
        is_builtin = hasattr(builtins, used) and known.get(used) is getattr(builtins, used)
        if used in known and not is_builtin and _is_new(used, known[used], seen):
            seen[used] = known[used]
            yield from _part(used, known[used], name, seen)
    yield source.rstrip()


def _refuse_moved_defaults(function: FunctionType, definition: ast.AST, known: Mapping[str, Any]) -> None:
    """A default is the value that its name had when the function was defined; in the file it would be today's."""
    if not isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef):
        return
    arguments, named_only = definition.args, function.__kwdefaults__ or {}
    values = [named_only.get(argument.arg) for argument in arguments.kwonlyargs]
    written = [*arguments.defaults, *arguments.kw_defaults]
    for node, value in zip(written, [*(function.__defaults__ or ()), *values], strict=True):
        if isinstance(node, ast.Name) and node.id in known and repr(known[node.id]) != repr(value):
            raise ConfigError(
                f"reward: {function.__name__} was defined with {node.id} = {value!r}, which is {known[node.id]!r} now; "
                f"define it again, or {INSTEAD}"
            )


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
