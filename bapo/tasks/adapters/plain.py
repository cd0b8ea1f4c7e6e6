"""Reward functions with BAPO's native signatures.

    def f(prompt, text) -> float                          the full prompt object
    @bapo.reward
    def f(completion, answer, **row) -> float             columns of the row by name; may be async

None: the response cannot be graded. A function may also return (reward, facts): names and numbers that are recorded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from bapo import TAKES_COLUMNS
from bapo.core.errors import ConfigError
from bapo.core.types import Prompt
from bapo.core.user_code import load_function
from bapo.tasks.base import Graded, columns_of
from bapo.tasks.user_functions import call_with, settled

PARAMETERS_OF = {"completions": "TRL", "solution_str": "verl", "data_source": "verl"}
"""Names that only functions of other frameworks have."""


def make_reward(name: str) -> Callable[[Prompt, Sequence[str]], list[Graded]]:
    """Wrap the function; called once per response. Raises: ConfigError."""
    function = load_function(name, key="reward")
    takes_columns = getattr(function, TAKES_COLUMNS, False)
    if not takes_columns:
        _check_arguments(name, function)

    def graded(prompt: Prompt, text: str) -> Any:
        if takes_columns:
            return call_with(function, {"completion": text}, columns_of(prompt))
        return function(prompt, text)

    return lambda prompt, texts: settled([graded(prompt, text) for text in texts])


def _check_arguments(name: str, function: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(function)
        for parameter, framework in PARAMETERS_OF.items():
            if parameter in signature.parameters:
                prefix = framework.lower()
                raise ConfigError(f"reward {name!r} looks like {framework}'s reward function: write {prefix}:{name}")
        signature.bind(None, "")
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"reward {name!r} must be callable as reward(prompt, text): {error}; "
            "decorate a function of columns with @bapo.reward, and use trl:... or verl:... for functions of other "
            "frameworks"
        ) from error
