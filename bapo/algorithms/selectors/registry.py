"""Find the selector that the config names: `bapo/algorithms/selectors/<name>.py`, its function `make_selector`."""

from __future__ import annotations

from typing import cast

from bapo.algorithms.selectors.base import PromptPool, PromptSelector
from bapo.algorithms.selectors.settings import SelectorConfig
from bapo.core.errors import ConfigError, did_you_mean
from bapo.core.plugins import plugin, plugin_names

FACTORY = "make_selector"


def load_selector(
    name: str, settings: SelectorConfig, pool: PromptPool, *, seed: int, batch_size: int
) -> PromptSelector:
    """The selector `name` over a pool; `batch_size` is B.

    Raises: ConfigError when no file of this folder has that name and a `make_selector`, or the pool is without what it
        needs.
    """
    known = selector_names()
    if name not in known:
        raise ConfigError(
            f"algorithm.selector = {name!r}: unknown selector{did_you_mean(name, known)}; "
            f"use one of {', '.join(known)}, or add bapo/algorithms/selectors/{name}.py with a {FACTORY}"
        )
    return cast(
        PromptSelector, getattr(plugin(__package__, name), FACTORY)(settings, pool, seed=seed, batch_size=batch_size)
    )


def learns(name: str) -> bool:
    """Whether the buffer must keep what groups gave: all but those that say `LEARNS = False`."""
    return name not in selector_names() or bool(getattr(plugin(__package__, name), "LEARNS", True))


def needs_embeddings(name: str) -> bool:
    """Whether it says `EMBEDS = True`: the learner makes them before its first step."""
    return name in selector_names() and bool(getattr(plugin(__package__, name), "EMBEDS", False))


def selector_names() -> tuple[str, ...]:
    """Names of the modules of this folder that make a selector, sorted."""
    return plugin_names(__package__, FACTORY)
