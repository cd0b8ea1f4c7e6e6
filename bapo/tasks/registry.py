"""Find a task or a reward by the name that the config gives.

    "countdown"                     a built-in task: bapo/tasks/countdown.py, its function `make_task`
    "my_package.my_module:factory"  a user's own: any callable that returns an object with the shape of `Task`

Every mistake is a ConfigError that says what was looked for and what is there.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, cast

import bapo.tasks
from bapo.errors import BapoError, ConfigError, did_you_mean
from bapo.tasks.base import HasExpert, HasExtract, Task
from bapo.types import Prompt

Reward = Callable[[Prompt, str], float]
"""r(x, y) in [0, 1] of a prompt and the text of a response."""

FACTORY = "make_task"
_TASK_MEMBERS = ("name", "prompts", "held_out_splits", "reward", "gold")


def load_task(name: str, options: Mapping[str, Any]) -> Task:
    """Make the task `name` with `options` as keyword arguments.

    Raises: ConfigError if there is no such task, an option is unknown or missing, or the factory fails.
    """
    factory = load_dotted(name, key="task.name") if ":" in name else _built_in(name)
    _check_arguments(name, factory, options)
    try:
        task = factory(**options)
    except BapoError:
        raise
    except Exception as error:
        raise ConfigError(f"task {name!r} could not be made: {type(error).__name__}: {error}") from error
    missing = [member for member in _TASK_MEMBERS if not hasattr(task, member)]
    if missing:
        raise ConfigError(
            f"task {name!r}: {type(task).__name__} lacks {', '.join(missing)}; bapo/tasks/base.py shows what a task has"
        )
    return cast(Task, task)


def load_reward(dotted: str) -> Reward:
    """The function at "package.module:function", called as `reward(prompt, text)`.

    Raises: ConfigError if it is not there or does not take these two arguments.
    """
    reward = load_dotted(dotted, key="reward")
    try:
        inspect.signature(reward).bind(None, "")
    except (TypeError, ValueError) as error:
        raise ConfigError(f"reward {dotted!r} must be callable as reward(prompt, text): {error}") from error
    return cast(Reward, reward)


def with_reward(task: Task, reward: Reward) -> Task:
    """`task` with another reward; prompts and gold responses stay."""
    return _RewardedTask(task, reward)


def expert_of(task: Task, prompt: Prompt) -> str | None:
    """The expert solution of a prompt: `expert` where the task has it, else its gold response."""
    return task.expert(prompt) if isinstance(task, HasExpert) else task.gold(prompt)


def extract_of(task: Task) -> Callable[[Prompt, str], str | None] | None:
    """How a task finds the answer in a response; None when it does not say."""
    return task.extract if isinstance(task, HasExtract) else None


@cache
def built_in_tasks() -> tuple[str, ...]:
    """Names of the modules of this folder that have a `make_task`, sorted."""
    names = (module.name for module in pkgutil.iter_modules(bapo.tasks.__path__))
    return tuple(sorted(name for name in names if hasattr(_module(name), FACTORY)))


def load_dotted(dotted: str, *, key: str) -> Callable[..., Any]:
    """The callable at "package.module:function"; `key` names the setting in the messages. Raises: ConfigError."""
    module_name, _, attribute = dotted.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f'{key} {dotted!r} must look like "package.module:function"')
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"{key} {dotted!r}: importing {module_name} failed: {type(error).__name__}: {error}; "
            "a module beside the config needs its folder on PYTHONPATH"
        ) from error
    found = getattr(module, attribute, None)
    if found is None:
        hint = did_you_mean(attribute, (name for name in vars(module) if not name.startswith("_")))
        raise ConfigError(f"{key} {dotted!r}: {module_name} has no {attribute!r}{hint}")
    if not callable(found):
        raise ConfigError(f"{key} {dotted!r}: {attribute} is a {type(found).__name__}, not a function")
    return cast(Callable[..., Any], found)


def _built_in(name: str) -> Callable[..., Any]:
    known = built_in_tasks()
    if name not in known:
        raise ConfigError(
            f"task.name: there is no task {name!r}{did_you_mean(name, known)}. Built in: {', '.join(known)}; "
            'a task of your own is named "package.module:factory"'
        )
    return cast(Callable[..., Any], getattr(_module(name), FACTORY))


def _module(name: str) -> Any:
    return importlib.import_module(f"{bapo.tasks.__name__}.{name}")


def _check_arguments(name: str, factory: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Refuse unknown and missing options before the factory runs, so that the message can name them."""
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # some callables written in C show none; the call itself will tell
        return
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for option in options:
        if option not in parameters and not takes_any:
            known = ", ".join(parameters) or "none"
            raise ConfigError(
                f"task.options.{option}: task {name!r} has no such option"
                f"{did_you_mean(option, parameters)}. Known: {known}"
            )
    missing = [
        f"task.options.{parameter.name}"
        for parameter in parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and parameter.name not in options
    ]
    if missing:
        raise ConfigError(f"task {name!r} needs the options {', '.join(missing)}")


class _RewardedTask:
    """Another task's prompts, graded by another function."""

    def __init__(self, task: Task, reward: Reward) -> None:
        self._task = task
        self._reward = reward
        self.name = task.name

    @property
    def held_out_splits(self) -> tuple[str, ...]:
        return self._task.held_out_splits

    def prompts(self, split: str) -> Sequence[Prompt]:
        return self._task.prompts(split)

    def reward(self, prompt: Prompt, text: str) -> float:
        return self._reward(prompt, text)

    def gold(self, prompt: Prompt) -> str | None:
        return self._task.gold(prompt)

    def expert(self, prompt: Prompt) -> str | None:
        return expert_of(self._task, prompt)
