"""Find the composer that the config names: `bapo/algorithms/composers/<name>.py`, its function
`make_composer(settings)`."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import Any, cast

import bapo.algorithms.composers
from bapo.algorithms.composer import Composer
from bapo.algorithms.settings import AlgorithmConfig
from bapo.core.errors import ConfigError, did_you_mean

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
    return cast(Composer, getattr(_module(settings.name), FACTORY)(settings))


@cache
def composer_names() -> tuple[str, ...]:
    """Names of the modules of this folder that make a composer, sorted."""
    names = (module.name for module in pkgutil.iter_modules(bapo.algorithms.composers.__path__))
    return tuple(sorted(name for name in names if hasattr(_module(name), FACTORY)))


def _module(name: str) -> Any:
    return importlib.import_module(f"{bapo.algorithms.composers.__name__}.{name}")
