"""What a reward is to a grader, whichever framework its function was written for.

    "package.module:function", "file.py:function"   reward(prompt, text), or decorated with @bapo.reward
    "verl:file.py:compute_score"                    bapo/tasks/adapters/verl.py
    "trl:package.module.function"                   bapo/tasks/adapters/trl.py

An adapter is one file of `bapo/tasks/adapters` with `make_reward(name)`; its name is the prefix.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import cast

import bapo.tasks.adapters
from bapo.core.types import Prompt

DEFAULT_ADAPTER = "plain"
FACTORY = "make_reward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """r(x, y) in [0, 1] of a prompt and texts of responses; None where a response cannot be graded."""

    name: str
    """As the configuration writes it: the beginning of every message about it."""
    of_group: Callable[[Prompt, Sequence[str]], Sequence[float | None]]
    """[G] rewards of [G] responses to one prompt. May raise anything: it is a user's code."""

    def __call__(self, prompt: Prompt, text: str) -> float | None:
        return self.of_group(prompt, [text])[0]


def load_reward(name: str) -> Reward:
    """The reward of that name. Imports the user's code. Raises: ConfigError if it is not there or cannot be called."""
    prefix, _, rest = name.partition(":")
    adapter, function = (prefix, rest) if prefix in adapters() else (DEFAULT_ADAPTER, name)
    made = _adapter(adapter)(function)
    return Reward(name=name, of_group=made)


@cache
def adapters() -> tuple[str, ...]:
    """Names of the files of `bapo/tasks/adapters`, sorted."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(bapo.tasks.adapters.__path__)))


def _adapter(name: str) -> Callable[[str], Callable[[Prompt, Sequence[str]], Sequence[float | None]]]:
    module = importlib.import_module(f"{bapo.tasks.adapters.__name__}.{name}")
    return cast("Callable[[str], Callable[[Prompt, Sequence[str]], Sequence[float | None]]]", getattr(module, FACTORY))
