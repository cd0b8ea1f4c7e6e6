"""What a reward is to a grader, whichever framework its function was written for.

    "package.module:function", "file.py:function"   reward(prompt, text), or decorated with @bapo.reward
    "verl:file.py:compute_score"                    bapo/tasks/adapters/verl.py
    "trl:package.module.function"                   bapo/tasks/adapters/trl.py

An adapter is one file of `bapo/tasks/adapters` with `make_reward(name)`; its name is the prefix. A verifier may return
`(reward, facts)` of a response: names and numbers that are recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bapo.core.plugins import module_names, plugin
from bapo.core.types import Prompt
from bapo.tasks.base import Graded, whole_responses
from bapo.tasks.user_functions import columns_asked

ADAPTERS = "bapo.tasks.adapters"
DEFAULT_ADAPTER = "plain"
FACTORY = "make_reward"


Verifier = Callable[[Prompt, Sequence[str]], Sequence[Graded]]
"""[G] rewards r(x, y) of [G] responses to one prompt, None where a response cannot be graded. May raise anything: it is
a user's code."""


def load_reward(name: str) -> Verifier:
    """The reward of that name, which sees the beginning of an assistant's message that the prompt ends with as part of
    each response. Imports the user's code. Raises: ConfigError if it is not there or cannot be called."""
    adapter, function = _adapter(name)
    verifier: Verifier = getattr(plugin(ADAPTERS, adapter), FACTORY)(function)
    return lambda prompt, texts: verifier(prompt, whole_responses(prompt, texts))


def reward_columns(name: str) -> frozenset[str]:
    """The columns that the reward of that name asks for, as `columns_asked` has them."""
    adapter, function = _adapter(name)
    full_name = getattr(plugin(ADAPTERS, adapter), "full_name", str)
    return columns_asked(full_name(function), dots=adapter != DEFAULT_ADAPTER)


def grades_groups(name: str) -> bool:
    """Whether the function of that name is called with all responses to a prompt together."""
    return bool(getattr(plugin(ADAPTERS, _adapter(name)[0]), "GRADES_GROUPS", False))


def _adapter(name: str) -> tuple[str, str]:
    """Whose function it is, and the function's own name."""
    prefix, _, rest = name.partition(":")
    return (prefix, rest) if prefix in module_names(ADAPTERS) else (DEFAULT_ADAPTER, name)
