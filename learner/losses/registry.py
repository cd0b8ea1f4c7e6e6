"""Find the loss that the config names: `learner/losses/<name>.py`, its function `make_loss(settings)`."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import Any, cast

import learner.losses
from bapo.config.objective import LossConfig
from learner.losses.base import PolicyLoss

FACTORY = "make_loss"


def load_loss(settings: LossConfig) -> PolicyLoss:
    """The loss `settings.name`, made from the settings. The configuration has refused unknown names."""
    return cast(PolicyLoss, getattr(_module(settings.name), FACTORY)(settings))


@cache
def loss_names() -> tuple[str, ...]:
    """Names of the modules of this folder that make a loss, sorted."""
    names = (module.name for module in pkgutil.iter_modules(learner.losses.__path__))
    return tuple(sorted(name for name in names if hasattr(_module(name), FACTORY)))


def _module(name: str) -> Any:
    return importlib.import_module(f"{learner.losses.__name__}.{name}")
