"""Make the selector that the config names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bapo.algorithms.methods import SELECTOR, own_settings
from bapo.algorithms.selectors.base import PromptPool, PromptSelector


def load_selector(
    name: str, options: Mapping[str, Any], pool: PromptPool, *, seed: int, batch_size: int
) -> PromptSelector:
    """The selector `name` with its own settings over a pool; `batch_size` is B.

    Raises: ConfigError if there is none of that name, one of its settings is wrong, or the pool is without what it
        needs.
    """
    kind: type[PromptSelector] = SELECTOR.find(name)
    return kind(own_settings(SELECTOR, kind.Settings, options), pool, seed=seed, batch_size=batch_size)


def learns(name: str) -> bool:
    """Whether the buffer must keep what groups gave. Raises: ConfigError."""
    return bool(SELECTOR.find(name).learns)
