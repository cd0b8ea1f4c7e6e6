"""Find the composer that the config names: `bapo/algorithms/composers/<name>.py`, its function
`make_composer(settings)`."""

from __future__ import annotations

from typing import cast

from bapo.algorithms.composer import Composer
from bapo.algorithms.settings import AlgorithmConfig
from bapo.core.errors import ConfigError, did_you_mean
from bapo.core.plugins import plugin, plugin_names

FACTORY = "make_composer"


def load_composer(settings: AlgorithmConfig) -> Composer:
    """The composer `settings.name`, made from the settings.

    Raises: ConfigError when no file of this folder has that name and a `make_composer`.
    """
    known = composer_names()
    if settings.name not in known:
        raise ConfigError(
            f"algorithm.name = {settings.name!r}: unknown composer{did_you_mean(settings.name, known)}; "
            f"use one of {', '.join(known)}, or add bapo/algorithms/composers/{settings.name}.py with a {FACTORY}"
        )
    return cast(Composer, getattr(plugin(__package__, settings.name), FACTORY)(settings))


def composer_names() -> tuple[str, ...]:
    """Names of the modules of this folder that make a composer, sorted."""
    return plugin_names(__package__, FACTORY)
