"""Find a task by the name that the config gives; `bapo.tasks.rewards` finds rewards.

    "countdown"                     a built-in task: bapo/tasks/countdown.py, its function `make_task`
    "reasoning_gym:NAME"            a built-in family: bapo/tasks/reasoning_gym.py, called with NAME as well
    "my_package.my_module:factory"  a user's own, or "file.py:factory": any callable that returns a `Task`

Every mistake is a ConfigError that says what was searched for and what exists.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from bapo.core.errors import BapoError, ConfigError, did_you_mean
from bapo.core.plugins import plugin, plugin_names
from bapo.core.types import Prompt
from bapo.core.user_code import load_function
from bapo.tasks.base import HasExpert, HasExtract, HasImages, Task
from bapo.tasks.rewards import Reward

FACTORY = "make_task"
FAMILY = "family_member"
"""The argument of a factory that makes many tasks: what follows the colon."""
TOKENIZER = "tokenizer"
"""The argument of a factory that writes conversations as the model's chat template does."""
GRADED_BY = "graded_by"
"""The argument of a factory whose prompts keep the columns that the reward asks for."""
SPLIT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~+-]{0,99}")
_TASK_MEMBERS = ("name", "prompts", "held_out_splits", "reward", "gold")


def load_task(
    name: str, options: Mapping[str, Any], *, tokenizer: str | None = None, reward: str | None = None
) -> Task:
    """Make the task `name` with `options` as keyword arguments.

    Args:
        tokenizer: folder or Hub id of the model, for a factory that has an argument of this name.
        reward: `task.reward`, for a factory that has an argument `graded_by`.
    Raises: ConfigError if there is no such task, an option is unknown or missing, or the factory fails.
    """
    factory, options = _factory(name, options)
    given = {TOKENIZER: tokenizer, GRADED_BY: reward}
    known = _parameters(factory)
    options = {key: value for key, value in given.items() if value is not None and key in known} | dict(options)
    _check_arguments(name, factory, options)
    try:
        task = factory(**options)
    except BapoError:
        raise
    except Exception as error:  # a user's factory may raise anything
        raise ConfigError(f"task {name!r} failed to load: {type(error).__name__}: {error}") from error
    missing = [member for member in _TASK_MEMBERS if not hasattr(task, member)]
    if missing:
        raise ConfigError(
            f"task {name!r}: {type(task).__name__} is missing {', '.join(missing)}; see bapo/tasks/base.py"
        )
    _check_splits(name, task.held_out_splits)
    return cast(Task, task)


def _check_splits(name: str, splits: Sequence[str]) -> None:
    """They become parts of request ids and of the names of evaluations, which the buffer refuses otherwise."""
    for split in splits:
        if not SPLIT_NAME.fullmatch(split):
            raise ConfigError(
                f"task {name!r}: the held-out split {split!r} needs a name of at most 100 letters, digits and . _ ~ + "
                "-, beginning with a letter or digit"
            )


def with_reward(task: Task, reward: Reward) -> Task:
    """`task` with another reward; prompts and gold responses stay."""
    return _RewardedTask(task, reward)


def expert_of(task: Task, prompt: Prompt) -> str | None:
    """The expert solution of a prompt: `expert` where the task has it, else its gold response."""
    return task.expert(prompt) if isinstance(task, HasExpert) else task.gold(prompt)


def extract_of(task: Task, *, another_reward: bool = False) -> Callable[[Prompt, str], str | None] | None:
    """How a task finds the answer in a response; None when it does not say.

    Args:
        another_reward: responses are graded by another reward than the task's own. It reads another answer, unless
            the task goes by a format that holds for both (`extracts_by_gold`).
    """
    if not isinstance(task, HasExtract) or (another_reward and not getattr(task, "extracts_by_gold", False)):
        return None
    return task.extract


def built_in_tasks() -> tuple[str, ...]:
    """Names of the modules of this folder that have a `make_task`, sorted."""
    return plugin_names(__package__, FACTORY)


def _factory(name: str, options: Mapping[str, Any]) -> tuple[Callable[..., Any], Mapping[str, Any]]:
    """What makes the task, and its arguments."""
    if ":" not in name:
        factory = _built_in(name)
        if FAMILY in _parameters(factory):
            raise ConfigError(f"task.name {name!r} is a family: use {name}:NAME")
        return factory, options
    family, _, member = name.partition(":")
    if family in built_in_tasks():
        factory = _built_in(family)
        if FAMILY not in _parameters(factory):
            raise ConfigError(f"task.name {name!r}: {family} is a single task; use {family!r}")
        return factory, {**options, FAMILY: member}
    return load_function(name, key="task.name"), options


def _built_in(name: str) -> Callable[..., Any]:
    known = built_in_tasks()
    if name not in known:
        raise ConfigError(
            f"task.name: unknown task {name!r}{did_you_mean(name, known)}. Built-in: {', '.join(known)}; "
            'use "package.module:factory" for a custom task'
        )
    return cast(Callable[..., Any], getattr(plugin(__package__, name), FACTORY))


def _check_arguments(name: str, factory: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Refuse unknown and missing options before the factory runs, so that the message can name them."""
    parameters = _parameters(factory)
    takes_any = not parameters or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for option in options:
        if option not in parameters and not takes_any:
            known = ", ".join(parameter for parameter in parameters if parameter != FAMILY)
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
        raise ConfigError(f"task {name!r} requires the options {', '.join(missing)}")


def _parameters(factory: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(factory).parameters
    except (TypeError, ValueError):  # some callables written in C show none; the call itself will tell
        return {}


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

    def reward(self, prompt: Prompt, text: str) -> float | None:
        return self._reward(prompt, text)

    def rewards(self, prompt: Prompt, texts: Sequence[str]) -> Sequence[float | None]:
        return self._reward.of_group(prompt, texts)

    def gold(self, prompt: Prompt) -> str | None:
        return self._task.gold(prompt)

    def expert(self, prompt: Prompt) -> str | None:
        return expert_of(self._task, prompt)

    def image(self, digest: str) -> bytes:
        return cast(HasImages, self._task).image(digest)
