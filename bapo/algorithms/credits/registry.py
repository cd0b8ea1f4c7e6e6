"""Make the advantage that the config names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bapo.algorithms.credits.base import Advantage
from bapo.algorithms.methods import ADVANTAGE, own_settings


def load_advantage(name: str, options: Mapping[str, Any]) -> Advantage:
    """The advantage of that name with its own settings. Raises: ConfigError."""
    kind: type[Advantage] = ADVANTAGE.find(name)
    return kind(own_settings(ADVANTAGE, kind.Settings, options))


def needs_critic(name: str) -> bool:
    """Whether a critic gives the advantages. Raises: ConfigError."""
    return bool(ADVANTAGE.find(name).needs_critic)
