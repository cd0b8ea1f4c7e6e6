"""Make the composer that the config names."""

from __future__ import annotations

from bapo.algorithms.composer import Composer
from bapo.algorithms.methods import COMPOSER, own_settings
from bapo.algorithms.settings import AlgorithmConfig


def load_composer(settings: AlgorithmConfig) -> Composer:
    """The composer `settings.composer` with its own settings.

    Raises: ConfigError if there is none of that name, or one of its settings is wrong.
    """
    kind: type[Composer] = COMPOSER.find(settings.composer)
    return kind(settings, own_settings(COMPOSER, kind.Settings, settings.options))
