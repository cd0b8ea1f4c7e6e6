"""Find a task by the name that the config gives; `bapo.tasks.rewards` finds rewards.

    "countdown"                     a task that is shipped: bapo/tasks/countdown.py, or contrib/NAME/task.py
    "reasoning_gym:NAME"            a family that is shipped: its class gets NAME in the context
    "my_package.my_module:factory"  a user's own, or "file.py:factory": any callable that returns a task

Every mistake is a ConfigError that says what was searched for and what exists.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from bapo.config.check import read_options
from bapo.config.tree import Config
from bapo.core.errors import BapoError, ConfigError, did_you_mean
from bapo.core.plugins import Kind
from bapo.core.user_code import load_function
from bapo.tasks.base import Task, TaskContext, TaskOptions, as_task

TASK = Kind(what="task", key="task.name", options="task.options", package="bapo.tasks", base="bapo.tasks.base:Task")
SPLIT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~+-]{0,99}")
ALONE = TaskContext()
FORMER = {"tokenizer": "tokenizer", "graded_by": "rewards", "family_member": "member"}
"""Arguments that factories got by name in earlier versions -> the field of `TaskContext`."""


def task_of(config: Config) -> Task:
    """The task of a run. Raises: ConfigError."""
    context = TaskContext(
        tokenizer=config.model.path, rewards=config.task.reward_functions, for_agents=config.agents is not None
    )
    return load_task(config.task.name, config.task.options, context)


def load_task(name: str, options: Mapping[str, Any], context: TaskContext = ALONE) -> Task:
    """Make the task `name`.

    Args:
        options: the `[task.options]` table.
    Raises: ConfigError if there is no such task, an option is unknown, missing or wrong, or the factory fails.
    """
    factory, member = _factory(name)
    arguments = _arguments(name, factory, options, replace(context, member=member))
    try:
        made = factory(**arguments)
    except BapoError:
        raise
    except Exception as error:  # a user's factory may raise anything
        raise ConfigError(f"task {name!r} failed to load: {type(error).__name__}: {error}") from error
    try:
        task = as_task(made)
    except ConfigError as error:
        raise ConfigError(f"task {name!r}: {error}") from error
    _check_splits(name, task.held_out_splits)
    return task


def built_in_tasks() -> tuple[str, ...]:
    """Names of all tasks that are shipped, sorted."""
    return TASK.names()


def _factory(name: str) -> tuple[Callable[..., Any], str]:
    """What makes the task, and the name of the member of a family."""
    family, colon, member = name.partition(":")
    if colon and family not in built_in_tasks():
        return load_function(name, key=TASK.key), ""
    kind: type[Task] = TASK.find(family)
    if kind.is_family and not colon:
        raise ConfigError(f"task.name {name!r} is a family: use {name}:NAME")
    if colon and not kind.is_family:
        raise ConfigError(f"task.name {name!r}: {family} is a single task; use {family!r}")
    return kind, member


def _arguments(
    name: str, factory: Callable[..., Any], options: Mapping[str, Any], context: TaskContext
) -> dict[str, Any]:
    """What the factory takes: context and options by the types that it declares, or else the options as keywords."""
    parameters = dict(_parameters(factory))
    typed: dict[str, Any] = {}
    for parameter, kind in ((key, found.annotation) for key, found in parameters.items()):
        if kind is TaskContext:
            typed[parameter] = context
        elif isinstance(kind, type) and issubclass(kind, TaskOptions):
            typed[parameter] = read_options(kind, options, tuple(TASK.options.split(".")))
            options = {}
    _check_keywords(name, {key: found for key, found in parameters.items() if key not in typed}, options)
    return {**options, **typed}


def _check_keywords(name: str, parameters: Mapping[str, inspect.Parameter], options: Mapping[str, Any]) -> None:
    """Refuse unknown and missing options before the factory runs, so that the message can name them."""
    for former in FORMER:
        if former in parameters and former not in options:
            raise ConfigError(
                f"task {name!r}: the argument {former} is not filled by its name any more; take an argument of the "
                f"type bapo.tasks.base.TaskContext and read {FORMER[former]} of it, or set task.options.{former}"
            )
    takes_any = not parameters or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for option in options:
        if option not in parameters and not takes_any:
            raise ConfigError(
                f"task.options.{option}: task {name!r} has no such option"
                f"{did_you_mean(option, parameters)}. Known: {', '.join(parameters)}"
            )
    missing = [
        f"task.options.{parameter.name}"
        for parameter in parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and parameter.name not in options
    ]
    if missing:
        raise ConfigError(f"task {name!r} requires the options {', '.join(missing)}")


def _parameters(factory: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """With the types that annotations name, unless one is there for a type checker alone."""
    for eval_str in (True, False):
        with suppress(NameError, AttributeError, SyntaxError, TypeError, ValueError):
            return inspect.signature(factory, eval_str=eval_str).parameters
    return {}  # some callables written in C show none; the call itself will tell


def _check_splits(name: str, splits: Sequence[str]) -> None:
    """They become parts of request ids and of the names of evaluations, which the buffer refuses otherwise."""
    for split in splits:
        if not SPLIT_NAME.fullmatch(split):
            raise ConfigError(
                f"task {name!r}: the held-out split {split!r} needs a name of at most 100 letters, digits and . _ ~ + "
                "-, beginning with a letter or digit"
            )
